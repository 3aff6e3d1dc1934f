"""Primitive by primitive: where a view of a parameter meets data linearly.

A rule is called as `rule(eqn, at, view, values)` and returns the fields of the `Site` (with
`output_axes`, where a bias can be told from them), or `None` if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax

from .._features import Axis, Dim, Gathered, Ragged, dims
from ._values import Data, Output, Value, View
from ._versions import Equation

Found = dict[str, Any] | None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _dot(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    contracting, batch = eqn.params["dimension_numbers"]
    feature = eqn.invars[1 - at]
    shape = _shape(feature)
    x_contracted, w_contracted = contracting[1 - at], contracting[at]
    x_batch, w_batch = batch[1 - at], batch[at]
    x_free = [i for i in range(len(shape)) if i not in {*x_contracted, *x_batch}]
    found = {
        "kind": "dense",
        "features": (feature,),
        "positions": math.prod(shape[i] for i in x_free),
    }
    if view.axes is None:
        return found
    w_free = [i for i in range(len(view.axes)) if i not in {*w_contracted, *w_batch}]
    inputs = dims.flatten(view.axes[i] for i in w_contracted)
    outputs = dims.flatten(view.axes[i] for i in w_free)
    if not (dims.of_elements(inputs) and dims.of_elements(outputs)):
        return found  # a broadcast weight, summed over
    x_axes = list(dims.repeated(shape))
    blocks: list[Dim] = []
    for i, j in zip(x_contracted, w_contracted, strict=True):
        x_axes[i] = view.axes[j]
    for i, j in zip(x_batch, w_batch, strict=True):
        if dims.of_elements(view.axes[j]):
            x_axes[i] = view.axes[j]
            blocks += view.axes[j]
        elif any(dim.stride for dim in view.axes[j]):
            return found
        else:  # the weight is repeated along the batch
            found["positions"] *= shape[i]
    x_out, w_out = [x_axes[i] for i in x_free], [view.axes[i] for i in w_free]
    out_axes = [x_axes[i] for i in x_batch] + (w_out + x_out if at == 0 else x_out + w_out)
    return {
        **found,
        "roles": (tuple(blocks), inputs, outputs),
        "feature_axes": tuple(x_axes),
        "examples": first_position(x_axes),
        "output_axes": tuple(out_axes),
    }


def first_position(axes: Sequence[Axis]) -> int | None:
    """The first of the dims that is one of positions."""
    flat = dims.flatten(axes)
    return next((i for i, dim in enumerate(flat) if dim.stride == 0), None)


def _conv(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    params, out = eqn.params, eqn.outvars[0]
    numbers = params["dimension_numbers"]
    units = _shape(eqn.invars[1])[numbers.rhs_spec[0]]
    found = {"kind": "conv", "features": (eqn.invars[1 - at],), "positions": out.aval.size // units}
    if view.axes is None or at == 0 or params["batch_group_count"] > 1:
        return found
    if not dims.of_elements(dims.flatten(view.axes)):
        return found
    groups, out_axis = params["feature_group_count"], view.axes[numbers.rhs_spec[0]]
    split = dims.reshape((out_axis,), (groups, units // groups))
    if split is None:
        return found
    blocks, outputs = split
    inputs = dims.flatten(view.axes[i] for i in numbers.rhs_spec[1:])
    # Patches have the output's layout, with (input channel, tap) where it has its channels.
    patch_axes, out_axes = (list(dims.repeated(_shape(out))) for _ in range(2))
    batch_axis, out_channel = numbers.out_spec[:2]
    patch_axes[out_channel], out_axes[out_channel] = (*blocks, *inputs), out_axis
    examples = len(dims.flatten(patch_axes[:batch_axis])) if patch_axes[batch_axis] else None
    # As `conv_general_dilated_patches` wants them, the filter's axes stand in this order.
    in_order = tuple(range(len(_shape(out))))
    patches = {
        "filter_shape": tuple(_shape(eqn.invars[1])[i] for i in numbers.rhs_spec[2:]),
        "window_strides": params["window_strides"],
        "padding": params["padding"],
        "lhs_dilation": params["lhs_dilation"],
        "rhs_dilation": params["rhs_dilation"],
        "dimension_numbers": numbers._replace(rhs_spec=in_order),
        "image_shape": _shape(eqn.invars[0]),
    }
    return {
        **found,
        "roles": (blocks, inputs, outputs),
        "feature_axes": tuple(patch_axes),
        "examples": examples,
        "output_axes": tuple(out_axes),
        "options": patches,
    }


def _mul(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    if eqn.name == "div" and at == 1:
        return None
    feature, shape = eqn.invars[1 - at], _shape(eqn.outvars[0])
    found = {"kind": "scale", "features": (feature,)}
    if view.axes is None:
        units = math.prod(_shape(eqn.invars[at])) // view.repeats
        return {**found, "positions": max(1, math.prod(shape) // max(units, 1))}
    axes = dims.spread(view.axes, shape)
    flat = dims.flatten(axes)
    found["positions"] = dims.size(dim for dim in flat if dim.stride == 0)
    if eqn.name == "div":
        return found
    return {
        **found,
        "roles": (tuple(dim for dim in flat if dim.stride), (), ()),
        "feature_axes": axes,
        "examples": first_position(axes),
        "output_axes": axes,
        "options": {"stages": (((), shape),)},
    }


def _gather(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    if at != 0:
        return None
    indices, shape = eqn.invars[1], _shape(eqn.invars[0])
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    found = {
        "kind": "lookup",
        "features": (indices,),
        "positions": math.prod(_shape(indices)[:-1]),
    }
    # Along all axes but one the slices are whole: `vmap` of an index writes it in this way.
    cut = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m]
    cut = cut or list(numbers.start_index_map[:1])
    if len(cut) != 1 or sizes[cut[0]] != 1 or numbers.operand_batching_dims:
        return found
    (row,), mode = cut, eqn.params["mode"]
    clipped = len(numbers.start_index_map) == 1 or mode == lax.GatherScatterMode.CLIP
    if not clipped or row not in numbers.start_index_map:
        return found
    if view.axes is None or not dims.of_elements(dims.flatten(view.axes)):
        return found
    outputs = dims.flatten(axis for i, axis in enumerate(view.axes) if i != row)
    sliced = [i for i in range(len(shape)) if i not in numbers.collapsed_slice_dims]
    out_axes = list(dims.repeated(_shape(eqn.outvars[0])))
    for place, i in zip(numbers.offset_dims, sliced, strict=True):
        out_axes[place] = () if i == row else view.axes[i]
    return {
        **found,
        "roles": ((), view.axes[row], outputs),
        "feature_axes": dims.repeated([found["positions"]]),
        "output_axes": tuple(out_axes),
        "options": {
            "mode": mode,
            "column": numbers.start_index_map.index(row),
            "index_axes": tuple(set(range(len(out_axes))).difference(numbers.offset_dims)),
        },
    }


def experts(eqn: Equation, at: int, output: Output) -> Found:
    """The site of weights that were looked up, one for each position: operand `at` of a product.

    What a lookup said is replaced: there is one matrix for each row of the table, and the features
    of a position count for the matrix that it chose.
    """
    contracting, batch = eqn.params["dimension_numbers"]
    w_contracted, w_batch = contracting[at], batch[at]
    x_contracted, x_batch = contracting[1 - at], batch[1 - at]
    x_shape = _shape(eqn.invars[1 - at])
    # Axes of the index have no element of the weight.
    is_chosen = [not dims.of_elements(axis) for axis in output.axes]
    free = [i for i in range(len(is_chosen)) if i not in {*w_contracted, *w_batch}]
    if any(is_chosen[i] for i in w_contracted) or not all(is_chosen[i] for i in w_batch):
        return None
    looked_up = output.site
    assert looked_up.roles is not None
    inputs = dims.flatten(output.axes[i] for i in w_contracted)
    several = [i for i in free if is_chosen[i]]  # experts that share one position's features
    x_free = [i for i in range(len(x_shape)) if i not in {*x_contracted, *x_batch}]
    shared = math.prod(x_shape[i] for i in x_batch)
    each = math.prod(x_shape[i] for i in x_free)
    positions = looked_up.positions * each
    weights = [i for i in range(len(is_chosen)) if not is_chosen[i]]
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
    outputs = dims.flatten(output.axes[i] for i in free if not is_chosen[i])
    return {
        "kind": "dense",
        "features": (eqn.invars[1 - at], *looked_up.features),
        "positions": positions,
        "roles": (looked_up.roles[1], inputs, outputs),
        "feature_axes": ((Dim(positions, 0),), inputs),
        "examples": 0,
        "options": {"experts": choice},
        "output_axes": None,
    }


def _ragged(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    """`lax.ragged_dot`: examples in the order of their experts, and how many each expert has."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracting, batch = numbers.dot_dimension_numbers
    x_shape, group = _shape(eqn.invars[0]), tuple(numbers.rhs_group_dimensions)
    plain = len(x_shape) == 2 and len(group) == 1 and not batch[0] and len(contracting[1]) == 1
    (ragged,), (contracted,) = numbers.lhs_ragged_dimensions, contracting[0]
    if at != 1 or not plain or ragged == contracted:
        return None
    found = {
        "kind": "dense",
        "features": (eqn.invars[0], eqn.invars[2]),
        "positions": x_shape[ragged],
    }
    if view.axes is None or not dims.of_elements(dims.flatten(view.axes)):
        return found
    inputs = view.axes[contracting[1][0]]
    rest = [i for i in range(len(view.axes)) if i not in {*group, *contracting[1]}]
    return {
        **found,
        "roles": (view.axes[group[0]], inputs, dims.flatten(view.axes[i] for i in rest)),
        "feature_axes": ((Dim(x_shape[ragged], 0),), inputs),
        "examples": 0,
        "options": {"experts": Ragged(_shape(eqn.invars[1])[group[0]], (ragged, contracted))},
    }


def _pick(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    """`dynamic_slice` at an index that depends on the batch."""
    if at != 0 or not any(isinstance(value, Data) for value in values[1:]):
        return None
    return {"kind": "lookup", "features": (), "positions": 1}


SITE_RULES: dict[str, Callable[[Any, int, View, Sequence[Value]], Found]] = {
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    "mul": _mul,
    "div": _mul,
    "ragged_dot_general": _ragged,
    "gather": _gather,
    "dynamic_slice": _pick,
}


def pair_bias(view: View, output: Output, shape: Sequence[int]) -> list[tuple[Dim, Dim]] | None:
    """The dims of a site's outputs with those of its bias, if the view is the site's bias.

    A bias is constant over positions, covers every output unit, and enters the same loops in the
    same way as the weight.
    """
    site = output.site
    scanned = [chain.scanned for chain in view.chains[1:]]
    if site.roles is None or view.axes is None:
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
