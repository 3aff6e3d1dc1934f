"""How a parameter's elements stand as blocks of matrices: [blocks, inputs, outputs]."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from . import _axes
from ._axes import Atom
from ._values import Cut, Site


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


Order = tuple[list[Atom], list[Atom], list[Atom]]  # of blocks, inputs and outputs


def cut_key(cuts: Sequence[Cut]) -> tuple:
    """What tells slices of one parameter apart."""
    return tuple(sorted((id(c.source), c.start, c.stop, c.stride) for c in cuts))


def order_of(site: Site) -> Order:
    assert site.roles is not None
    blocks, inputs, outputs = site.roles.leaves()
    stacked = _axes.leaves(atom for axis in site.view.stacked for atom in axis)
    return [*stacked, *blocks], inputs, outputs


def weight_layout(atoms: list[Atom], sites: list[Site], shape: tuple[int, ...]):
    """The layout that all of these sites agree on, with the order of its atoms, or `None`."""
    if any(site.roles is None for site in sites):
        return None
    kinds = {site.kind for site in sites}
    order = order_of(sites[0])
    sets = [set(map(id, part)) for part in order]
    stacked = [[id(a) for a in _axes.leaves(axis)] for axis in sites[0].view.stacked]
    for site in sites[1:]:
        same_roles = [set(map(id, part)) for part in order_of(site)] == sets
        same_loops = [[id(a) for a in _axes.leaves(axis)] for axis in site.view.stacked] == stacked
        if not (same_roles and same_loops and len(kinds) == 1):
            return None
    found = _parts(atoms, sites[0].view.cuts)
    if found is None:
        return None
    # Inputs as they stand in the parameter: its matrix is then no transposed copy.
    place = {id(part): i for i, part in enumerate(found[1])}
    order = (order[0], sorted(order[1], key=lambda atom: place.get(id(atom), -1)), order[2])
    layout = make_layout(shape, atoms, *found, order)
    return None if layout is None else (layout, order)


def _parts(atoms: list[Atom], cuts: Sequence[Cut]):
    """The bounds that each atom is cut to, and the atoms that are left."""
    by_source = {id(cut.source): cut for cut in cuts}
    if any(cut.source.parts for cut in cuts):
        return None
    bounds, parts = [], []
    for atom in atoms:
        cut = by_source.get(id(atom))
        bounds.append((cut.start, cut.stop, cut.stride) if cut else (0, atom.size, 1))
        parts += ([] if cut.atom is None else _axes.leaves([cut.atom])) if cut else [atom]
    return bounds, parts


def make_layout(shape, atoms, bounds, parts, order) -> Layout | None:
    """The layout, provided that each part has exactly one role."""
    places = {id(part): i for i, part in enumerate(parts)}
    flat = [atom for part in order for atom in part]
    if sorted(places.get(id(atom), -1) for atom in flat) != list(range(len(parts))):
        return None
    return Layout(
        shape=shape,
        atoms=tuple(atom.size for atom in atoms),
        cuts=tuple(bounds),
        parts=tuple(part.size for part in parts),
        order=tuple(places[id(atom)] for atom in flat),
        blocks=_axes.size(order[0]),
        inputs=_axes.size(order[1]),
        outputs=_axes.size(order[2]),
    )


def layout_of_bias(
    atoms: list[Atom], sites: list[Site], order: Order, shape: tuple[int, ...]
) -> Layout | None:
    """The bias as [blocks, 1, outputs], if all sites add it, all in the same way."""
    first = sites[0].bias
    keys = {site.bias and cut_key(site.bias.cuts) for site in sites}
    if first is None or len(keys) > 1 or any(s.bias is None or s.bias.scale != 1 for s in sites):
        return None
    wanted = [*order[0], *order[2]]
    mapped = [[partners(site).get(id(atom)) for atom in wanted] for site in sites]
    if any(atom is None for atom in mapped[0]) or any(m != mapped[0] for m in mapped):
        return None
    found = _parts(atoms, first.cuts)
    blocks, outputs = mapped[0][: len(order[0])], mapped[0][len(order[0]) :]
    return None if found is None else make_layout(shape, atoms, *found, (blocks, [], outputs))


def partners(site: Site) -> dict[int, Atom]:
    """The bias's atom for each atom of the weight's outputs."""
    partner: dict[int, Atom] = {}
    for unit, other in site.bias_pairs:
        partner.update({id(u): b for u, b in _axes.align([unit], [other]) or ()})
    return partner
