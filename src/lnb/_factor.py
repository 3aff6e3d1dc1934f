"""Factors of the metric, with the bias eliminated instead of a column of ones appended."""

from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ._metric import Theta

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Factor(NamedTuple):
    r"""The metric as :math:`M = L L^T`, paper, section "Update Properties".

    With the bias put first, :math:`L = \begin{pmatrix} 1 & 0 \\ \mu & C \end{pmatrix}` where
    :math:`\Sigma = C C^T` is the covariance; without a bias, :math:`E[x x^T] = C C^T = L L^T`.

    Attributes:
      mean: [g, d], or None where there is no bias.
      root: C, lower triangular [g, d, d] or diagonal [g, d].
    """

    mean: Array | None
    root: Array

    def lower_solve(self, theta: Theta) -> Theta:
        """:math:`L^{-1}` times a gradient."""
        weight, bias = theta
        if bias is not None and self.mean is not None:
            weight = weight - self.mean[:, :, None] * bias[:, None, :]
        return Theta(self._root_solve(weight, transpose=False), bias)

    def upper_solve(self, theta: Theta) -> Theta:
        """:math:`L^{-T}` times a whitened vector: a direction."""
        weight, bias = self._root_solve(theta.weight, transpose=True), theta.bias
        if bias is not None and self.mean is not None:
            bias = bias - _matmul(self.mean[:, None, :], weight)[:, 0, :]
        return Theta(weight, bias)

    def solve(self, theta: Theta) -> Theta:
        """:math:`M^{-1}` times a gradient."""
        return self.upper_solve(self.lower_solve(theta))

    def _root_solve(self, weight: Array, transpose: bool) -> Array:
        if self.root.ndim == 2:
            return weight / self.root[:, :, None]
        return lax.linalg.triangular_solve(
            self.root, weight, left_side=True, lower=True, transpose_a=transpose
        )
