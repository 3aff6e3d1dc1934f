"""The metric's inverse, with the bias eliminated instead of a column of ones appended.

It is made once in a while and used at every step. So what is kept are explicit inverses: products
with them keep all cores or an accelerator busy, triangular solves do not.
"""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ._metric import Theta

LEAF = 640  # the largest matrix that is factorised as a whole: smaller ones take long to compile
TOGETHER = 2**20  # entries of a batch of matrices that are inverted at once, not one by one

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
_solve = partial(lax.linalg.triangular_solve, left_side=True, lower=True)


class Inverse(NamedTuple):
    r""":math:`M^{-1}`, in blocks.

    With the bias put first, :math:`M^{-1} = \begin{pmatrix} 1 + \mu^T P \mu & -(P \mu)^T \\
    -P \mu & P \end{pmatrix}` where :math:`P = \Sigma^{-1}` is the inverse of the covariance;
    without a bias, :math:`M^{-1} = P = E[x x^T]^{-1}`.

    Attributes:
      matrix: P, [g, d, d], or [g, d] if it is diagonal.
      column: :math:`P \mu`, [g, d], or None where there is no bias.
      corner: :math:`1 + \mu^T P \mu`, [g], or None.
    """

    matrix: Array
    column: Array | None
    corner: Array | None

    @classmethod
    def of(cls, mean: Array | None, matrix: Array) -> "Inverse":
        if mean is None:
            return cls(matrix, None, None)
        column = _multiply(matrix, mean[:, :, None])[:, :, 0]
        return cls(matrix, column, 1 + jnp.vecdot(mean, column, precision=lax.Precision.HIGHEST))

    def solve(self, theta: Theta) -> Theta:
        """:math:`M^{-1}` times a gradient."""
        weight, bias = _multiply(self.matrix, theta.weight), theta.bias
        if bias is None or self.column is None or self.corner is None:
            return Theta(weight, bias)
        shared = _matmul(self.column[:, None, :], theta.weight)[:, 0, :]
        weight = weight - self.column[:, :, None] * bias[:, None, :]
        return Theta(weight, self.corner[:, None] * bias - shared)


class Factor(NamedTuple):
    r"""The metric as :math:`M = L L^T`, paper, section "Update Properties".

    With the bias put first, :math:`L = \begin{pmatrix} 1 & 0 \\ \mu & C \end{pmatrix}` where
    :math:`\Sigma = C C^T` is the covariance; without a bias, :math:`E[x x^T] = C C^T = L L^T`.

    Attributes:
      mean: of the features, [g, d], or None where there is no bias.
      whitener: :math:`C^{-1}`, lower triangular [g, d, d] or diagonal [g, d].
    """

    mean: Array | None
    whitener: Array

    def lower_solve(self, theta: Theta) -> Theta:
        """:math:`L^{-1}` times a gradient."""
        return Theta(_multiply(self.whitener, _centre(self.mean, theta)), theta.bias)

    def upper_solve(self, theta: Theta) -> Theta:
        """:math:`L^{-T}` times a whitened vector: a direction."""
        diagonal = self.whitener.ndim == 2
        weight = _multiply(self.whitener if diagonal else self.whitener.mT, theta.weight)
        return Theta(weight, _uncentre(self.mean, weight, theta.bias))

    def solve(self, theta: Theta) -> Theta:
        """:math:`M^{-1}` times a gradient."""
        return self.upper_solve(self.lower_solve(theta))


def invert(metric: Array) -> Array:
    r"""The inverse of positive definite matrices [g, d, d], or diagonals [g, d]; NaN if not.

    By halves, so that almost all of the work is in products:

    .. math::
      \begin{pmatrix} A & B^T \\ B & D \end{pmatrix}^{-1} = \begin{pmatrix}
      A^{-1} + E^T S^{-1} E & -E^T S^{-1} \\ -S^{-1} E & S^{-1} \end{pmatrix},
      \quad E = B A^{-1}, \quad S = D - E B^T.
    """
    if metric.ndim == 2:
        return 1 / jnp.where(metric > 0, metric, jnp.nan)
    if len(metric) > 1 and metric.size > TOGETHER:  # in little memory
        return lax.map(lambda x: invert(x[None])[0], metric)
    if metric.shape[-1] <= LEAF:
        root = _cholesky(metric)
        return _solve(root, _solve(root, _identity_like(metric)), transpose_a=True).mT
    a, b, d = _halves(metric)
    first = invert(a)
    e = _matmul(b, first)
    second = invert(d - _matmul(e, b.mT))
    corner = _matmul(second, e)
    return _from_blocks(first + _matmul(e.mT, corner), -corner.mT, -corner, second)


def inverse_root(metric: Array) -> Array:
    r""":math:`C^{-1}` of metrics :math:`C C^T`, likewise by halves.

    .. math::
      \begin{pmatrix} C_1 & 0 \\ E & C_2 \end{pmatrix}^{-1} = \begin{pmatrix}
      C_1^{-1} & 0 \\ -C_2^{-1} E C_1^{-1} & C_2^{-1} \end{pmatrix},
      \quad E = B C_1^{-T}, \quad C_2 C_2^T = D - E E^T.
    """
    if metric.ndim == 2:
        return lax.rsqrt(jnp.where(metric > 0, metric, jnp.nan))
    if len(metric) > 1 and metric.size > TOGETHER:
        return lax.map(lambda x: inverse_root(x[None])[0], metric)
    if metric.shape[-1] <= LEAF:
        return _solve(_cholesky(metric), _identity_like(metric))
    a, b, d = _halves(metric)
    first = inverse_root(a)
    e = _matmul(b, first.mT)
    second = inverse_root(d - _matmul(e, e.mT))
    corner = _matmul(second, _matmul(e, first))
    return _from_blocks(first, jnp.zeros_like(b.mT), -corner, second)


def invert_flops(size: int) -> float:
    """Of `invert`: of a factorisation and two solves, or of two halves and four products."""
    return 7 / 3 * size**3 if size <= LEAF else 2 * invert_flops(size // 2) + size**3


def _cholesky(metric: Array) -> Array:
    """L of symmetric matrices. LAPACK reads by columns, so that their transposes need no copy."""
    return lax.linalg.cholesky(metric.mT, symmetrize_input=False)


def _identity_like(metric: Array) -> Array:
    return jnp.broadcast_to(jnp.eye(metric.shape[-1], dtype=metric.dtype), metric.shape)


def _halves(metric: Array) -> tuple[Array, Array, Array]:
    half = metric.shape[-1] // 2
    return metric[:, :half, :half], metric[:, half:, :half], metric[:, half:, half:]


def _from_blocks(a: Array, b: Array, c: Array, d: Array) -> Array:
    rows = [jnp.concatenate(row, axis=-1) for row in ((a, b), (c, d))]
    return jnp.concatenate(rows, axis=-2)


def _multiply(matrix: Array, weight: Array) -> Array:
    return matrix[:, :, None] * weight if matrix.ndim == 2 else _matmul(matrix, weight)


def _centre(mean: Array | None, theta: Theta) -> Array:
    """What is left of a gradient's weight for centred features."""
    if theta.bias is None or mean is None:
        return theta.weight
    return theta.weight - mean[:, :, None] * theta.bias[:, None, :]


def _uncentre(mean: Array | None, weight: Array, bias: Array | None) -> Array | None:
    """The bias that goes with a direction's weight, once features are not centred."""
    if bias is None or mean is None:
        return bias
    return bias - _matmul(mean[:, None, :], weight)[:, 0, :]
