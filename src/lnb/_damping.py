"""Damping: what is added to the metric's diagonal, biases excluded."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ._kernels import total
from ._metric import Moments, Theta, product


def block_mean(kind: str, diagonal: Array) -> Array:
    """Mean of a diagonal [g, d] over the inputs that share a scale, with the axes kept.

    These are the inputs of a block. A scale has one input a block, so there all blocks count.
    """
    axes = (0, 1) if kind == "scale" else (1,)
    mean = total(diagonal, axes) / math.prod(diagonal.shape[i] for i in axes)
    return jnp.expand_dims(mean, axes)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["relative"]
)
@dataclasses.dataclass(frozen=True)
class Damping:
    r"""The constant :math:`\gamma` of the paper's section "Positive Semi-definite Metrics".

    Attributes:
      value: a number, possibly traced.
      relative: whether it is a multiple of the features' mean variance (with a bias: trace of the
        covariance / d) or mean power (without: trace of M / d), rather than :math:`\gamma` itself.
    """

    value: ArrayLike
    relative: bool = True

    def gamma(self, kind: str, moments: Moments, bias: bool) -> Array:
        """What to add to a neuron's diagonal: [g, 1], or [1, 1] where all blocks share it.

        This includes the rounding error of the diagonal, so that a metric without full rank
        can be factorised; it is zero only where the features are.
        """
        mean, power = moments if bias else moments._replace(first=None)
        diagonal = power if mean is None else jnp.maximum(power - mean**2, 0)
        value = jnp.asarray(self.value, power.dtype)
        rounding = jnp.finfo(power.dtype).eps * power.shape[1] * power
        if self.relative:
            return block_mean(kind, value * diagonal + rounding)
        return value + block_mean(kind, rounding)


def damped_product(features, gamma: Array, theta: Theta) -> Theta:
    r""":math:`(M + \gamma I)\theta`, with nothing added for the bias."""
    image = product(features, theta)
    return image._replace(weight=image.weight + gamma[..., None] * theta.weight)
