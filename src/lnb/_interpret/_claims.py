"""From uses to claims: which parameters form which neuron, and which form none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from . import _axes
from ._axes import Atom
from ._layout import (
    Layout,
    Order,
    cut_key,
    layout_of_bias,
    make_layout,
    order_of,
    partners,
    weight_layout,
)
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
    order: Order = dataclasses.field(default_factory=lambda: ([], [], []))
    fed_alike: bool = False  # slices of the weight, all fed by the first site's features
    orientations: list[Claim] = dataclasses.field(default_factory=list)  # without a gram: its sites
    # as neurons of their own, where each has a matrix form; M is the sum of theirs

    @property
    def feeding(self) -> list[Site]:
        """The sites whose features make up M."""
        return self.sites[:1] if self.fed_alike else self.sites

    @property
    def sharded(self) -> bool:
        return any(site.scope.sharded for site in self.sites)


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
    tangled = [_tangled(weight, bias, sites, atoms, shapes)]
    groups: dict[tuple, list[Site]] = {}
    for site in sites:
        groups.setdefault(cut_key(site.view.cuts), []).append(site)
    merged = _merge(lineage, atoms, list(groups.values()), shapes, bias)
    if merged is not None:
        return [merged]
    if not _disjoint(list(groups)):
        return tangled
    claims = []
    for key, group in groups.items():
        found = weight_layout(atoms, group, shapes[weight])
        if found is None:
            return tangled
        layout, order = found
        bias_layout = None
        if bias is not None:
            bias_layout = layout_of_bias(
                _axes.flatten(lineage.axes[bias]), group, order, shapes[bias]
            )
            if bias_layout is None:
                return tangled
        suffix = _suffix(atoms, key) if len(groups) > 1 else ""
        claims.append(_canonical(weight, bias, group, layout, bias_layout, order, suffix))
    keys = {cut_key(group[0].bias.cuts) for group in groups.values() if group[0].bias}
    return (
        claims if bias is None or (len(keys) == len(groups) and _disjoint(list(keys))) else tangled
    )


def _canonical(
    weight: int,
    bias: int | None,
    sites: list[Site],
    layout: Layout,
    bias_layout: Layout | None,
    order: Order,
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
    weight: int,
    bias: int | None,
    sites: list[Site],
    atoms: list[Atom],
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
        n=math.ceil(n),
        has_gram=False,
        orientations=[] if bias is not None else _orientations(weight, sites, atoms, shapes),
    )


def _orientations(
    weight: int, sites: list[Site], atoms: list[Atom], shapes: Sequence[tuple[int, ...]]
) -> list[Claim]:
    claims = []
    for site in sites:
        found = weight_layout(atoms, [site], shapes[weight])
        if found is None:
            return []
        layout, order = found
        claims.append(_canonical(weight, None, [site], layout, None, order, ""))
    return claims


# -- slices of one weight -----------------------------------------------------------------------


def _disjoint(keys: Sequence[tuple]) -> bool:
    """Whether no two of the slices share an element."""
    boxes = [{source: range(*bounds) for source, *bounds in key} for key in keys]
    for i, these in enumerate(boxes):
        for those in boxes[:i]:
            shared = these.keys() & those.keys()
            if not any(not set(these[s]) & set(those[s]) for s in shared):
                return False
    return True


def _merge(
    lineage: Lineage,
    atoms: list[Atom],
    groups: list[list[Site]],
    shapes: Sequence[tuple[int, ...]],
    bias: int | None,
) -> Claim | None:
    """Slices by output unit that are fed by one array, and together make up the weight.

    They are one neuron: q, k and v cut out of one matrix.
    """
    sites = [group[0] for group in groups]
    first = sites[0]
    if len(groups) < 2 or any(len(group) > 1 or len(group[0].view.cuts) != 1 for group in groups):
        return None
    cuts = [site.view.cuts[0] for site in sites]
    source = cuts[0].source
    fed_alike = all(
        site.kind == "dense"
        and site.roles is not None
        and site.features == first.features
        and site.scope is first.scope
        and cut.source is source
        for site, cut in zip(sites, cuts, strict=True)
    )
    if not fed_alike or sum(len(range(c.start, c.stop, c.stride)) for c in cuts) != source.size:
        return None
    blocks, inputs, outputs = order_of(first)
    inside = {id(atom) for atom in _axes.leaves([cuts[0].atom] if cuts[0].atom else [])}
    if any([id(a) for a in order_of(site)[1]] != [id(a) for a in inputs] for site in sites):
        return None
    order = (blocks, inputs, [source, *(a for a in outputs if id(a) not in inside)])
    bounds = [(0, atom.size, 1) for atom in atoms]
    weight = first.view.parameter
    layout = make_layout(shapes[weight], atoms, bounds, atoms, order)
    bias_layout = None
    if bias is not None:
        bias_layout = _merged_bias(lineage, sites, cuts, order, bias, shapes[bias])
        if bias_layout is None:
            return None
    if layout is None or not _disjoint([cut_key([cut]) for cut in cuts]):
        return None
    claim = _canonical(weight, bias, [first], layout, bias_layout, order, "")
    return dataclasses.replace(claim, sites=sites, fed_alike=True)


def _merged_bias(
    lineage: Lineage,
    sites: list[Site],
    cuts: list[Cut],
    order: Order,
    bias: int,
    shape: tuple[int, ...],
) -> Layout | None:
    """The layout of a bias that is cut as its weight is."""
    bounds = lambda cut: (cut.start, cut.stop, cut.stride)
    partner = partners(sites[0])
    for site, cut in zip(sites, cuts, strict=True):
        view = site.bias
        if view is None or view.scale != 1 or [bounds(c) for c in view.cuts] != [bounds(cut)]:
            return None
        partner[id(cut.source)] = view.cuts[0].source
    mapped = [partner.get(id(atom)) for atom in (*order[0], *order[2])]
    atoms = _axes.flatten(lineage.axes[bias])
    if any(atom is None for atom in mapped):
        return None
    split = (mapped[: len(order[0])], [], mapped[len(order[0]) :])
    return make_layout(shape, atoms, [(0, atom.size, 1) for atom in atoms], atoms, split)


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
