"""Arithmetic in forms that XLA compiles fast.

On a CPU a step takes as long to compile as LLVM has code to optimise for it. Two things are worth
a detour. To select whole arrays by a scalar makes LLVM write every loop twice; a weight of 0 or 1
does not. A sum of fewer than some thousand numbers becomes three kernels; larger ones are left to a
library, with no code at all. What is jitted here is traced once for all parameters of one shape.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

LARGE = 4096  # numbers whose sum is left to a library


@jax.jit
def mix(weight: Array, new: Array, old: Array) -> Array:
    """The mean of two arrays, in the dtype of the old."""
    weight = weight.astype(old.dtype)
    return (1 - weight) * old + weight * new.astype(old.dtype)


@jax.jit
def finite_or_zero(x: Array) -> Array:
    """Entries that are not finite, as zeros: no weight times NaN is NaN."""
    return lax.select(jnp.isfinite(x), x, jnp.zeros_like(x))


@functools.partial(jax.jit, static_argnums=1)
def total(x: Array, axes: tuple[int, ...] | None = None) -> Array:
    """The sum over some axes or all.

    Small arrays get zeros added, along an axis of their own: that one is never sharded.
    """
    axes = tuple(range(x.ndim)) if axes is None else axes
    if 0 < x.size < LARGE:
        x = jnp.pad(x[..., None], [*[(0, 0)] * x.ndim, (0, LARGE // x.size)])
        axes = (*axes, x.ndim - 1)
    return jnp.sum(x, axes)


@jax.jit
def dot(left: Array, right: Array) -> Array:
    """The inner product of two arrays."""
    return total(jnp.conj(left) * right)
