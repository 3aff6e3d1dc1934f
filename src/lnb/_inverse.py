"""The metric's inverse, with the bias eliminated instead of a column of ones appended.

It is made once in a while and used at every step. So what is kept are explicit inverses: products
with them keep all cores or an accelerator busy, triangular solves do not.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._metric import Theta
from ._packed import WHOLE, Halves, from_blocks, whole

LEAF = 640  # the largest matrix that is factorised as a whole
TOGETHER = 2**20  # entries of a batch of matrices that are inverted at once, not one by one

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Inverse(NamedTuple):
    r""":math:`M^{-1}`, with the bias eliminated.

    Attributes:
      mean: of the features, [g, d], or None where there is no bias.
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
        # To XLA a batch of one is no batch: it would make a copy of the mean for it.
        one = len(self.mean) == 1
        mean, weight = (self.mean, theta.weight[0]) if one else (self.mean[:, None], theta.weight)
        shift = _matmul(mean, weight).reshape(theta.bias.shape)
        return theta._replace(bias=theta.bias - shift)


class Factor(Inverse):
    r"""The same as :math:`M^{-1} = L^{-T} L^{-1}`, paper, section "Update Properties".

    With the bias put first, :math:`L = \begin{pmatrix} 1 & 0 \\ \mu & C \end{pmatrix}` where
    :math:`\Sigma = C C^T` is the covariance; without a bias, :math:`E[x x^T] = C C^T = L L^T`. Here
    `matrix` is :math:`C^{-1}`, lower triangular or diagonal.
    """

    def solve(self, theta: Theta) -> Theta:
        return self.unwhiten(Theta(self.whiten(theta), theta.bias))

    def whiten(self, theta: Theta) -> Array:
        """The weight of :math:`L^{-1}` times a gradient; its bias stays as it is."""
        return _multiply(self.matrix, self.centre(theta))

    def unwhiten(self, theta: Theta) -> Theta:
        """:math:`L^{-T}` times a whitened vector: a direction."""
        transposed = self.matrix if self.matrix.ndim == 2 else self.matrix.mT
        return self.uncentre(theta._replace(weight=_multiply(transposed, theta.weight)))


def invert(metric: Array | Halves) -> Array:
    r"""The inverse of positive definite matrices, or of diagonals [g, d]; NaN if not.

    By halves, so that almost all of the work is in products:

    .. math::
      \begin{pmatrix} A & B^T \\ B & D \end{pmatrix}^{-1} = \begin{pmatrix}
      A^{-1} + E^T S^{-1} E & -E^T S^{-1} \\ -S^{-1} E & S^{-1} \end{pmatrix},
      \quad E = B A^{-1}, \quad S = D - E B^T.
    """
    if not isinstance(metric, Halves):
        if metric.ndim == 2:
            return 1 / jnp.where(metric > 0, metric, jnp.nan)
        return _one_by_one(lambda x: _square(_root(x.T)), metric)

    def inverse(metric: Halves) -> Array:
        a, b, d = metric
        # LAPACK reads by columns: to it, a whole matrix is its own transpose. Of a triangle XLA
        # would make a transposed copy, and transpose the packed matrix to and fro at every step.
        first = _square(_root(whole(a).T))
        e = _matmul(b, first)
        second = _square(_root((d - _matmul(e, b.T)).T))
        corner = _matmul(second, e)
        parts = first + _matmul(e.T, corner), -corner.T, -corner, second
        return _nan_unless_finite(second, corner) * from_blocks(*parts)

    return _one_by_one(inverse, metric)


def inverse_root(metric: Array | Halves) -> Array:
    r""":math:`C^{-1}` of metrics :math:`C C^T`, likewise by halves.

    .. math::
      \begin{pmatrix} C_1 & 0 \\ E & C_2 \end{pmatrix}^{-1} = \begin{pmatrix}
      C_1^{-1} & 0 \\ -C_2^{-1} E C_1^{-1} & C_2^{-1} \end{pmatrix},
      \quad E = B C_1^{-T}, \quad C_2 C_2^T = D - E E^T.
    """
    if isinstance(metric, Halves):
        return _one_by_one(lambda x: _root_by_halves(whole(x.a).T, x.b, x.d.T), metric)
    if metric.ndim == 2:
        return lax.rsqrt(jnp.where(metric > 0, metric, jnp.nan))
    return _one_by_one(lambda x: _root(x.T), metric)


def invert_flops(size: int) -> float:
    """Of `invert`: a factorisation, a solve and a product, or those of two halves and four more."""
    leaf = lambda size: 10 / 3 * size**3
    return leaf(size) if size <= WHOLE else 2 * leaf(size / 2) + size**3


def _one_by_one(function: Callable[[Any], Array], metric: Any) -> Array:
    """A function of a matrix, for a batch of them; for a large one, in little memory.

    To XLA a product of single matrices is also one with a transpose; of a batch it makes a copy.
    """
    leaves = jax.tree.leaves(metric)
    if len(leaves[0]) == 1:
        return function(jax.tree.map(lambda leaf: leaf[0], metric))[None]
    if sum(leaf.size for leaf in leaves) <= TOGETHER:
        return jax.vmap(function)(metric)
    return lax.map(function, metric)


def _root(metric: Array) -> Array:
    """The inverse root of a symmetric matrix of which the lower triangle counts."""
    size = metric.shape[-1]
    if size > LEAF:
        half = size // 2
        return _root_by_halves(metric[:half, :half], metric[half:, :half], metric[half:, half:])
    identity = jnp.eye(size, dtype=metric.dtype)
    lower = lax.linalg.cholesky(metric, symmetrize_input=False)
    return lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)


def _root_by_halves(a: Array, b: Array, d: Array) -> Array:
    first = _root(a)
    e = _matmul(b, first.T)
    second = _root(d - _matmul(e, e.T))
    corner = _matmul(second, _matmul(e, first))
    parts = first, jnp.zeros_like(b.T), -corner, second
    return _nan_unless_finite(second, corner) * from_blocks(*parts)


def _nan_unless_finite(*parts: Array) -> Array:
    """1, or NaN: of an inverse, also where its first half succeeded and the second did not."""
    return jnp.where(jnp.isfinite(sum(map(jnp.sum, parts))), 1, jnp.nan)


def _square(root: Array) -> Array:
    """C^-T C^-1: a product, where a second triangular solve would keep one core busy."""
    return _matmul(root.T, root)


def _multiply(matrix: Array, weight: Array) -> Array:
    return matrix[:, :, None] * weight if matrix.ndim == 2 else _matmul(matrix, weight)
