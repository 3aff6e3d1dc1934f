"""What becomes of an array's axes under reshapes, transposes and broadcasts.

Every axis is a tuple of *atoms*, in row-major order. A parameter starts with one atom an axis; a
reshape merges and splits them, a transpose moves them, a broadcast adds atoms that belong to no
parameter. Wherever a view of a weight meets data, its atoms tell which of the weight's elements
are inputs, which are outputs, and how to lay them out as a matrix. Axes of size one have no atoms.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from typing import Literal

Label = Literal["parameter", "broadcast", "position"]


class Atom:
    """An indivisible factor of an axis, until a reshape divides it after all."""

    __slots__ = ("label", "parts", "size")

    def __init__(self, size: int, label: Label):
        self.size = size
        self.label: Label = label
        self.parts: tuple[Atom, Atom] | None = None

    def split(self, outer: int) -> tuple[Atom, Atom]:
        """Divides the atom, in every view that holds it, into `outer` times the rest."""
        self.parts = (Atom(outer, self.label), Atom(self.size // outer, self.label))
        return self.parts


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


def fresh(shape: Sequence[int], label: Label) -> Axes:
    """The axes of a new array: an atom each."""
    return tuple((Atom(size, label),) if size > 1 else () for size in shape)


def leaves(atoms: Iterable[Atom]) -> list[Atom]:
    """The atoms as they are now, after all divisions."""
    found: list[Atom] = []
    for atom in atoms:
        found.extend(leaves(atom.parts) if atom.parts else [atom])
    return found


def size(atoms: Iterable[Atom]) -> int:
    return math.prod(atom.size for atom in atoms)


def labels(atoms: Iterable[Atom]) -> set[str]:
    return {atom.label for atom in atoms}


def flatten(axes: Axes) -> list[Atom]:
    return [leaf for axis in axes for leaf in leaves(axis)]


def reshape(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """The axes after a row-major reshape; `None` where an atom cannot be divided evenly."""
    queue = collections.deque(flatten(axes))
    result = []
    for remaining in shape:
        axis = []
        while remaining > 1:
            atom = queue.popleft()
            if atom.size > remaining and atom.size % remaining == 0:
                atom, inner = atom.split(remaining)
                queue.appendleft(inner)
            elif remaining % atom.size:
                return None
            axis.append(atom)
            remaining //= atom.size
        result.append(tuple(axis))
    return tuple(result)


def broadcast(axes: Axes, shape: Sequence[int], dimensions: Sequence[int]) -> Axes:
    """The axes after `lax.broadcast_in_dim`."""
    result = list(fresh(shape, "broadcast"))
    for axis, dimension in zip(axes, dimensions, strict=True):
        if axis:
            result[dimension] = axis
    return tuple(result)


def spread(axes: Axes, shape: Sequence[int]) -> Axes:
    """The axes after the broadcast that elementwise operations imply: of axes of size one."""
    axes = axes or ((),) * len(shape)
    return tuple(axis or new for axis, new in zip(axes, fresh(shape, "broadcast"), strict=True))


def align(these: Iterable[Atom], those: Iterable[Atom]) -> list[tuple[Atom, Atom]] | None:
    """Pairs the atoms of two axes of one size, dividing the larger where they differ."""
    left, right = collections.deque(leaves(these)), collections.deque(leaves(those))
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
