"""Primitive by primitive: what keeps a parameter a view of itself.

A rule is called as `rule(eqn, at, view, values)`: operand `at` is the view, all others are
constants. It returns what changes of the view, a dictionary for each result, or `None` if the
result is no view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .._features import Dim, dims
from ._values import Const, Value, View
from ._versions import Equation

Changes = list[dict[str, Any]] | None


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _reshape(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    axes = None if view.axes is None else dims.reshape(view.axes, _shape(eqn.outvars[0]))
    return [{"axes": axes}]


def _transpose(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    axes = view.axes
    return [{"axes": axes and tuple(axes[i] for i in eqn.params["permutation"])}]


def _broadcast(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    if view.axes is None:
        return [{"axes": None}]
    shape, dimensions = _shape(eqn.outvars[0]), eqn.params["broadcast_dimensions"]
    return [{"axes": dims.broadcast(view.axes, shape, dimensions)}]


def _unstructured(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """Linear, but no rearrangement of the parameter's elements (or not one worth telling)."""
    return [{"axes": None}]


def _unknown_slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    share = math.prod(_shape(eqn.outvars[0])) / math.prod(_shape(eqn.invars[at]))
    return [{"axes": None, "fraction": view.fraction * min(1.0, share)}]


def _cast(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    return None if eqn.outvars[0].aval.dtype.kind == "c" else [{}]


def _negate(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    return [{"scale": -view.scale}]


def _scale(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    if eqn.name == "div" and at == 1:
        return None
    other = values[1 - at]
    assert isinstance(other, Const)
    if np.iscomplexobj(other.number):
        return None
    if other.number is not None and _shape(eqn.outvars[0]) == _shape(eqn.invars[at]):
        factor = other.number.item()
        if eqn.name == "div":
            factor = 1 / factor if factor else math.inf
        return [{"scale": view.scale * factor}]
    repeated = _is_broadcast(view) or _shape(eqn.outvars[0]) != _shape(eqn.invars[at])
    return None if repeated else [{"axes": None}]


def _offset(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """Plus a constant: the derivative, all that counts, is the same."""
    other = values[1 - at]
    assert isinstance(other, Const)
    if _shape(eqn.outvars[0]) != _shape(eqn.invars[at]):
        return None
    if other.number is None and _is_broadcast(view):
        return None
    return [{"scale": -view.scale}] if eqn.name == "sub" and at == 1 else [{}]


def _is_broadcast(view: View) -> bool:
    return view.axes is not None and not dims.of_elements(dims.flatten(view.axes))


def _cut(view: View, starts: Sequence[int], stops: Sequence[int], strides: Sequence[int]) -> dict:
    """The view after slicing."""
    if view.axes is None:
        return {"axes": None}
    axes, offset, share = list(view.axes), view.offset, 1.0
    for i, (start, stop, step) in enumerate(zip(starts, stops, strides, strict=True)):
        full, length = dims.size(axes[i]), len(range(start, stop, step))
        if length == full:
            continue
        share *= length / full
        if len(axes[i]) != 1:
            return {"axes": None, "fraction": view.fraction * share}
        (dim,) = axes[i]
        axes[i] = (Dim(length, dim.stride * step),) if length > 1 else ()
        offset += start * dim.stride
    return {"axes": tuple(axes), "offset": offset, "fraction": view.fraction * share}


def _slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    return [_cut(view, starts, stops, eqn.params["strides"] or (1,) * len(starts))]


def _split(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    axis, shape = eqn.params["axis"], _shape(eqn.invars[at])
    changes, begin = [], 0
    for length in eqn.params["sizes"]:
        starts, stops = [0] * len(shape), list(shape)
        starts[axis], stops[axis] = begin, begin + length
        changes.append(_cut(view, starts, stops, [1] * len(shape)))
        begin += length
    return changes


def _dynamic_slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    if at != 0:
        return None
    sizes, shape = eqn.params["slice_sizes"], _shape(eqn.invars[0])
    indices = values[1:]
    cut = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m]
    known: list[Any] = [v.number if isinstance(v, Const) else None for v in indices]
    if len(cut) == 1 and sizes[cut[0]] == 1 and _is_counter(indices[cut[0]], shape[cut[0]]):
        changes = view.iterated(cut[0])
        if changes is not None:
            return [changes]
    if any(known[i] is None for i in cut):
        return _unknown_slice(eqn, at, view, values)
    starts = [0] * len(sizes)
    for i in cut:
        starts[i] = min(max(int(known[i]), 0), shape[i] - sizes[i])
    stops = [start + n for start, n in zip(starts, sizes, strict=True)]
    return [_cut(view, starts, stops, [1] * len(sizes))]


def _is_counter(index: Value, length: int) -> bool:
    """Whether an index counts the iterations of the innermost loop, from 0 to `length`."""
    numbers = index.numbers if isinstance(index, Const) else None
    return numbers is not None and np.array_equal(numbers, np.arange(length))


def _selected(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """By a constant mask."""
    return None if at == 0 else _unstructured(eqn, at, view, values)


def _gathered(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """By a constant index: one row is a slice, several are a lookup."""
    rows = math.prod(_shape(eqn.invars[1])[:-1])
    return _unknown_slice(eqn, at, view, values) if at == 0 and rows == 1 else None


def _contracted(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """With a constant that is no data: it is not captured, or has no axis for examples.

    Derivatives inside the loss start from such: ones, or a direction. Ones make the same of the
    parameter for all examples.
    """
    other = values[1 - at]
    assert isinstance(other, Const)
    contracting, batch = eqn.params["dimension_numbers"]
    shape, bound = _shape(eqn.invars[1 - at]), {*contracting[1 - at], *batch[1 - at]}
    free = [n for i, n in enumerate(shape) if i not in bound]
    if other.captured and free:
        return None
    repeats = math.prod(free) if other.number is not None else 1
    return [{"axes": None, "repeats": view.repeats * repeats}]


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
    "select_n": _selected,
    "dot_general": _contracted,
    "convert_element_type": _cast,
    "reduce_precision": _cast,
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
