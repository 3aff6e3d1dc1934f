"""Axes of arrays in terms of a parameter's elements: how they are split, merged and repeated.

Every axis of a view of a parameter is a tuple of `Dim`s, in row-major order, outermost first. A
reshape splits and merges them, a transpose moves them, a slice shortens them, a broadcast adds ones
of stride 0. So wherever a view meets data, its dims say which of the parameter's elements are
inputs, which are outputs, and how to lay them out as a matrix. An axis of size one has no dims.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Dim(NamedTuple):
    """A regular run of elements; stride 0 is one element repeated, or an axis of positions."""

    size: int
    stride: int

    def split(self, outer: int) -> tuple[Dim, Dim]:
        """As `outer` runs of the rest."""
        inner = self.size // outer
        return Dim(outer, self.stride * inner), Dim(inner, self.stride)


Axis = tuple[Dim, ...]
Axes = tuple[Axis, ...]


def of_parameter(shape: Sequence[int]) -> Axes:
    """The axes of a parameter itself."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return tuple((Dim(n, s),) if n > 1 else () for n, s in zip(shape, strides, strict=True))


def repeated(shape: Sequence[int]) -> Axes:
    """Axes that belong to no parameter."""
    return tuple((Dim(n, 0),) if n > 1 else () for n in shape)


def flatten(axes: Iterable[Axis]) -> Axis:
    return tuple(dim for axis in axes for dim in axis)


def size(dims: Iterable[Dim]) -> int:
    return math.prod(dim.size for dim in dims)


def total(axes: Iterable[Axis]) -> int:
    """The number of elements."""
    return size(flatten(axes))


def of_elements(dims: Iterable[Dim]) -> bool:
    """Whether none of the dims is a repetition."""
    return all(dim.stride for dim in dims)


def merge(dims: Iterable[Dim]) -> Axis:
    """The same elements in the same order, in as few dims as possible."""
    merged: list[Dim] = []
    for dim in dims:
        if merged and merged[-1].stride == dim.size * dim.stride:
            dim = Dim(merged.pop().size * dim.size, dim.stride)
        merged.append(dim)
    return tuple(merged)


def in_order(dims: Iterable[Dim]) -> Axis:
    """The same elements, in the order in which they stand in the parameter."""
    return merge(sorted(dims, key=lambda dim: -dim.stride))


def reshape(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes after a row-major reshape; `None` where a dim cannot be split evenly."""
    queue = collections.deque(flatten(axes))
    result = []
    for remaining in shape:
        axis = []
        while remaining > 1:
            dim = queue.popleft()
            if dim.size > remaining and dim.size % remaining == 0:
                dim, inner = dim.split(remaining)
                queue.appendleft(inner)
            elif remaining % dim.size:
                return None
            axis.append(dim)
            remaining //= dim.size
        result.append(merge(axis))
    return tuple(result)


def broadcast(axes: Axes, shape: Sequence[int], dimensions: Sequence[int]) -> Axes:
    """The axes after `lax.broadcast_in_dim`."""
    result = list(repeated(shape))
    for axis, dimension in zip(axes, dimensions, strict=True):
        if axis:
            result[dimension] = axis
    return tuple(result)


def spread(axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes after the broadcast that elementwise operations imply: of axes of size one."""
    axes = axes or ((),) * len(shape)
    return tuple(axis or new for axis, new in zip(axes, repeated(shape), strict=True))


def align(these: Iterable[Dim], those: Iterable[Dim]) -> list[tuple[Dim, Dim]] | None:
    """Pairs the dims of two axes of one size, splitting the larger where they differ."""
    left, right = collections.deque(these), collections.deque(those)
    pairs = []
    while left and right:
        a, b = left.popleft(), right.popleft()
        if a.size > b.size and a.size % b.size == 0:
            a, rest = a.split(b.size)
            left.appendleft(rest)
        elif b.size > a.size and b.size % a.size == 0:
            b, rest = b.split(a.size)
            right.appendleft(rest)
        elif a.size != b.size:
            return None
        pairs.append((a, b))
    return None if left or right else pairs
