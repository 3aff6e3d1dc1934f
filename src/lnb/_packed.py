"""Symmetric matrices in half the memory.

The rectangular full packed form: of the two triangles on the diagonal of [[A, B^T], [B, D]], one is
laid into the gap that the other leaves. Small matrices are not worth it.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

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
    half = (size + 1) // 2
    # The left half, one row down, has the triangle of A and all of B; D's goes above them.
    left = jnp.pad(matrix[:, :, :half], ((0, 0), (1, 0), (0, 0)))
    odd = size % 2
    right = jnp.pad(matrix[:, half:, half:], ((0, 0), (0, half + 1), (0, odd)))
    return jnp.where(jnp.tri(size + 1, half, -1, dtype=bool)[None], left, right)


def is_packed(matrix: Array) -> bool:
    """Whether these are packed matrices; if not, they are square."""
    return matrix.shape[-2] != matrix.shape[-1]


def halves(packed: Array) -> Halves:
    """The parts of packed matrices."""
    half, rest = packed.shape[-1], packed.shape[-2] - packed.shape[-1] - 1
    return Halves(packed[:, 1 : half + 1], packed[:, half + 1 :], packed[:, :rest, :rest])


def diagonal(matrix: Array) -> Array:
    """The diagonals [g, d] of symmetric matrices, packed or not."""
    half = matrix.shape[-1]
    if not is_packed(matrix):
        return matrix.reshape(len(matrix), -1)[:, :: half + 1]
    # In rows one longer than they are, the triangles begin with D's diagonal and end with A's.
    ends = matrix[:, : half + 1].reshape(len(matrix), half, half + 1)[:, :, ::half]
    both = ends[:, :, ::-1].mT.reshape(len(matrix), 2 * half)
    return both[:, : matrix.shape[-2] - 1]


def unpack(matrix: Array) -> Array:
    """Symmetric matrices [g, d, d], packed or not."""
    if not is_packed(matrix):
        return matrix
    a, b, d = halves(matrix)
    return from_blocks(whole(a), b.mT, b, whole(d.mT))


def whole(lower: Array) -> Array:
    """Symmetric matrices from their lower triangle."""
    is_lower = jnp.broadcast_to(jnp.tri(lower.shape[-1], dtype=bool), lower.shape)
    return lax.select(is_lower, lower, lower.mT)


def from_blocks(a: Array, b: Array, c: Array, d: Array) -> Array:
    """[[A, B], [C, D]], of one size, as a sum: one kernel, with all that the parts come from."""
    rest = [(0, 0)] * (a.ndim - 2)
    sizes = [(0, d.shape[-1]), (a.shape[-1], 0)]  # zeros after the first, before the second
    places = [[*rest, row, column] for row in sizes for column in sizes]
    return sum(map(jnp.pad, (b, c, d), places[1:]), jnp.pad(a, places[0]))
