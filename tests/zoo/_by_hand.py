"""Layers written by hand, plainly, for the second version of every model."""

import itertools

import jax
import jax.numpy as jnp
from jax import Array


def mse(prediction: Array, target: Array) -> Array:
    return jnp.mean((prediction - target) ** 2)


def standardize(x: Array, axes: int | tuple[int, ...] = -1, eps: float = 1e-5) -> Array:
    mean = jnp.mean(x, axes, keepdims=True)
    return (x - mean) / jnp.sqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + eps)


def attend(q: Array, k: Array, v: Array, causal: bool = False) -> Array:
    """Attention over [..., tokens, heads, width]."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    if causal:
        future = jnp.triu(jnp.ones(scores.shape[-2:], bool), 1)
        scores = jnp.where(future, -jnp.inf, scores)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)


def cross_entropy(logits: Array, labels: Array) -> Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -jnp.mean(picked)


def same(size: int, kernel: int, stride: int = 1, dilation: int = 1) -> tuple[int, int]:
    """SAME padding of one axis."""
    outputs = -(-size // stride)
    total = max((outputs - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
    return total // 2, total - total // 2


def convolve(x, weight, padding, stride=None, dilation=None, groups=1, spread=None) -> Array:
    """Convolution of [batch, channels, *space] by [outputs, channels / groups, *taps], tap by tap.

    `spread` puts so many minus one zeros between neighbouring inputs: a transposed convolution.
    """
    rank = x.ndim - 2
    stride, dilation, spread = (option or (1,) * rank for option in (stride, dilation, spread))
    config = [
        (0, 0, 0),
        (0, 0, 0),
        *((lo, hi, s - 1) for (lo, hi), s in zip(padding, spread, strict=True)),
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), config)
    taps = weight.shape[2:]
    sizes = [
        (x.shape[2 + i] - (taps[i] - 1) * dilation[i] - 1) // stride[i] + 1 for i in range(rank)
    ]
    x = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    weight = weight.reshape(groups, -1, *weight.shape[1:])
    total = 0.0
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, dilation, stride, sizes, strict=True)
        )
        seen = x[(slice(None),) * 3 + window]
        total += jnp.einsum("bgi...,goi->bgo...", seen, weight[(slice(None),) * 3 + tap])
    return jnp.reshape(total, (x.shape[0], -1, *sizes))
