"""How a parameter's elements stand as blocks of matrices: [blocks, inputs, outputs]."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
from jax import Array

from .dims import Axis, Dim, size


class _Steps(NamedTuple):
    """Reshape to `sizes`, take the slices `cuts`, transpose by `order`."""

    sizes: tuple[int, ...]
    cuts: tuple[slice, ...]
    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A parameter, or a slice of one, as blocks of (inputs x outputs) matrices.

    Attributes:
      shape: of the parameter.
      offset: the parameter's first element that is in the matrix, counted in row-major order.
      dims: which elements the blocks, the inputs and the outputs tell apart.
    """

    shape: tuple[int, ...]
    offset: int
    dims: tuple[Axis, Axis, Axis]

    @classmethod
    def column(cls, shape: tuple[int, ...]) -> Layout:
        """All elements as inputs of one output."""
        return cls(shape, 0, ((), (Dim(math.prod(shape), 1),), ()))

    @classmethod
    def row(cls, shape: tuple[int, ...]) -> Layout:
        """All elements as outputs of one input."""
        return cls(shape, 0, ((), (), (Dim(math.prod(shape), 1),)))

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Its shape: blocks, inputs, outputs."""
        blocks, inputs, outputs = map(size, self.dims)
        return blocks, inputs, outputs

    @property
    def is_regular(self) -> bool:
        """Whether a reshape, slices and a transpose lead to the matrix."""
        return self._steps is not None

    @functools.cached_property
    def _steps(self) -> _Steps | None:
        dims = [dim for part in self.dims for dim in part]
        outermost_first = sorted(range(len(dims)), key=lambda i: -dims[i].stride)
        rest, offset = math.prod(self.shape), self.offset
        sizes, cuts = [], []
        for place, i in enumerate(outermost_first):
            length, stride = dims[i]
            unit = math.gcd(stride, rest)
            inside = (dims[j] for j in outermost_first[place + 1 :])
            if offset % unit + sum((n - 1) * s for n, s in inside) >= unit:
                return None
            start, step = offset // unit, stride // unit
            sizes.append(rest // unit)
            cuts.append(slice(start, start + (length - 1) * step + 1, step))
            rest, offset = unit, offset % unit
        if rest > 1:
            sizes.append(rest)
            cuts.append(slice(offset, offset + 1, 1))
        places = [outermost_first.index(i) for i in range(len(dims))]
        return _Steps(tuple(sizes), tuple(cuts), (*places, *range(len(dims), len(sizes))))

    def to_matrix(self, array: Array) -> Array:
        assert self._steps is not None
        sizes, cuts, order = self._steps
        return array.reshape(sizes)[cuts].transpose(order).reshape(self.matrix)

    def from_matrix(self, matrix: Array) -> Array:
        """The inverse: zero outside of the slice."""
        parameter = jax.ShapeDtypeStruct(self.shape, matrix.dtype)
        (array,) = jax.linear_transpose(self.to_matrix, parameter)(matrix)
        return array

    def ranges(self) -> list[range]:
        """Which indices of each of the parameter's axes are inside."""
        dims = [dim for part in self.dims for dim in part]
        last = self.offset + sum((n - 1) * stride for n, stride in dims)
        ranges = []
        for axis, n in enumerate(self.shape):
            unit = math.prod(self.shape[axis + 1 :])
            steps = [s // unit for _, s in dims if unit <= s < unit * n and s % unit == 0]
            start, stop = self.offset // unit % n, last // unit % n + 1
            ranges.append(range(start, stop, min(steps, default=1)))
        return ranges
