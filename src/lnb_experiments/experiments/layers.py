"""Layers as dictionaries of arrays, applied to the last axis of a batch of any rank."""

from math import prod

import jax
import jax.numpy as jnp
from jax import Array

Layer = dict[str, Array]


def normal(key: Array, shape: tuple[int, ...], std: float = 1.0) -> Array:
    """Normal numbers. Drawn flat, as all here: more axes take XLA seconds to compile on a CPU."""
    return std * jax.random.normal(key, (prod(shape),)).reshape(shape)


def uniform(key: Array, shape: tuple[int, ...], bound: float) -> Array:
    """Numbers uniform in [-bound, bound)."""
    return jax.random.uniform(key, (prod(shape),), minval=-bound, maxval=bound).reshape(shape)


def init_linear(key: Array, inputs: int, outputs: int, bias: bool = True) -> Layer:
    """Equinox's default: all entries uniform, at most 1 / sqrt(inputs) in size."""
    weight_key, bias_key = jax.random.split(key)
    bound = inputs**-0.5
    layer = {"weight": uniform(weight_key, (inputs, outputs), bound)}
    if bias:
        layer["bias"] = uniform(bias_key, (outputs,), bound)
    return layer


def linear(layer: Layer, x: Array) -> Array:
    """x W + b, without b where the layer has none."""
    y = x @ layer["weight"]
    return add_bias(y, layer["bias"]) if "bias" in layer else y


def add_bias(x: Array, bias: Array) -> Array:
    """A bias added to the last axis, its rank made equal as strict rank promotion asks."""
    return x + jnp.expand_dims(bias, range(x.ndim - 1))


def layer_norm(x: Array, epsilon: float = 1e-5) -> Array:
    """Mean 0 and variance 1 over the last axis. Nothing is learned."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + epsilon)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Sets entries to zero with probability `rate`; without a key, none."""
    if key is None or rate == 0:
        return x
    # Two entries share a random word: on a CPU, drawing one each is a quarter of a step's time.
    words = jax.random.bits(key, ((x.size + 1) // 2,))
    numbers = jax.lax.bitcast_convert_type(words, jnp.uint16).ravel()[: x.size]
    kept = numbers.reshape(x.shape) >= round(rate * 2**16)
    return jnp.where(kept, x / (1 - rate), 0.0)


def split_key(key: Array | None, count: int) -> list[Array | None]:
    """Keys for the parts of a network; no key has no parts."""
    return [None] * count if key is None else list(jax.random.split(key, count))
