"""How a parameter's elements stand as blocks of matrices: [blocks, inputs, outputs]."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parameter (or a slice of one) laid out as blocks of (inputs x outputs) matrices.

    Reshape to `atoms`, slice by `cuts`, reshape to `parts`, transpose by `order`, reshape to
    (blocks, inputs, outputs).
    """

    shape: tuple[int, ...]
    atoms: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]
    parts: tuple[int, ...]
    order: tuple[int, ...]
    blocks: int
    inputs: int
    outputs: int

    @classmethod
    def flat(cls, shape: tuple[int, ...], *, outputs: bool = False) -> Layout:
        """One column of all elements (or one row of them, of a bias)."""
        size = math.prod(shape)
        matrix = (1, 1, size) if outputs else (1, size, 1)
        return cls(shape, (size,), ((0, size, 1),), (size,), (0,), *matrix)

    @property
    def whole(self) -> bool:
        return all((0, n, 1) == cut for n, cut in zip(self.atoms, self.cuts, strict=True))

    def to_matrix(self, array: Array) -> Array:
        array = array.reshape(self.atoms)[self._index()].reshape(self.parts)
        return array.transpose(self.order).reshape(self.blocks, self.inputs, self.outputs)

    def from_matrix(self, matrix: Array) -> Array:
        """The inverse: zero outside of the slice."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        array = matrix.reshape([self.parts[i] for i in self.order]).transpose(inverse)
        if not self.whole:
            lengths = [len(range(*cut)) for cut in self.cuts]
            blank = jnp.zeros(self.atoms, matrix.dtype)
            array = blank.at[self._index()].set(array.reshape(lengths))
        return array.reshape(self.shape)

    def _index(self) -> tuple[slice, ...]:
        return tuple(slice(*cut) for cut in self.cuts)
