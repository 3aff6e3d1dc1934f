"""Damping: what is added to the metric's diagonal, biases excluded."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ._kernels import total
from ._metric import Moments, Theta, product
from ._neurons import Neuron


def block_mean(neuron: Neuron, diagonal: Array) -> Array:
    """Mean of a diagonal [g, d] over the inputs that share a scale, with the axes kept.

    These are the inputs of a block. A scale has one input a block, so there all blocks count.
    """
    axes = (0, 1) if neuron.kind == "scale" else (1,)
    mean = total(diagonal, axes) / math.prod(diagonal.shape[i] for i in axes)
    return jnp.expand_dims(mean, axes)


class Damping(NamedTuple):
    r"""The constant :math:`\gamma` of the paper's section "Positive Semi-definite Metrics".

    Attributes:
      value: a number, possibly traced.
      relative: whether it is a multiple of the features' mean variance (with a bias: trace of the
        covariance / d) or mean power (without: trace of M / d), rather than :math:`\gamma` itself.
    """

    value: ArrayLike
    relative: bool = True

    def gamma(self, neuron: Neuron, moments: Moments, bias: bool) -> Array:
        """What to add to the diagonal: [g, 1], or [1, 1] where all blocks share it.

        This includes the rounding error of the diagonal, so that a metric without full rank
        can be factorised; it is zero only where the features are.
        """
        mean, power = moments if bias else moments._replace(first=None)
        diagonal = power if mean is None else jnp.maximum(power - mean**2, 0)
        value = jnp.asarray(self.value, power.dtype)
        scale = block_mean(neuron, diagonal) if self.relative else jnp.ones((1, 1), power.dtype)
        rounding = jnp.finfo(power.dtype).eps * power.shape[1] * block_mean(neuron, power)
        return value * scale + rounding


def damped_product(features, gamma: Array, theta: Theta) -> Theta:
    r""":math:`(M + \gamma I)\theta`, with nothing added for the bias."""
    image = product(features, theta)
    return image._replace(weight=image.weight + gamma[..., None] * theta.weight)
