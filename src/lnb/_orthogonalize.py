"""Inverse square roots, which make singular values close to 1, by products alone."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from ._metric import matmul

# Coefficients of odd polynomials x p(x^2), one a step. The first has the smallest error on
# [0.009, 1], the second, but for its scale, on what that makes of it: singular values end in
# [0.68, 1.20], as those of Muon do after five quintics with almost twice the products.
_POLYNOMIALS = (
    (14.030877, -134.360839, 444.172592, -569.111995, 247.143185),
    (5.83110211, -24.80119376, 46.84321547, -41.74451062, 18.76865388, -4.12531796, 0.35237997),
)


def newton_schulz(matrix: Array) -> Array:
    r"""About :math:`A^{-1/2}` of matrices [g, m, m], finite also where an eigenvalue is 0.

    A is symmetric and positive semi-definite. If :math:`A = X^T X`, then :math:`X A^{-1/2}` has
    singular values of 1. The iteration of Newton and Schulz, :math:`X \leftarrow X p(X^T X)`, can
    do without X: A becomes p(A) A p(A), and the factors p(A) are multiplied up.
    """
    size = _positive(jnp.trace(matrix, axis1=1, axis2=2)[:, None, None])
    matrix = matrix / size
    square = matmul(matrix, matrix)
    bound = _positive(jnp.sum(square**2, (1, 2), keepdims=True)) ** 0.25  # of all eigenvalues
    matrix, square = matrix / bound, square / bound**2
    root = factor = _polynomial(_POLYNOMIALS[0], matrix, square)
    for coefficients in _POLYNOMIALS[1:]:
        matrix = matmul(matmul(factor, matrix), factor)
        factor = _polynomial(coefficients, matrix, matmul(matrix, matrix))
        root = matmul(root, factor)
    return root / jnp.sqrt(size * bound)


def _polynomial(coefficients: Sequence[float], matrix: Array, square: Array) -> Array:
    """p(A) of degree four, or of degree six with one product more."""
    powers = [jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None], matrix, square]
    if len(coefficients) > 5:
        powers.append(matmul(square, matrix))
    degree = len(powers) - 1
    low, high = coefficients[:degree], coefficients[degree:]
    combine = lambda part: sum(c * power for c, power in zip(part, powers, strict=False))
    return combine(low) + matmul(powers[-1], combine(high))


def _positive(x: Array) -> Array:
    return jnp.where(x > 0, x, 1)
