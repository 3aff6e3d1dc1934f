"""Inverse square roots, which make singular values close to 1, by products alone."""

from collections.abc import Sequence
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

# Coefficients of odd polynomials x p(x^2), one a step: each has the smallest error on what those
# before it make of [0.004, 1]. All three take that interval to [0.80, 1.20]; Muon's five quintics
# leave [0.68, 1.20], and take one product more.
_POLYNOMIALS = (
    (14.666984, -142.701241, 473.975563, -608.682122, 264.682157),
    (6.101710, -14.467165, 12.421525, -4.179173, 0.478580),
    (2.486484, -1.831183, 0.436495),
)
_PRODUCTS = 11


def newton_schulz(matrix: Array) -> Array:
    r"""About :math:`A^{-1/2}` of matrices [g, m, m], finite also where an eigenvalue is 0.

    A is symmetric and positive semi-definite. If :math:`A = X^T X`, then :math:`X A^{-1/2}` has
    singular values of 1. The iteration of Newton and Schulz, :math:`X \leftarrow X p(X^T X)`, can
    do without X: A becomes p(A) A p(A), and the factors p(A) are multiplied up.
    """
    size = _positive(_trace(matrix))
    matrix = matrix / size
    square = _matmul(matrix, matrix)
    bound = _positive(jnp.sqrt(jnp.maximum(_trace(square), 0)))  # of all eigenvalues
    matrix, square = matrix / bound, square / bound**2
    root = factor = _polynomial(_POLYNOMIALS[0], matrix, square)
    for coefficients in _POLYNOMIALS[1:]:
        matrix = _matmul(_matmul(factor, matrix), factor)
        factor = _polynomial(coefficients, matrix, _matmul(matrix, matrix))
        root = _matmul(root, factor)
    return root / jnp.sqrt(size * bound)


def newton_schulz_flops(size: int) -> float:
    """Of `newton_schulz` of one matrix."""
    return _PRODUCTS * 2.0 * size**3


def _polynomial(coefficients: Sequence[float], matrix: Array, square: Array) -> Array:
    """p(A) of degree two, or of degree four with one product more."""
    a, b, c, *rest = coefficients
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None]
    low = a * identity + b * matrix
    if not rest:
        return low + c * square
    d, e = rest
    return low + _matmul(square, c * identity + d * matrix + e * square)


def _trace(matrix: Array) -> Array:
    return jnp.trace(matrix, axis1=1, axis2=2)[:, None, None]


def _positive(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)
