"""Primitive by primitive: where a view of a parameter meets data linearly.

A rule is called as `rule(eqn, at, view, values)` and returns the fields of the `Site` (with
`out_axes`, the axes of its output, where a bias can be told from them), or `None` if there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from . import _axes
from ._axes import Atom, Axes, Axis
from ._values import Data, Output, Roles, Value, View
from ._versions import Equation

Found = dict[str, Any] | None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _parameters(atoms: Sequence[Atom]) -> bool:
    return _axes.labels(atoms) <= {"parameter"}


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
    inputs = [atom for i in w_contracted for atom in view.axes[i]]
    outputs = [atom for i in w_free for atom in view.axes[i]]
    if not (_parameters(inputs) and _parameters(outputs)):
        return found  # a broadcast weight, summed over
    x_axes: list[Any] = list(_axes.fresh(shape, "position"))
    blocks: list[Atom] = []
    for i, j in (
        *zip(x_contracted, w_contracted, strict=True),
        *zip(x_batch, w_batch, strict=True),
    ):
        if _parameters(view.axes[j]):
            x_axes[i] = view.axes[j]
        elif "parameter" in _axes.labels(view.axes[j]):
            return found
    for i, j in zip(x_batch, w_batch, strict=True):
        if _parameters(view.axes[j]):
            blocks += view.axes[j]
        else:
            found["positions"] *= shape[i]
    x_out, w_out = [x_axes[i] for i in x_free], [view.axes[i] for i in w_free]
    out_axes = [x_axes[i] for i in x_batch] + (w_out + x_out if at == 0 else x_out + w_out)
    return {
        **found,
        "roles": Roles(blocks, inputs, outputs),
        "feature_axes": tuple(x_axes),
        "out_axes": tuple(out_axes),
    }


def _conv(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Found:
    params, out = eqn.params, eqn.outvars[0]
    numbers = params["dimension_numbers"]
    units = _shape(eqn.invars[1])[numbers.rhs_spec[0]]
    found = {"kind": "conv", "features": (eqn.invars[1 - at],), "positions": out.aval.size // units}
    if view.axes is None or at == 0 or params["batch_group_count"] > 1:
        return found
    if not _parameters(_axes.flatten(view.axes)):
        return found
    groups, out_axis = params["feature_group_count"], view.axes[numbers.rhs_spec[0]]
    split = _axes.reshape((out_axis,), (groups, units // groups))
    if split is None:
        return found
    blocks, outputs = split
    inputs = [atom for i in numbers.rhs_spec[1:] for atom in view.axes[i]]
    rank = len(_shape(out))
    positions = list(_axes.fresh([_shape(out)[i] for i in numbers.out_spec], "position"))
    # Patches have the output's layout, with (input channel, tap) where it has its channels.
    patch_axes: list[Axis] = [()] * rank
    out_axes: list[Axis] = [()] * rank
    for place, i in enumerate(numbers.out_spec):
        patch_axes[i] = out_axes[i] = positions[place]
    patch_axes[numbers.out_spec[1]] = (*blocks, *inputs)
    out_axes[numbers.out_spec[1]] = out_axis
    filter_shape = [_shape(eqn.invars[1])[i] for i in numbers.rhs_spec[2:]]
    patches = {
        "filter_shape": tuple(filter_shape),
        "window_strides": params["window_strides"],
        "padding": params["padding"],
        "lhs_dilation": params["lhs_dilation"],
        "rhs_dilation": params["rhs_dilation"],
        "dimension_numbers": numbers,
    }
    return {
        **found,
        "roles": Roles(list(blocks), inputs, list(outputs)),
        "feature_axes": tuple(patch_axes),
        "out_axes": tuple(out_axes),
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
    axes = _axes.spread(view.axes, shape)
    atoms = _axes.flatten(axes)
    found["positions"] = _axes.size(atom for atom in atoms if atom.label == "broadcast")
    if eqn.name == "div":
        return found
    axes = relabel(axes)
    blocks = [atom for atom in atoms if atom.label == "parameter"]
    return {
        **found,
        "roles": Roles(blocks, [], []),
        "feature_axes": axes,
        "out_axes": axes,
        "options": {"stages": (((), shape),)},
    }


def relabel(axes: Axes) -> Axes:
    """The axes of an output: where the weight was repeated, there are positions."""
    return tuple(
        tuple(
            Atom(leaf.size, "position") if leaf.label == "broadcast" else leaf
            for leaf in _axes.leaves(axis)
        )
        for axis in axes
    )


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
    if not simple or view.axes is None or not _parameters(_axes.flatten(view.axes)):
        return found
    outputs = [atom for i, axis in enumerate(view.axes) if i != row for atom in axis]
    roles = Roles([], list(view.axes[row]), outputs)
    return {**found, "roles": roles, "options": {"mode": eqn.params["mode"]}}


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


def pair_bias(view: View, output: Output, shape: Sequence[int]) -> list[tuple[Atom, Atom]] | None:
    """Pairs each output unit of a site with the bias's element, if it is the site's bias.

    A bias is constant over positions, covers every output unit, and enters the same loops in the
    same way as the weight.
    """
    site = output.site
    scanned = [chain.scanned for chain in view.chains[1:]]
    if site.roles is None or view.axes is None:
        return None
    if [_axes.size(axis) for axis in output.axes] != list(shape):
        return None
    if scanned != [chain.scanned for chain in site.view.chains[1:]]:
        return None
    pairs: list[tuple[Atom, Atom]] = []
    for unit_axis, bias_axis in (
        *zip(output.axes, _axes.spread(view.axes, shape), strict=True),
        *zip(site.view.stacked, view.stacked, strict=True),
    ):
        aligned = _axes.align(unit_axis, bias_axis)
        if aligned is None:
            return None
        for unit, bias in aligned:
            if (unit.label, bias.label) not in {("parameter",) * 2, ("position", "broadcast")}:
                return None
            if unit.label == "parameter":
                pairs.append((unit, bias))
    return pairs
