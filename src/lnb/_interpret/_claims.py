"""From uses to claims: which parameters form which neuron, and which form none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from . import _axes
from ._axes import Atom
from ._layout import Layout
from ._lineage import Lineage
from ._values import Cut, Site


@dataclasses.dataclass(eq=False)
class Claim:
    """A neuron to be: a weight (or a slice of it), the sites it is applied at, its bias."""

    kind: str
    weight: int
    bias: int | None
    sites: list[Site]
    layout: Layout
    bias_layout: Layout | None
    d_in: int
    d_out: int
    n: int
    has_gram: bool
    suffix: str = ""  # tells slices of one weight apart
    order: tuple[list[Atom], list[Atom], list[Atom]] = ((), (), ())  # type: ignore[assignment]
    repeated: int = 0  # further sites, fed by the first one's features

    @property
    def sharded(self) -> bool:
        return any(site.scope.sharded for site in self.sites)

    @property
    def n_sites(self) -> int:
        return len(self.sites) + self.repeated


def make_claims(
    lineage: Lineage,
    shapes: Sequence[tuple[int, ...]],
    excluded: Sequence[bool],
    is_complex: Sequence[bool],
) -> tuple[list[Claim], dict[int, str]]:
    """The claims in the order of their first use, and for each unclaimed parameter the reason."""
    unclaimed = {
        i: "excluded" if excluded[i] else "it is complex" if is_complex[i] else _reason(lineage, i)
        for i in range(len(shapes))
    }
    unclaimed = {i: reason for i, reason in unclaimed.items() if reason}
    weights = [
        i
        for i, uses in lineage.uses.items()
        if i not in unclaimed and any(use.kind == "site" for use in uses)
    ]
    biases = _biases(lineage, set(weights), set(unclaimed))
    claims: list[Claim] = []
    for weight in weights:
        sites = [use.site for use in lineage.uses[weight] if use.site and use.kind == "site"]
        claims += _weight_claims(lineage, weight, sites, shapes, biases)
    for claim in [c for c in claims if c.sharded and not c.has_gram]:
        claims.remove(claim)
        unclaimed[claim.weight] = "it has no matrix form inside a shard_map"
    claimed = {claim.weight for claim in claims} | {claim.bias for claim in claims}
    for i, shape in enumerate(shapes):
        if i not in claimed and i not in unclaimed:
            claims.append(_identity(i, shape))
    return claims, unclaimed


def _reason(lineage: Lineage, parameter: int) -> str:
    uses = lineage.uses.get(parameter, [])
    if not uses:
        return "the loss makes no use of it that meets data"
    for use in uses:
        if use.kind == "nonlinear":
            return use.reason
    return uses[0].reason if all(use.kind == "opaque" for use in uses) else ""


def _identity(parameter: int, shape: tuple[int, ...]) -> Claim:
    size = math.prod(shape)
    return Claim(
        "identity", parameter, None, [], Layout.flat(shape), None, size, size, 1, has_gram=False
    )


def _biases(lineage: Lineage, weights: set[int], unclaimed: set[int]) -> dict[int, int]:
    """Weight by bias. A bias serves one weight, a weight has one bias; all others are let go."""
    owner: dict[int, int] = {}
    for parameter, uses in lineage.uses.items():
        owners = {use.site.view.parameter for use in uses if use.kind == "bias" and use.site}
        only = all(use.kind == "bias" for use in uses)
        if only and len(owners) == 1 and owners <= weights and parameter not in unclaimed:
            owner[parameter] = owners.pop()
    for weight in set(owner.values()):
        rivals = [bias for bias, w in owner.items() if w == weight]
        for bias in rivals[1:]:
            del owner[bias]
    for uses in lineage.uses.values():
        for use in uses:
            site = use.site
            if site and site.bias is not None and site.bias.parameter not in owner:
                site.bias = None
    return owner


def _weight_claims(
    lineage: Lineage,
    weight: int,
    sites: list[Site],
    shapes: Sequence[tuple[int, ...]],
    biases: dict[int, int],
) -> list[Claim]:
    bias = next((b for b, w in biases.items() if w == weight), None)
    atoms = _axes.flatten(lineage.axes[weight])
    groups: dict[tuple, list[Site]] = {}
    for site in sites:
        groups.setdefault(_cut_key(site.view.cuts), []).append(site)
    layouts = [_layout(atoms, group, shapes[weight]) for group in groups.values()]
    if all(layouts) and _disjoint(list(groups), atoms):
        merged = _merge(lineage, atoms, list(groups.values()), shapes[weight])
        if merged is not None and bias is None:
            return [merged]
        claims = []
        for (key, group), (layout, order) in zip(groups.items(), layouts, strict=True):  # type: ignore[misc]
            with_bias = bias is not None and all(site.bias is not None for site in group)
            bias_layout = None
            if with_bias and len(groups) == 1:
                assert bias is not None
                bias_layout = _bias_layout(lineage, bias, group[0], order, shapes[bias])
            if bias is not None and bias_layout is None:
                return [_tangled(lineage, weight, bias, sites, shapes)]
            suffix = _suffix(atoms, key) if len(groups) > 1 else ""
            claims.append(_canonical(weight, bias, group, layout, bias_layout, order, suffix))
        return claims
    return [_tangled(lineage, weight, bias, sites, shapes)]


def _canonical(
    weight: int,
    bias: int | None,
    sites: list[Site],
    layout: Layout,
    bias_layout: Layout | None,
    order: tuple[list[Atom], list[Atom], list[Atom]],
    suffix: str,
) -> Claim:
    kind = sites[0].kind
    stacked = _axes.size(_axes.leaves(a for axis in sites[0].view.stacked for a in axis))
    inner = layout.blocks // stacked
    d_out = layout.outputs * (inner if kind in {"conv", "scale"} else 1)
    n = sum(site.count() for site in sites)
    return Claim(
        kind, weight, bias, sites, layout, bias_layout, layout.inputs, d_out, n, True, suffix, order
    )


def _tangled(
    lineage: Lineage,
    weight: int,
    bias: int | None,
    sites: list[Site],
    shapes: Sequence[tuple[int, ...]],
) -> Claim:
    """A weight used in two orientations, or through views with no matrix form."""
    kinds = {site.kind for site in sites}
    first = sites[0]
    if first.roles is not None:
        _, inputs, outputs = first.roles.leaves()
        d_in, d_out = _axes.size(inputs), _axes.size(outputs)
    else:
        size = math.prod(shapes[weight])
        d_out = shapes[weight][-1] if shapes[weight] else 1
        d_in = size // d_out
    n = sum(site.count() * site.view.fraction for site in sites)
    return Claim(
        kind=first.kind if len(kinds) == 1 else "dense",
        weight=weight,
        bias=bias,
        sites=sites,
        layout=Layout.flat(shapes[weight]),
        bias_layout=None if bias is None else Layout.flat(shapes[bias], outputs=True),
        d_in=d_in,
        d_out=d_out,
        n=max(1, round(n)),
        has_gram=False,
    )


# -- layouts ------------------------------------------------------------------------------------


def _cut_key(cuts: Sequence[Cut]) -> tuple:
    return tuple(sorted((id(c.source), c.start, c.stop, c.stride) for c in cuts))


def _order(site: Site) -> tuple[list[Atom], list[Atom], list[Atom]]:
    assert site.roles is not None
    blocks, inputs, outputs = site.roles.leaves()
    stacked = _axes.leaves(atom for axis in site.view.stacked for atom in axis)
    return [*stacked, *blocks], inputs, outputs


def _layout(atoms: list[Atom], sites: list[Site], shape: tuple[int, ...]):
    """The layout that all of these sites agree on, with the order of its atoms, or `None`."""
    if any(site.roles is None for site in sites):
        return None
    kinds = {site.kind for site in sites}
    order = _order(sites[0])
    sets = [set(map(id, part)) for part in order]
    stacked = [[id(a) for a in _axes.leaves(axis)] for axis in sites[0].view.stacked]
    for site in sites[1:]:
        same_roles = [set(map(id, part)) for part in _order(site)] == sets
        same_loops = [[id(a) for a in _axes.leaves(axis)] for axis in site.view.stacked] == stacked
        if not (same_roles and same_loops and len(kinds) == 1):
            return None
    cuts = {id(cut.source): cut for cut in sites[0].view.cuts}
    if any(cut.source.parts for cut in cuts.values()):
        return None
    parts: list[Atom] = []
    bounds = []
    for atom in atoms:
        cut = cuts.get(id(atom))
        bounds.append((cut.start, cut.stop, cut.stride) if cut else (0, atom.size, 1))
        parts += ([] if cut.atom is None else _axes.leaves([cut.atom])) if cut else [atom]
    layout = _make(shape, atoms, bounds, parts, order)
    return None if layout is None else (layout, order)


def _make(shape, atoms, bounds, parts, order) -> Layout | None:
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


def _bias_layout(
    lineage: Lineage,
    bias: int,
    site: Site,
    order: tuple[list[Atom], list[Atom], list[Atom]],
    shape: tuple[int, ...],
) -> Layout | None:
    partner: dict[int, Atom] = {}
    for unit, other in site.bias_pairs:
        aligned = _axes.align([unit], [other])
        if aligned is None:
            return None
        partner.update({id(u): b for u, b in aligned})
    blocks, _, outputs = order
    if not all(id(atom) in partner for atom in (*blocks, *outputs)):
        return None
    atoms = _axes.flatten(lineage.axes[bias])
    bounds = [(0, atom.size, 1) for atom in atoms]
    mapped = ([partner[id(a)] for a in blocks], [], [partner[id(a)] for a in outputs])
    return _make(shape, atoms, bounds, atoms, mapped)


# -- slices of one weight -----------------------------------------------------------------------


def _disjoint(keys: Sequence[tuple], atoms: list[Atom]) -> bool:
    """Whether no two of the slices share an element."""
    boxes = [{source: range(*bounds) for source, *bounds in key} for key in keys]
    for i, these in enumerate(boxes):
        for those in boxes[:i]:
            shared = these.keys() & those.keys()
            if not any(not set(these[s]) & set(those[s]) for s in shared):
                return False
    return True


def _merge(
    lineage: Lineage, atoms: list[Atom], groups: list[list[Site]], shape: tuple[int, ...]
) -> Claim | None:
    """Slices by output unit that are fed by one array, and together make up the weight.

    They are one neuron: q, k and v cut out of one matrix.
    """
    firsts = [group[0] for group in groups]
    first = firsts[0]
    cuts = [site.view.cuts for site in firsts]
    if len(groups) < 2 or any(len(g) > 1 for g in groups) or any(len(c) != 1 for c in cuts):
        return None
    source = cuts[0][0].source
    sizes = [len(range(c[0].start, c[0].stop, c[0].stride)) for c in cuts]
    same = all(
        site.feature is first.feature and site.scope is first.scope and c[0].source is source
        for site, c in zip(firsts, cuts, strict=True)
    )
    if not same or sum(sizes) != source.size or first.kind != "dense":
        return None
    order = _order(first)
    inside = _axes.leaves([cuts[0][0].atom]) if cuts[0][0].atom else []
    if any(id(atom) in {id(a) for a in (*order[0], *order[1])} for atom in inside):
        return None
    whole = (
        order[0],
        order[1],
        [source, *(a for a in order[2] if id(a) not in {id(i) for i in inside})],
    )
    layout = _make(shape, atoms, [(0, a.size, 1) for a in atoms], atoms, whole)
    # All sites are given the same features in the same order of inputs.
    if layout is None or any(s.feature_axes != first.feature_axes for s in firsts[1:]):
        inputs = [[id(a) for a in _order(site)[1]] for site in firsts]
        if layout is None or any(i != inputs[0] for i in inputs):
            return None
    claim = _canonical(first.view.parameter, None, [first], layout, None, whole, "")
    claim.repeated = len(firsts) - 1
    return claim


def _suffix(atoms: list[Atom], key: tuple) -> str:
    bounds = {source: (start, stop, stride) for source, start, stop, stride in key}

    def text(atom: Atom) -> str:
        if id(atom) not in bounds:
            return ":"
        start, stop, stride = bounds[id(atom)]
        if stop - start == 1:
            return str(start)
        return f"{start}:{stop}" + (f":{stride}" if stride > 1 else "")

    texts = [text(atom) for atom in atoms]
    while texts and texts[-1] == ":":
        texts.pop()
    return f"[{', '.join(texts)}]"
