"""From uses to claims: which parameters form which neuron, and which form none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from .._features import Arrangement, Dim, Layout, SiteRows, dims
from .._neuron import Neuron
from .._plan import thinned
from ._trace import Trace
from ._values import Site, Use
from ._walk import Lineage


class Claim(NamedTuple):
    """A neuron, and the places where it is applied."""

    neuron: Neuron
    sites: list[Site]

    @property
    def sources(self) -> frozenset:
        """What tells its features, as rows, from those of other neurons."""
        pairs = zip(self.sites, self.neuron.forms, strict=True)
        return frozenset((s.fed_by, f.arrangement) for s, f in pairs if isinstance(f, SiteRows))


def make_claims(
    lineage: Lineage, trace: Trace, excluded: Sequence[bool], rows: str
) -> tuple[list[Claim], dict[int, str]]:
    """The claims in the order of their first use, and for each unclaimed parameter the reason."""
    parameters = range(len(trace.parameters))
    reasons = {i: "excluded" if excluded[i] else _reason(lineage, trace, i) for i in parameters}
    unclaimed = {i: reason for i, reason in reasons.items() if reason}
    uses = {i: uses for i, uses in lineage.uses.items() if i not in unclaimed}
    at_sites = {i: [use.site for use in own if use.kind == "site"] for i, own in uses.items()}
    sites = {i: [site for site in own if site] for i, own in at_sites.items() if own}
    biases = _biases(uses, set(sites))
    for site in itertools.chain.from_iterable(sites.values()):
        if site.bias is not None and site.bias.parameter not in biases.values():
            site.bias = None
    claims: list[Claim] = []
    for weight, own in sites.items():
        claims += _weight_claims(weight, biases.get(weight), own, trace, rows)
    for i in sorted(set(parameters).difference(unclaimed, sites, biases.values())):
        name, column = trace.names[i], Layout.column(trace.shapes[i])
        size = column.matrix[1]
        claims.append(Claim(Neuron(name, name, None, "identity", size, size, 1, column), []))
    return claims, unclaimed


def _reason(lineage: Lineage, trace: Trace, parameter: int) -> str:
    """Why a parameter cannot be claimed; nothing if it can be."""
    uses = lineage.uses.get(parameter, [])
    if jnp.issubdtype(trace.parameters[parameter].dtype, jnp.complexfloating):
        return "it is complex"
    if not uses:
        return "the loss makes no use of it that meets data"
    for use in uses:
        if use.kind == "nonlinear":
            return use.reason
    return uses[0].reason if all(use.kind == "opaque" for use in uses) else ""


def _biases(uses: Mapping[int, Sequence[Use]], weights: set[int]) -> dict[int, int]:
    """Bias by weight. A bias serves one weight, a weight has one bias; all others are let go."""
    biases: dict[int, int] = {}
    for parameter, own in uses.items():
        owners = {use.site.view.parameter if use.kind == "bias" and use.site else -1 for use in own}
        if len(owners) == 1 and owners <= weights and owners.isdisjoint(biases):
            biases[owners.pop()] = parameter
    return biases


def _weight_claims(
    weight: int, bias: int | None, sites: list[Site], trace: Trace, rows: str
) -> list[Claim]:
    """One claim for the weight, or one for each of its slices."""
    shape, bias_shape = trace.shapes[weight], () if bias is None else trace.shapes[bias]
    name, bias_name = trace.names[weight], None if bias is None else trace.names[bias]
    maybe_rows = [_site_rows(site, shape, bias_shape) for site in sites]
    known = [form for form in maybe_rows if form is not None]
    kinds = {site.kind for site in sites}
    slices = list(dict.fromkeys((form.layout, form.bias_layout) for form in known))
    same = len(slices) == 1 and len(kinds) == 1
    if len(known) < len(sites) or not (same or _are_disjoint(slices, bias is not None)):
        # It is used in two orientations, or through views with no matrix form.
        column, row = Layout.column(shape), None if bias is None else Layout.row(bias_shape)
        pairs = zip(sites, maybe_rows, strict=True)
        d_out = shape[-1] if shape else 1
        d_in = math.prod(shape) // d_out
        if sites[0].roles is not None:
            _, d_in, d_out = map(dims.size, sites[0].roles)
        neuron = Neuron(
            name=name,
            weight=name,
            bias=bias_name,
            kind=sites[0].kind if len(kinds) == 1 else "dense",
            d_in=d_in,
            d_out=d_out,
            n=math.ceil(sum(site.count() * site.view.fraction for site in sites)),
            layout=column,
            bias_layout=row,
            forms=thinned([form or site.program(column, row) for site, form in pairs], rows),
        )
        return [Claim(neuron, sites)]
    claims = []
    for layout, bias_layout in slices:
        chosen = [i for i, form in enumerate(known) if form.layout == layout]
        own, (_, inputs, outputs) = [sites[i] for i in chosen], layout.matrix
        if own[0].kind in {"conv", "scale"} and own[0].roles is not None:
            outputs *= dims.size(own[0].roles[0])  # those of all groups of channels
        neuron = Neuron(
            name=name + _suffix(layout) if len(slices) > 1 else name,
            weight=name,
            bias=None if bias_layout is None else bias_name,
            kind=own[0].kind,
            d_in=inputs,
            d_out=outputs,
            n=sum(site.count() for site in own),
            layout=layout,
            bias_layout=bias_layout,
            has_matrix=True,
            forms=thinned([known[i]._replace(fraction=1.0) for i in chosen], rows),
        )
        claims.append(Claim(neuron, own))
    return claims


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
    # Rows of experts stand loop by loop, then expert by expert: so must the weight's matrices.
    strides = [dim.stride for dim in blocks]
    if "experts" in site.options and strides != sorted(strides, reverse=True):
        return None
    bias_layout = None
    if site.bias is not None:
        bias_layout = _bias_layout(site, layout, bias_shape)
        if bias_layout is None:
            return None
    return SiteRows(_arrangement(site, layout), layout, bias_layout, site.view.fraction)


def _arrangement(site: Site, layout: Layout) -> Arrangement:
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
        examples=_examples(site),
        options=tuple(site.options.items()),
    )


def _examples(site: Site) -> int | None:
    """The dim of the features, or of the patches, along which the batch's examples stand."""
    if site.kind == "conv":
        axis = site.options["dimension_numbers"].out_spec[0]
        return len(dims.flatten(site.feature_axes[:axis])) if site.feature_axes[axis] else None
    flat = dims.flatten(site.feature_axes)
    return next((i for i, dim in enumerate(flat) if not dim.stride), None)


def _bias_layout(site: Site, layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The bias as [blocks, 1, outputs], in the order of the weight's own outputs."""
    view = site.bias
    assert view is not None
    if view.scale != 1:
        return None
    pairs = sorted(site.bias_pairs, key=lambda pair: -pair[0].stride)
    blocks, _, outputs = layout.dims
    wanted = sorted((*blocks, *outputs), key=lambda dim: -dim.stride)
    units, own = (dims.align(wanted, [pair[side] for pair in pairs]) for side in (0, 1))
    if units is None or own is None or any(a != b for a, b in units):
        return None
    part = lambda role: tuple(b for a, b in own if any(_contains(dim, a) for dim in role))
    bias = Layout(shape, view.offset, (part(blocks), (), part(outputs)))
    return bias if bias.is_regular else None


def _contains(dim: Dim, piece: Dim) -> bool:
    return dim.stride <= piece.stride < dim.stride * dim.size


# -- slices of one weight ------------------------------------------------------------------------


def _are_disjoint(slices: Sequence[tuple[Layout, Layout | None]], bias: bool) -> bool:
    """Whether there are several slices, no two of which share an element of weight or bias."""
    weights, biases = zip(*slices, strict=True)
    parameters = (weights, biases) if bias else (weights,)
    return len(slices) > 1 and all(
        None not in layouts and _apart(*pair)
        for layouts in parameters
        for pair in itertools.combinations(layouts, 2)
    )


def _apart(these: Layout, those: Layout) -> bool:
    return any(set(a).isdisjoint(b) for a, b in zip(these.ranges(), those.ranges(), strict=True))


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
