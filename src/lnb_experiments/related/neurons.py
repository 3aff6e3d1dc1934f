"""What the methods share: parameters taken apart into neurons, and a step of both."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from lnb import Neurons
from lnb._metric import Moments, Theta
from lnb._parameters import join, split


def centred(moments: Moments, bias: bool) -> tuple[Array, Array]:
    """The mean and the covariance of features.

    Without a bias, and of a lookup, whose second moment is diagonal, these are 0 and E[x x^T].
    """
    first, second = moments
    assert first is not None
    if not bias or second.ndim == 2:
        return jnp.zeros_like(first), second
    return first, second - first[:, :, None] * first[:, None, :]


def damped(matrix: Array, damping: ArrayLike) -> Array:
    """A metric [blocks, inputs, inputs], or its diagonal [blocks, inputs], plus damping."""
    if matrix.ndim == 2:
        return matrix + damping
    return matrix + damping * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None]


def multiply(matrix: Array, weight: Array) -> Array:
    """A matrix [blocks, inputs, inputs], or a diagonal [blocks, inputs], times a weight."""
    if matrix.ndim == 2:
        return matrix[:, :, None] * weight
    return jnp.matmul(matrix, weight, precision=lax.Precision.HIGHEST)


def descend(params: Any, directions: Any, rate: Any) -> Any:
    """Parameters minus the rate times directions, in the parameters' own dtypes."""
    return jax.tree.map(lambda p, d: p - jnp.asarray(rate, p.dtype) * d, params, directions)


def direct(neurons: Neurons, gradients: Any, solved: Mapping[str, Theta]) -> Any:
    """The gradients, with the directions of neurons in the place of theirs."""
    thetas, rest = split(neurons, gradients)
    return join(neurons, gradients, {**thetas, **solved}, rest)
