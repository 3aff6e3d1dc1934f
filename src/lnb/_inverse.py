"""The metric's inverse, with the bias eliminated instead of a column of ones appended.

It is made once in a while and used at every step. So what is kept is an explicit inverse: products
with it keep all cores or an accelerator busy, triangular solves do not.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jax import Array, lax

from ._metric import Damping, Moments, Theta, block_mean, damping_constant, matmul, variances


class Inverse(NamedTuple):
    r""":math:`M^{-1}`, with the bias eliminated (paper, section "Update Properties").

    Attributes:
      mean: of the features, [g, d], or `None` where there is no bias.
      matrix: the inverse of their covariance (without a bias, of E[x x^T]), [g, d, d], or [g, d] if
        it is diagonal.
    """

    mean: Array | None
    matrix: Array

    def solve(self, theta: Theta) -> Theta:
        """:math:`M^{-1}` times a gradient."""
        return self.uncentre(Theta(_multiply(self.matrix, self.centre(theta)), theta.bias))

    def centre(self, theta: Theta) -> Array:
        """What is left of a gradient's weight for centred features."""
        if theta.bias is None or self.mean is None:
            return theta.weight
        return theta.weight - self.mean[:, :, None] * theta.bias[:, None, :]

    def uncentre(self, theta: Theta) -> Theta:
        """A change for centred features as one for features that are not."""
        if theta.bias is None or self.mean is None:
            return theta
        shift = matmul(self.mean[:, None], theta.weight)[:, 0]
        return theta._replace(bias=theta.bias - shift)

    def whiten(self, centred: Array) -> Array:
        """K^T times a centred gradient, where K K^T is the matrix."""
        return _multiply(self._root.mT if self._root.ndim == 3 else self._root, centred)

    def unwhiten(self, whitened: Array) -> Array:
        """K times a whitened change: one for centred features."""
        return _multiply(self._root, whitened)

    @property
    def _root(self) -> Array:
        if self.matrix.ndim == 2:
            return jnp.sqrt(self.matrix)
        return lax.linalg.cholesky(self.matrix)


def invert(moments: Moments, kind: str, bias: bool, damping: Damping) -> Array:
    r"""The inverse of what is left of M + damping without the bias; NaN if that fails.

    That is the covariance :math:`\Sigma + \gamma I`, without a bias :math:`E[x x^T] + \gamma I`.
    """
    mean, second = moments.first if bias else None, moments.second
    gamma = damping_constant(damping, kind, moments, bias)
    # A single example has no variance. Without damping of its own, M would then be rounding errors.
    variance, rounding = variances(kind, moments, bias)
    gamma = jnp.where(variance + gamma > 2 * rounding, gamma, jnp.nan)
    if second.ndim == 2:
        diagonal = second + gamma if mean is None else second - mean**2 + gamma
        return 1 / jnp.where(diagonal > 0, diagonal, jnp.nan)
    if mean is not None:
        second = second - mean[:, :, None] * mean[:, None, :]
    return inverse(second + gamma[..., None] * jnp.eye(second.shape[-1], dtype=second.dtype)[None])


def inverse(matrix: Array) -> Array:
    """The inverse of positive definite matrices [g, d, d]; NaN where the factorisation fails."""
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    factor = functools.partial(lax.linalg.cholesky, symmetrize_input=False)
    invert = lambda x: jax.scipy.linalg.cho_solve((factor(x), True), identity)
    # A batch of one takes more memory and time than a matrix.
    return invert(matrix[0])[None] if len(matrix) == 1 else jax.vmap(invert)(matrix)


def preconditioner(
    kind: str, moments: Moments, bias: bool, shrinkage: float, damping: Damping
) -> Inverse:
    r"""The paper's preconditioner P, as the inverse of a metric (section "Online Learning").

    With a bias, :math:`P = \tilde W \tilde W^T` where the covariance is replaced by its diagonal
    and the mean is kept; without one, the inverse of the diagonal of :math:`E[x x^T]`. The
    variances are first shrunk towards their mean.

    Args:
      kind: the kind of neuron.
      moments: running means of x and x * x; `first` may be None, which reads as zero.
      bias: whether the neuron has a bias.
      shrinkage: 0 keeps every input's own variance, 1 gives all inputs their mean.
      damping: what the metric's diagonal is raised by.

    Returns:
      A diagonal inverse.
    """
    square = moments.square
    mean = jnp.zeros_like(square) if moments.first is None else moments.first
    variance = jnp.maximum(square - mean**2, 0)
    diagonal = (1 - shrinkage) * variance + shrinkage * block_mean(kind, variance)
    if not bias:
        diagonal = diagonal + mean**2
    diagonal = diagonal + damping_constant(damping, kind, moments, bias)
    # Only an input that is dead together with its whole block has no variance left: leave it alone.
    return Inverse(mean if bias else None, 1 / jnp.where(diagonal > 0, diagonal, 1))


def _multiply(matrix: Array, weight: Array) -> Array:
    return matrix[:, :, None] * weight if matrix.ndim == 2 else matmul(matrix, weight)
