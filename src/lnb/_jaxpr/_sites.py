"""Primitive by primitive: where a view of a parameter meets data linearly.

A rule is called as `rule(eqn, at, axes)`, with the axes of operand `at`, the view. It returns
fields of the `Site`: with `roles` if the weight stands as a matrix, else those of a site without
matrix form, or `None` if there is no site.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .._features import Axes, Dim, Gathered, Ragged, dims
from ._values import Output, View
from ._versions import Equation

Found = dict[str, Any] | None


def find_site(eqn: Equation, at: int, view: View) -> Found:
    """The fields of the site where a view meets data, `None` if there is none."""
    rule = SITE_RULES.get(eqn.name)
    if rule is None:
        return None
    found = rule(eqn, at, view.axes) if view.axes is not None else None
    if found is None:
        # What meets the data is no rearrangement of the weight. Positions are counted, and the
        # bias is told, as if it was the weight itself.
        found = rule(eqn, at, dims.of_parameter(_shape(eqn.invars[at])))
        if found is None:
            return None
        if found["kind"] == "scale":
            found["feature_axes"] += dims.repeated([view.repeats])
        kept = {"kind", "features", "feature_axes"}
        kept |= {"output_axes"} if found["kind"] in {"dense", "conv"} else set()
        found = {name: value for name, value in found.items() if name in kept}
    return found


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _others(count: int, *chosen: Sequence[int]) -> list[int]:
    """The axes, of so many, that are not among the chosen."""
    return sorted(set(range(count)).difference(*chosen))


def _dot(eqn: Equation, at: int, axes: Axes) -> Found:
    contracting, batch = eqn.params["dimension_numbers"]
    feature = eqn.invars[1 - at]
    x_axes = list(dims.repeated(_shape(feature)))
    for i, j in zip(contracting[1 - at], contracting[at], strict=True):
        x_axes[i] = axes[j]
    blocks: list[Dim] = []
    for i, j in zip(batch[1 - at], batch[at], strict=True):
        if any(dim.stride for dim in axes[j]):  # else the weight is repeated along the batch
            x_axes[i] = axes[j]
            blocks += axes[j]
    inputs = dims.flatten(axes[j] for j in contracting[at])
    w_out = [axes[j] for j in _others(len(axes), contracting[at], batch[at])]
    outputs = dims.flatten(w_out)
    if not dims.of_elements((*blocks, *inputs, *outputs)):
        return None  # a broadcast weight, summed over
    x_out = [x_axes[i] for i in _others(len(x_axes), contracting[1 - at], batch[1 - at])]
    out_axes = [x_axes[i] for i in batch[1 - at]] + (w_out + x_out if at == 0 else x_out + w_out)
    return {
        "kind": "dense",
        "features": (feature,),
        "feature_axes": tuple(x_axes),
        "roles": (tuple(blocks), inputs, outputs),
        "output_axes": tuple(out_axes),
    }


def _conv(eqn: Equation, at: int, axes: Axes) -> Found:
    params, out = eqn.params, eqn.outvars[0]
    numbers, filters = params["dimension_numbers"], _shape(eqn.invars[1])
    units, groups = filters[numbers.rhs_spec[0]], params["feature_group_count"]
    found = {"kind": "conv", "features": (eqn.invars[1 - at],)}
    if at == 0 or params["batch_group_count"] > 1:
        return {**found, "feature_axes": dims.repeated([out.aval.size // units])}
    out_axis = axes[numbers.rhs_spec[0]]
    split = dims.reshape((out_axis,), (groups, units // groups))
    if split is None or not dims.of_elements(dims.flatten(axes)):
        return None
    blocks, outputs = split
    inputs = dims.flatten(axes[i] for i in numbers.rhs_spec[1:])
    # Patches have the output's layout, with (input channel, tap) where it has its channels.
    patch_axes, out_axes = (list(dims.repeated(_shape(out))) for _ in range(2))
    channel = numbers.out_spec[1]
    patch_axes[channel], out_axes[channel] = (*blocks, *inputs), out_axis
    # As `conv_general_dilated_patches` wants them, the filter's axes stand in this order.
    in_order = tuple(range(len(filters)))
    same = ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    patches = {
        "filter_shape": tuple(filters[i] for i in numbers.rhs_spec[2:]),
        "dimension_numbers": numbers._replace(rhs_spec=in_order),
        "image_shape": _shape(eqn.invars[0]),
        **{name: params[name] for name in same},
    }
    return {
        **found,
        "feature_axes": tuple(patch_axes),
        "roles": (blocks, inputs, outputs),
        "output_axes": tuple(out_axes),
        "options": patches,
    }


def _mul(eqn: Equation, at: int, axes: Axes) -> Found:
    if eqn.name == "div" and at == 1:
        return None
    shape = _shape(eqn.outvars[0])
    axes = dims.spread(axes, shape)
    found = {"kind": "scale", "features": (eqn.invars[1 - at],), "feature_axes": axes}
    if eqn.name == "div":
        return found
    return {
        **found,
        "roles": (tuple(dim for dim in dims.flatten(axes) if dim.stride), (), ()),
        "output_axes": axes,
        "options": {"stages": (((), shape),)},
    }


def _gather(eqn: Equation, at: int, axes: Axes) -> Found:
    if at != 0:
        return None
    indices, shape = eqn.invars[1], _shape(eqn.invars[0])
    numbers, sizes, mode = (eqn.params[k] for k in ("dimension_numbers", "slice_sizes", "mode"))
    found = {
        "kind": "lookup",
        "features": (indices,),
        "feature_axes": dims.repeated([math.prod(_shape(indices)[:-1])]),
    }
    # Along all axes but one the slices are whole: `vmap` of an index writes it in this way.
    cut = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m]
    row, *more = cut or numbers.start_index_map[:1]
    clipped = len(numbers.start_index_map) == 1 or mode == lax.GatherScatterMode.CLIP
    one_row = not more and sizes[row] == 1 and row in numbers.start_index_map
    if not clipped or not one_row or numbers.operand_batching_dims:
        return found
    if not dims.of_elements(dims.flatten(axes)):
        return None
    sliced = _others(len(shape), numbers.collapsed_slice_dims)
    out_axes = list(dims.repeated(_shape(eqn.outvars[0])))
    for place, i in zip(numbers.offset_dims, sliced, strict=True):
        out_axes[place] = () if i == row else axes[i]
    outputs = dims.flatten(axes[i] for i in _others(len(axes), [row]))
    return {
        **found,
        "roles": ((), axes[row], outputs),
        "output_axes": tuple(out_axes),
        "options": {
            "mode": mode,
            "column": numbers.start_index_map.index(row),
            "index_axes": tuple(_others(len(out_axes), numbers.offset_dims)),
        },
    }


def _pick(eqn: Equation, at: int, axes: Axes) -> Found:
    """`dynamic_slice` at an index that depends on the batch."""
    return {"kind": "lookup", "features": (), "feature_axes": ()} if at == 0 else None


def _ragged(eqn: Equation, at: int, axes: Axes) -> Found:
    """`lax.ragged_dot`: examples in the order of their experts, and how many each expert has."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracting, batch = numbers.dot_dimension_numbers
    x_shape, group = _shape(eqn.invars[0]), tuple(numbers.rhs_group_dimensions)
    plain = len(x_shape) == 2 and len(group) == 1 and not batch[0] and len(contracting[1]) == 1
    (ragged,), (contracted,) = numbers.lhs_ragged_dimensions, contracting[0]
    if at != 1 or not plain or ragged == contracted:
        return None
    if not dims.of_elements(dims.flatten(axes)):
        return None
    inputs, outputs = axes[contracting[1][0]], _others(len(axes), group, contracting[1])
    return {
        "kind": "dense",
        "features": (eqn.invars[0], eqn.invars[2]),
        "feature_axes": ((Dim(x_shape[ragged], 0),), inputs),
        "roles": (axes[group[0]], inputs, dims.flatten(axes[i] for i in outputs)),
        "options": {"experts": Ragged(_shape(eqn.invars[1])[group[0]], (ragged, contracted))},
    }


SITE_RULES: dict[str, Callable[[Equation, int, Axes], Found]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "mul": _mul,
    "div": _mul,
    "ragged_dot_general": _ragged,
    "gather": _gather,
    "dynamic_slice": _pick,
}


# -- sites that grow: their output meets more data ------------------------------------------------


def _scaled_again(eqn: Equation, at: int, output: Output) -> Found:
    """A scale that has met one factor of its features meets another.

    Normalisation layers write (x - mean) * (rsqrt(variance) * scale): all of it is what the scale
    is fed.
    """
    site, shape = output.site, _shape(eqn.outvars[0])
    if eqn.name != "mul" or site.roles is None or len(output.axes) != len(shape):
        return None
    axes = dims.spread(output.axes, shape)
    return {
        "features": (*site.features, eqn.invars[1 - at]),
        "feature_axes": axes,
        "output_axes": axes,
        "options": {"stages": (*site.options["stages"], (output.steps, shape))},
    }


def _experts(eqn: Equation, at: int, output: Output) -> Found:
    """The site of weights that were looked up, one for each position: operand `at` of a product.

    What a lookup said is replaced: there is one matrix for each row of the table, and the features
    of a position count for the matrix that it chose.
    """
    if eqn.name != "dot_general":
        return None
    contracting, batch = eqn.params["dimension_numbers"]
    w_contracted, w_batch = contracting[at], batch[at]
    x_contracted, x_batch = contracting[1 - at], batch[1 - at]
    x_shape, looked_up = _shape(eqn.invars[1 - at]), output.site
    # Axes of the index have no element of the weight.
    weights = [i for i, axis in enumerate(output.axes) if dims.of_elements(axis)]
    free = _others(len(output.axes), w_contracted, w_batch)
    if not set(w_contracted).issubset(weights) or not set(w_batch).isdisjoint(weights):
        return None
    assert looked_up.roles is not None
    inputs = dims.flatten(output.axes[i] for i in w_contracted)
    several = [i for i in free if i not in weights]  # experts that share one position's features
    x_free = _others(len(x_shape), x_contracted, x_batch)
    shared = math.prod(x_shape[i] for i in x_batch)
    each = math.prod(x_shape[i] for i in x_free)
    choice = Gathered(
        count=dims.size(looked_up.roles[1]),
        column=looked_up.options["column"],
        index_axes=looked_up.options["index_axes"],
        table_shape=_shape(looked_up.output),
        steps=output.steps,
        table_order=(*w_batch, *several, *weights),
        features_order=(*x_batch, *x_free, *x_contracted),
        sizes=(shared, each, looked_up.positions // shared),
    )
    outputs = dims.flatten(output.axes[i] for i in free if i in weights)
    return {
        "kind": "dense",
        "features": (eqn.invars[1 - at], *looked_up.features),
        "feature_axes": ((Dim(looked_up.positions * each, 0),), inputs),
        "roles": (looked_up.roles[1], inputs, outputs),
        "options": {"experts": choice},
        "output_axes": None,
    }


GROWTH_RULES: dict[str, Callable[[Equation, int, Output], Found]] = {
    "scale": _scaled_again,
    "lookup": _experts,
}


def pair_bias(view: View, output: Output, shape: Sequence[int]) -> list[tuple[Dim, Dim]] | None:
    """The dims of a site's outputs with those of its bias, if the view is the site's bias.

    A bias is constant over positions, covers every output unit, and enters the same loops in the
    same way as the weight.
    """
    site = output.site
    scanned = [chain.scanned for chain in view.chains[1:]]
    if view.axes is None:
        return None
    if [dims.size(axis) for axis in output.axes] != list(shape):
        return None
    if scanned != [chain.scanned for chain in site.view.chains[1:]]:
        return None
    pairs: list[tuple[Dim, Dim]] = []
    for unit_axis, bias_axis in (
        *zip(output.axes, dims.spread(view.axes, shape), strict=True),
        *zip(site.view.loops, view.loops, strict=True),
    ):
        aligned = dims.align(unit_axis, bias_axis)
        if aligned is None or any(bool(a.stride) != bool(b.stride) for a, b in aligned):
            return None
        pairs += [pair for pair in aligned if pair[0].stride]
    return pairs
