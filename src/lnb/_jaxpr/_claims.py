"""From uses to claims: which parameters form which neuron, and which form none."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from .._features import Arrangement, Dim, Layout, SiteRows, dims
from ._values import Site
from ._walk import Lineage


@dataclasses.dataclass(eq=False)
class Claim:
    """A neuron to be.

    Attributes:
      weight: the index of the parameter.
      bias: that of its bias.
      sites: where it is applied.
      layout: the weight, or a slice of it, as a matrix; a column if it has no matrix form.
      rows: what each site's features mean; `None` where a site has no matrix form.
      n: the number of positions.
      suffix: what tells slices of one weight apart.
      has_matrix: whether all sites see the weight as the same matrix: then M is one Gram matrix.
    """

    kind: str
    weight: int
    bias: int | None
    sites: list[Site]
    layout: Layout
    bias_layout: Layout | None
    rows: tuple[SiteRows, ...] | None
    d_in: int
    d_out: int
    n: int
    suffix: str = ""
    has_matrix: bool = False

    @property
    def sources(self) -> frozenset:
        """What tells its features, as rows, from those of other neurons."""
        rows = self.rows or ()
        return frozenset(
            (s.fed_by, r.arrangement) for s, r in zip(self.sites, rows, strict=bool(rows))
        )


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
        bias = next((b for b, w in biases.items() if w == weight), None)
        claims += _weight_claims(weight, bias, sites, shapes)
    claimed = {claim.weight for claim in claims} | {claim.bias for claim in claims}
    for i, shape in enumerate(shapes):
        if i not in claimed and i not in unclaimed:
            size = math.prod(shape)
            column = Layout.column(shape)
            claims.append(Claim("identity", i, None, [], column, None, (), size, size, 1))
    return claims, unclaimed


def _reason(lineage: Lineage, parameter: int) -> str:
    uses = lineage.uses.get(parameter, [])
    if not uses:
        return "the loss makes no use of it that meets data"
    for use in uses:
        if use.kind == "nonlinear":
            return use.reason
    return uses[0].reason if all(use.kind == "opaque" for use in uses) else ""


def _biases(lineage: Lineage, weights: set[int], unclaimed: set[int]) -> dict[int, int]:
    """Weight by bias. A bias serves one weight, a weight has one bias; all others are let go."""
    owner: dict[int, int] = {}
    for parameter, uses in lineage.uses.items():
        owners = {use.site.view.parameter for use in uses if use.kind == "bias" and use.site}
        only = all(use.kind == "bias" for use in uses)
        first = owners.isdisjoint(owner.values())
        if only and len(owners) == 1 and owners <= weights and parameter not in unclaimed and first:
            owner[parameter] = owners.pop()
    for uses in lineage.uses.values():
        for use in uses:
            site = use.site
            if site and site.bias is not None and site.bias.parameter not in owner:
                site.bias = None
    return owner


def _weight_claims(
    weight: int, bias: int | None, sites: list[Site], shapes: Sequence[tuple[int, ...]]
) -> list[Claim]:
    """One claim for the weight, or one for each of its slices."""
    bias_shape = () if bias is None else shapes[bias]
    rows = [_site_rows(site, shapes[weight], bias_shape) for site in sites]
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return [_irregular(weight, bias, sites, None, shapes)]
    views = list(dict.fromkeys((row.layout, row.bias_layout) for row in known))
    kinds = {site.kind for site in sites}
    disjoint = _disjoint([layout for layout, _ in views])
    if bias is not None:
        biases = [layout for _, layout in views]
        disjoint &= None not in biases and _disjoint([layout for layout in biases if layout])
    if not disjoint or (len(views) == 1 and len(kinds) > 1):
        return [_irregular(weight, bias, sites, tuple(known), shapes)]
    claims = []
    for layout, bias_layout in views:
        chosen = [i for i, row in enumerate(known) if row.layout == layout]
        group, own = [sites[i] for i in chosen], tuple(known[i] for i in chosen)
        kind, (_, inputs, outputs) = group[0].kind, layout.matrix
        # The outputs of a group of channels are all computed at each position.
        inner = dims.size(group[0].roles[0]) if group[0].roles is not None else 1
        d_out = outputs * (inner if kind in {"conv", "scale"} else 1)
        n = sum(site.count() for site in group)
        suffix = _suffix(layout) if len(views) > 1 else ""
        own_bias = None if bias_layout is None else bias
        whole = tuple(row._replace(fraction=1.0) for row in own)
        claim = Claim(
            kind,
            weight,
            own_bias,
            group,
            layout,
            bias_layout,
            whole,
            inputs,
            d_out,
            n,
            suffix,
            True,
        )
        claims.append(claim)
    return claims


def _irregular(
    weight: int,
    bias: int | None,
    sites: list[Site],
    rows: tuple[SiteRows, ...] | None,
    shapes: Sequence[tuple[int, ...]],
) -> Claim:
    """A weight that is used in two orientations, or through views with no matrix form."""
    kinds = {site.kind for site in sites}
    shape, first = shapes[weight], sites[0]
    if first.roles is not None:
        d_in, d_out = dims.size(first.roles[1]), dims.size(first.roles[2])
    else:
        d_out = shape[-1] if shape else 1
        d_in = math.prod(shape) // d_out
    return Claim(
        kind=first.kind if len(kinds) == 1 else "dense",
        weight=weight,
        bias=bias,
        sites=sites,
        layout=Layout.column(shape),
        bias_layout=None if bias is None else Layout.row(shapes[bias]),
        rows=rows,
        d_in=d_in,
        d_out=d_out,
        n=math.ceil(sum(site.count() * site.view.fraction for site in sites)),
    )


# -- one site ------------------------------------------------------------------------------------


def _site_rows(site: Site, shape: tuple[int, ...], bias_shape: tuple[int, ...]) -> SiteRows | None:
    """What the features of a site mean; `None` if it has no matrix form."""
    if site.roles is None:
        return None
    blocks, inputs, outputs = site.roles
    blocks = dims.flatten([*site.view.loops, blocks])
    order = dims.in_order(blocks), dims.in_order(inputs), dims.in_order(outputs)
    layout = Layout(shape, site.view.offset, order)
    if not layout.is_regular:
        return None
    bias_layout = None
    if site.bias is not None:
        bias_layout = _bias_layout(site, layout, bias_shape)
        if bias_layout is None:
            return None
    return SiteRows(_arrangement(site, layout), layout, bias_layout, site.view.fraction)


def _arrangement(site: Site, layout: Layout) -> Arrangement:
    assert site.feature_axes is not None
    loops = [
        sliced if chain.scanned else dims.repeated([length])[0]
        for length, sliced, chain in zip(
            site.scope.loops, site.view.loops, site.view.chains[1:], strict=True
        )
    ]
    outer, own = dims.flatten(loops), dims.flatten(site.feature_axes)
    blocks = {*dims.flatten(site.view.loops), *(site.roles or ((),))[0]}
    axes = list(enumerate((*outer, *own)))
    by_stride = lambda chosen: tuple(i for i, _ in sorted(chosen, key=lambda axis: -axis[1].stride))
    return Arrangement(
        kind=site.kind,
        loops=len(loops),
        loop_sizes=tuple(dim.size for dim in outer),
        sizes=tuple(dim.size for dim in own),
        blocks=by_stride((i, dim) for i, dim in axes if dim.stride and dim in blocks),
        positions=tuple(i for i, dim in axes if not dim.stride),
        inputs=by_stride((i, dim) for i, dim in axes if dim.stride and dim not in blocks),
        inputs_count=layout.matrix[1],
        scale=site.view.scale,
        examples=site.examples,
        options=tuple(site.options.items()),
    )


def _bias_layout(site: Site, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The bias as [blocks, 1, outputs], in the order of the weight's own outputs."""
    view = site.bias
    assert view is not None
    if view.scale != 1:
        return None
    pairs = sorted(site.bias_pairs, key=lambda pair: -pair[0].stride)
    blocks, _, outputs = layout.dims
    wanted = sorted((*blocks, *outputs), key=lambda dim: -dim.stride)
    aligned = dims.align(wanted, [unit for unit, _ in pairs])
    if aligned is None or any(a != b for a, b in aligned):
        return None
    found: tuple[list[Dim], list[Dim]] = ([], [])
    for piece, _ in aligned:
        unit, own = next((u, b) for u, b in pairs if _contains(u, piece))
        part = found[0] if any(_contains(dim, piece) for dim in blocks) else found[1]
        part.append(Dim(piece.size, own.stride * piece.stride // unit.stride))
    bias = Layout(shape, view.offset, (tuple(found[0]), (), tuple(found[1])))
    return bias if bias.is_regular else None


def _contains(dim: Dim, piece: Dim) -> bool:
    return dim.stride <= piece.stride < dim.stride * dim.size


# -- slices of one weight ------------------------------------------------------------------------


def _disjoint(layouts: Sequence[Layout]) -> bool:
    """Whether no two of the slices share an element."""
    return all(
        any(set(a).isdisjoint(b) for a, b in zip(these.ranges(), those.ranges(), strict=True))
        for these, those in itertools.combinations(layouts, 2)
    )


def _suffix(layout: Layout) -> str:
    def text(inside: range, n: int) -> str:
        if inside == range(n):
            return ":"
        if len(inside) == 1:
            return str(inside.start)
        step = f":{inside.step}" if inside.step > 1 else ""
        return f"{inside.start}:{inside.stop}{step}"

    texts = list(map(text, layout.ranges(), layout.shape))
    while texts and texts[-1] == ":":
        texts.pop()
    return f"[{', '.join(texts)}]"
