"""Symmetric matrices in half the memory.

The rectangular full packed form: of the two triangles on the diagonal of [[A, B^T], [B, D]], one is
laid into the gap that the other leaves. Small matrices are not worth it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

WHOLE = 192  # the largest matrix that is left as it is


class Halves(NamedTuple):
    """Symmetric matrices [[A, B^T], [B, D]]; of A the lower triangle counts, of D the upper."""

    a: Array
    b: Array
    d: Array


def pack(matrix: Array) -> Array:
    """Symmetric matrices [g, d, d] as [g, d + 1, d / 2], rounded up if d is odd."""
    size = matrix.shape[-1]
    if size <= WHOLE:
        return matrix
    odd = size % 2
    matrix = jnp.pad(matrix, ((0, 0), (0, odd), (0, odd)))
    half = matrix.shape[-1] // 2
    a, b, d = matrix[:, :half, :half], matrix[:, half:, :half], matrix[:, half:, half:]
    down, up = jnp.pad(a, ((0, 0), (1, 0), (0, 0))), jnp.pad(d, ((0, 0), (0, 1), (0, 0)))
    triangles = jnp.where(jnp.tri(half + 1, half, -1, dtype=bool), down, up)
    return jnp.concatenate([triangles, b[:, : half - odd]], axis=1)


def is_packed(matrix: Array) -> bool:
    """Whether these are packed matrices; if not, they are square."""
    return matrix.shape[-2] != matrix.shape[-1]


def halves(packed: Array) -> Halves:
    """The parts of packed matrices."""
    half, rest = packed.shape[-1], packed.shape[-2] - packed.shape[-1] - 1
    return Halves(packed[:, 1 : half + 1], packed[:, half + 1 :], packed[:, :rest, :rest])


def diagonal(matrix: Array) -> Array:
    """The diagonals [g, d] of symmetric matrices, packed or not."""
    entries, step = matrix.reshape(len(matrix), -1), matrix.shape[-1] + 1
    if not is_packed(matrix):
        return entries[:, ::step]
    half, rest = step - 1, matrix.shape[-2] - step
    ends = half + half * step, rest * step  # of A's diagonal, and of D's
    return jnp.concatenate([entries[:, half : ends[0] : step], entries[:, : ends[1] : step]], 1)


def unpack(matrix: Array) -> Array:
    """Symmetric matrices [g, d, d], packed or not."""
    if not is_packed(matrix):
        return matrix
    a, b, d = halves(matrix)
    return from_blocks(whole(a), b.mT, b, whole(d.mT))


def whole(lower: Array) -> Array:
    """Symmetric matrices from their lower triangle."""
    return jnp.tril(lower) + jnp.tril(lower, -1).mT


def from_blocks(a: Array, b: Array, c: Array, d: Array) -> Array:
    """[[A, B], [C, D]]."""
    rows = [jnp.concatenate(row, axis=-1) for row in ((a, b), (c, d))]
    return jnp.concatenate(rows, axis=-2)
