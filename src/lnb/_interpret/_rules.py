"""Primitive by primitive: what keeps a parameter a view of itself, and what makes a site of it.

A view rule returns what changes of the view, one dictionary a result, or `None` if the result is no
view. A site rule returns the fields of the `Site`, or `None` if the equation is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _axes
from ._axes import Atom, Axes
from ._values import Const, Cut, Data, Output, Roles, Value, View

Changes = list[dict[str, Any]] | None
Found = dict[str, Any] | None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _others(values: Sequence[Value], at: int) -> list[Value]:
    return [value for i, value in enumerate(values) if i != at]


# -- views --------------------------------------------------------------------------------------


def _reshape(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    axes = None if view.axes is None else _axes.reshape(view.axes, _shape(eqn.outvars[0]))
    return [{"axes": axes}]


def _transpose(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    axes = view.axes
    return [{"axes": axes and tuple(axes[i] for i in eqn.params["permutation"])}]


def _broadcast(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    if view.axes is None:
        return [{"axes": None}]
    shape, dimensions = _shape(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    return [{"axes": _axes.broadcast(view.axes, shape, dimensions)}]


def _unstructured(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    """Linear, but no rearrangement of the parameter's elements (or not one worth telling)."""
    return [{"axes": None}]


def _unknown_slice(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    share = math.prod(_shape(eqn.outvars[0])) / math.prod(_shape(eqn.invars[at]))
    return [{"axes": None, "fraction": view.fraction * min(1.0, share)}]


def _same(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    return [{}]


def _negate(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    return [{"scale": -view.scale}]


def _scale(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    if eqn.primitive.name == "div" and at == 1:
        return None
    other = values[1 - at]
    assert isinstance(other, Const)
    if other.value is not None and _shape(eqn.outvars[0]) == _shape(eqn.invars[at]):
        factor = float(np.reshape(other.value, ()))
        if eqn.primitive.name == "div":
            factor = 1 / factor if factor else math.inf
        return [{"scale": view.scale * factor}]
    repeated = _is_broadcast(view) or _shape(eqn.outvars[0]) != _shape(eqn.invars[at])
    return None if repeated else [{"axes": None}]


def _offset(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    """Plus a constant: the derivative, all that counts, is the same."""
    other = values[1 - at]
    assert isinstance(other, Const)
    if _shape(eqn.outvars[0]) != _shape(eqn.invars[at]):
        return None
    if other.value is None and _is_broadcast(view):
        return None
    return [{"scale": -view.scale}] if eqn.primitive.name == "sub" and at == 1 else [{}]


def _is_broadcast(view: View) -> bool:
    return view.axes is not None and "broadcast" in _axes.labels(_axes.flatten(view.axes))


def _cut(view: View, starts: Sequence[int], stops: Sequence[int], strides: Sequence[int]) -> dict:
    """The view after slicing."""
    if view.axes is None:
        return {"axes": None}
    axes, cuts = list(view.axes), list(view.cuts)
    share = 1.0
    for i, (start, stop, stride) in enumerate(zip(starts, stops, strides, strict=True)):
        full, length = _axes.size(axes[i]), len(range(start, stop, stride))
        if length == full:
            continue
        share *= length / full
        atoms = _axes.leaves(axes[i])
        if len(atoms) != 1:
            return {"axes": None, "fraction": view.fraction * share}
        left = Atom(length, atoms[0].label) if length > 1 else None
        axes[i] = (left,) if left else ()
        if atoms[0].label == "parameter":
            cut = next((c for c in cuts if c.atom is atoms[0]), None)
            if cut is None:
                cuts.append(Cut(atoms[0], start, stop, stride, left))
            else:  # a slice of a slice
                cuts.remove(cut)
                begin, step = cut.start + start * cut.stride, stride * cut.stride
                cuts.append(Cut(cut.source, begin, begin + length * step, step, left))
    return {"axes": tuple(axes), "cuts": tuple(cuts), "fraction": view.fraction * share}


def _slice(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    return [_cut(view, starts, stops, eqn.params["strides"] or (1,) * len(starts))]


def _split(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    axis, shape = eqn.params["axis"], _shape(eqn.invars[at])
    changes, begin = [], 0
    for length in eqn.params["sizes"]:
        starts, stops = [0] * len(shape), list(shape)
        starts[axis], stops[axis] = begin, begin + length
        changes.append(_cut(view, starts, stops, [1] * len(shape)))
        begin += length
    return changes


def _dynamic_slice(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    if at != 0:
        return None
    sizes, shape = eqn.params["slice_sizes"], _shape(eqn.invars[0])
    indices = values[1:]
    cut = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m]
    known = [v.value if isinstance(v, Const) else None for v in indices]
    if len(cut) == 1 and sizes[cut[0]] == 1 and _is_counter(indices[cut[0]], shape[cut[0]]):
        turned = view.turned(cut[0])
        if turned is not None:
            return [turned]
    if any(known[i] is None for i in cut):
        return _unknown_slice(eqn, at, view, values)
    starts = [0] * len(sizes)
    for i in cut:
        starts[i] = min(max(int(known[i]), 0), shape[i] - sizes[i])
    stops = [start + n for start, n in zip(starts, sizes, strict=True)]
    return [_cut(view, starts, stops, [1] * len(sizes))]


def _is_counter(index: Value, length: int) -> bool:
    """Whether an index counts the turns of the innermost loop, from 0 to `length`."""
    turns = index.turns if isinstance(index, Const) else None
    return turns is not None and np.array_equal(np.ravel(turns), np.arange(length))


def _gathered(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    """By a constant index: one row is a slice, several are a lookup."""
    rows = math.prod(_shape(eqn.invars[1])[:-1])
    return _unknown_slice(eqn, at, view, values) if at == 0 and rows == 1 else None


def _contracted(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Changes:
    """With a constant that is no data: it is not captured, or has no axis for examples.

    Derivatives inside the loss start from such: ones, or a direction.
    """
    other = values[1 - at]
    assert isinstance(other, Const)
    contracting, batch = eqn.params["dimension_numbers"]
    axes = len(contracting[1 - at]) + len(batch[1 - at])
    data = other.captured and axes < len(_shape(eqn.invars[1 - at]))
    return None if data else _unstructured(eqn, at, view, values)


VIEW_RULES: dict[str, Callable[[Any, int, View, Sequence[Value]], Changes]] = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "gather": _gathered,
    "dot_general": _contracted,
    "convert_element_type": _same,
    "reduce_precision": _same,
    "neg": _negate,
    "mul": _scale,
    "div": _scale,
    "add": _offset,
    "add_any": _offset,
    "sub": _offset,
    **dict.fromkeys(
        ["rev", "pad", "reduce_sum", "cumsum", "concatenate", "reduce_window_sum"], _unstructured
    ),
}


# -- sites --------------------------------------------------------------------------------------


def _parameters(atoms: Sequence[Atom]) -> bool:
    return _axes.labels(atoms) <= {"parameter"}


def _dot(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Found:
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
    for i, j in (*zip(x_contracted, w_contracted), *zip(x_batch, w_batch)):
        if _parameters(view.axes[j]):
            x_axes[i] = view.axes[j]
        elif "parameter" in _axes.labels(view.axes[j]):
            return found
    for i, j in zip(x_batch, w_batch):
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


def _conv(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Found:
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
    patch_axes, out_axes = [()] * rank, [()] * rank
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


def _mul(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Found:
    if eqn.primitive.name == "div" and at == 1:
        return None
    feature, shape = eqn.invars[1 - at], _shape(eqn.outvars[0])
    found = {"kind": "scale", "features": (feature,)}
    if view.axes is None:
        units = math.prod(_shape(eqn.invars[at]))
        return {**found, "positions": max(1, math.prod(shape) // max(units, 1))}
    axes = _axes.spread(view.axes, shape)
    atoms = _axes.flatten(axes)
    found["positions"] = _axes.size(atom for atom in atoms if atom.label == "broadcast")
    if eqn.primitive.name == "div":
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


def _gather(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Found:
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


def _pick(eqn: Any, at: int, view: View, values: Sequence[Value]) -> Found:
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


# -- biases -------------------------------------------------------------------------------------


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
