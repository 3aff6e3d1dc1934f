"""Symmetric matrices in half the memory.

The rectangular full packed form: of the two triangles on the diagonal of [[A, B^T], [B, D]], one is
laid into the gap that the other leaves.
"""

import jax.numpy as jnp
from jax import Array


def pack(matrix: Array) -> Array:
    """Symmetric matrices [g, d, d] as [g, d + 1, d / 2], rounded up if d is odd."""
    odd = matrix.shape[-1] % 2
    matrix = jnp.pad(matrix, ((0, 0), (0, odd), (0, odd)))
    half = matrix.shape[-1] // 2
    a, b, d = matrix[:, :half, :half], matrix[:, half:, :half], matrix[:, half:, half:]
    down, up = jnp.pad(a, ((0, 0), (1, 0), (0, 0))), jnp.pad(d, ((0, 0), (0, 1), (0, 0)))
    triangles = jnp.where(jnp.tri(half + 1, half, -1, dtype=bool), down, up)
    return jnp.concatenate([triangles, b[:, : half - odd]], axis=1)


def is_packed(matrix: Array) -> bool:
    """Whether these are packed matrices; if not, they are square."""
    return matrix.shape[-2] != matrix.shape[-1]


def unpack(matrix: Array) -> Array:
    """Symmetric matrices [g, d, d], packed or not."""
    if not is_packed(matrix):
        return matrix
    half = matrix.shape[-1]
    odd = 1 - matrix.shape[-2] % 2
    down, up, b = matrix[:, 1 : half + 1], matrix[:, :half], matrix[:, half + 1 :]
    b = jnp.pad(b, ((0, 0), (0, odd), (0, 0)))
    lower = jnp.tri(half, dtype=bool)
    a, d = jnp.where(lower, down, down.mT), jnp.where(lower, up.mT, up)
    rows = jnp.concatenate([a, b.mT], axis=2), jnp.concatenate([b, d], axis=2)
    size = 2 * half - odd
    return jnp.concatenate(rows, axis=1)[:, :size, :size]
