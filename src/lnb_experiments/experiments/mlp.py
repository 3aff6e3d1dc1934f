"""Multi-layer perceptrons with tanh units."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import Array

from .layers import Layer, linear, normal


def init_mlp(key: Array, widths: tuple[int, ...]) -> list[Layer]:
    """Glorot-normal weights and zero biases between layers of these widths."""
    shapes = list(pairwise(widths))
    keys = jax.random.split(key, len(shapes))
    return [
        {"weight": normal(key, shape, std=(2 / sum(shape)) ** 0.5), "bias": jnp.zeros(shape[1])}
        for key, shape in zip(keys, shapes, strict=True)
    ]


def mlp(layers: list[Layer], x: Array) -> Array:
    """Linear layers with tanh between them: the last one's output is linear."""
    for layer in layers[:-1]:
        x = jnp.tanh(linear(layer, x))
    return linear(layers[-1], x)
