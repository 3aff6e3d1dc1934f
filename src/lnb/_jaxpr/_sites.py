"""Primitive by primitive: where a view of a parameter meets data linearly.

A rule is called as `rule(eqn, at, view, values)` and returns the fields of the `Site` (with
`output_axes`, where a bias can be told from them), or `None` if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from .._features import Axis, Dim, dims
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
        units = math.prod(_shape(eqn.invars[at]))
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
    row = numbers.start_index_map[0]
    simple = (
        len(numbers.start_index_map) == 1
        and tuple(numbers.collapsed_slice_dims) == (row,)
        and not numbers.operand_batching_dims
        and all(n == m for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if i != row)
    )
    if not simple or view.axes is None or not dims.of_elements(dims.flatten(view.axes)):
        return found
    outputs = dims.flatten(axis for i, axis in enumerate(view.axes) if i != row)
    return {
        **found,
        "roles": ((), view.axes[row], outputs),
        "feature_axes": dims.repeated([found["positions"]]),
        "options": {"mode": eqn.params["mode"]},
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
