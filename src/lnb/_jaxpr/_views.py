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

from .._features import Axes, Dim, dims
from ._values import Const, Value, View
from ._versions import Equation

Changes = list[dict[str, Any]] | None

REARRANGING = frozenset(
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type".split()
)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def rearranged(eqn: Equation, axes: Axes) -> Axes | None:
    """The axes after an equation of `REARRANGING`."""
    if eqn.name == "convert_element_type":
        return axes
    if eqn.name == "transpose":
        return tuple(axes[i] for i in eqn.params["permutation"])
    shape = _shape(eqn.outvars[0])
    if eqn.name == "broadcast_in_dim":
        return dims.broadcast(axes, shape, eqn.params["broadcast_dimensions"])
    if eqn.name == "reshape" and eqn.params["dimensions"] is not None:
        axes = tuple(axes[i] for i in eqn.params["dimensions"])  # transposed first
    return dims.reshape(axes, shape)


def _rearranged(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    if eqn.outvars[0].aval.dtype.kind == "c":
        return None
    return [{"axes": None if view.axes is None else rearranged(eqn, view.axes)}]


def _same(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    return [{}]


def _unstructured(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    """Linear, but no rearrangement of the parameter's elements (or not one worth telling)."""
    return [{"axes": None}]


def _unknown_slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    share = math.prod(_shape(eqn.outvars[0])) / math.prod(_shape(eqn.invars[at]))
    return [{"axes": None, "fraction": view.fraction * min(1.0, share)}]


def _negate(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    return [{"scale": -view.scale}]


def factor(eqn: Equation, at: int, values: Sequence[Value]) -> float | None:
    """The number that an equation multiplies its operand `at` by, where that is known."""
    if eqn.name != "mul" and (eqn.name, at) != ("div", 0):
        return None
    other = values[1 - at]
    number = other.number if isinstance(other, Const) else None
    if number is None or np.iscomplexobj(number):
        return None
    if _shape(eqn.outvars[0]) != _shape(eqn.invars[at]):
        return None
    if eqn.name == "mul":
        return number.item()
    return 1 / number.item() if number else math.inf


def _scale(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    number = factor(eqn, at, values)
    if number is not None:
        return [{"scale": view.scale * number}]
    other = values[1 - at]
    assert isinstance(other, Const)
    if (eqn.name == "div" and at == 1) or np.iscomplexobj(other.number):
        return None
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


def _cut(view: View, kept: Sequence[range]) -> dict[str, Any]:
    """The view after slicing, with what is kept of each axis."""
    if view.axes is None:
        return {"axes": None}
    axes, offset, share = list(view.axes), view.offset, 1.0
    for i, inside in enumerate(kept):
        full = dims.size(axes[i])
        if len(inside) == full:
            continue
        share *= len(inside) / full
        if len(axes[i]) != 1:
            return {"axes": None, "fraction": view.fraction * share}
        (dim,) = axes[i]
        axes[i] = (Dim(len(inside), dim.stride * inside.step),) if len(inside) > 1 else ()
        offset += inside.start * dim.stride
    return {"axes": tuple(axes), "offset": offset, "fraction": view.fraction * share}


def _slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    return [_cut(view, list(map(range, starts, stops, eqn.params["strides"] or [1] * len(starts))))]


def _split(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    kept = list(map(range, _shape(eqn.invars[at])))
    changes, begin = [], 0
    for length in eqn.params["sizes"]:
        kept[eqn.params["axis"]] = range(begin, begin + length)
        changes.append(_cut(view, kept))
        begin += length
    return changes


def _dynamic_slice(eqn: Equation, at: int, view: View, values: Sequence[Value]) -> Changes:
    if at != 0:
        return None
    sizes, shape = eqn.params["slice_sizes"], _shape(eqn.invars[0])
    kept = list(map(range, shape))
    cut = [i for i, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m]
    for i in cut:
        index = values[1 + i]
        assert isinstance(index, Const)
        if len(cut) == 1 and sizes[i] == 1 and _is_counter(index, shape[i]):
            changes = view.iterated(i)
            if changes is not None:
                return [changes]
        if index.number is None:
            return _unknown_slice(eqn, at, view, values)
        start = min(max(int(index.number), 0), shape[i] - sizes[i])
        kept[i] = range(start, start + sizes[i])
    return [_cut(view, kept)]


def _is_counter(index: Const, length: int) -> bool:
    """Whether an index counts the iterations of the innermost loop, from 0 to `length`."""
    return index.numbers is not None and np.array_equal(index.numbers, np.arange(length))


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
    **dict.fromkeys(REARRANGING, _rearranged),
    "slice": _slice,
    "split": _split,
    "dynamic_slice": _dynamic_slice,
    "gather": _gathered,
    "select_n": _selected,
    "dot_general": _contracted,
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
