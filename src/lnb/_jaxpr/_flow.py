"""The static pass through control flow: what parameters are inside, and what comes out.

A rule is called as `rule(walker, eqn, values, enter)`, where `enter(body, values, *loop)` walks a
program inside, perhaps in a loop of some length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._values import MIXED, Const, Data, Entangled, Use, Value, View, penalties_of
from ._versions import INLINE, Body, Equation, literals

if TYPE_CHECKING:
    from ._walk import Walker

Enter = Callable[..., list[Value]]


def inline(walker: Walker, eqn: Equation, values: list[Value], enter: Enter) -> list[Value]:
    """A call: as if its body stood here."""
    return enter(eqn.bodies[0], values)


def cond(walker: Walker, eqn: Equation, values: list[Value], enter: Enter) -> list[Value]:
    """One of several branches, by a choice made at run time."""
    results = [enter(branch, values[1:]) for branch in eqn.bodies]
    return [_either(walker, outs) for outs in zip(*results, strict=True)]


def _either(walker: Walker, values: Sequence[Value]) -> Value:
    if isinstance(values[0], View) and all(value == values[0] for value in values):
        return values[0]
    for value in values:
        walker.use(value, Use("identity"))
    return Data(MIXED, penalties=penalties_of(values))


def scan(walker: Walker, eqn: Equation, values: list[Value], enter: Enter) -> list[Value]:
    """A loop: weights may be scanned over, or the same in every iteration."""
    params, (body,) = eqn.params, eqn.bodies
    consts, carry, xs = split(values, [params["consts"], params["carry"]])
    inside = [*map(_still, consts), *map(_still, carry)]
    inside += [_sliced(value, params["length"]) for value in xs]
    kept = [out is body.invars[len(consts) + k] for k, out in enumerate(body.outvars[: len(carry)])]
    for k, start in enumerate(carry):
        if not kept[k]:
            # A parameter that starts a recurrence is added to it, so to speak: M = I.
            walker.use(start, Use("identity"))
            inside[len(consts) + k] = _counter(body, start, len(consts) + k, k, params["length"])
    results = enter(body, inside, params["length"])
    for k, start in enumerate(carry):
        if kept[k]:
            results[k] = start
        elif isinstance(results[k], View | Entangled):
            walker.use(results[k], Use("identity"))
            results[k] = Data(MIXED)
        else:
            results[k] = _leaving(results[k])
    return [*map(plain, results[: len(carry)]), *map(_leaving, results[len(carry) :])]


def _still(value: Value) -> Value:
    """A value that is the same in every iteration of a loop, as its body sees it."""
    if isinstance(value, View):
        return value.inside(scanned=False)
    if isinstance(value, Const) and value.number is None:
        return dataclasses.replace(value, numbers=None)  # what an outer loop counts
    return plain(value)


def _sliced(value: Value, length: int) -> Value:
    """A value that a loop takes a slice of in every iteration, as its body sees it."""
    if isinstance(value, View):
        return value.inside(scanned=True)
    if isinstance(value, Const) and value.is_range:
        return Const(np.arange(length))
    return _still(value)


def _leaving(value: Value) -> Value:
    """What the body of a loop makes, as the program around sees it."""
    if isinstance(value, View):
        return Entangled(frozenset({value.parameter}), "it leaves a loop changed")
    return Const() if isinstance(value, Const) else plain(value)


def _counter(body: Body, start: Value, at: int, out: int, length: int) -> Value:
    """A carried value: known in every iteration if the body adds a known number to a constant."""
    eqn = next((e for e in body.equations if body.outvars[out] in e.outvars), None)
    number = start.number if isinstance(start, Const) else None
    if eqn is None or eqn.name != "add" or number is None or body.invars[at] not in eqn.invars:
        return Data()
    steps = literals(eqn.invars)
    return Const(number + np.ravel(steps[0]) * np.arange(length)) if steps else Data()


def shard_map(walker: Walker, eqn: Equation, values: list[Value], enter: Enter) -> list[Value]:
    """A program on every device: like a loop over devices, in which weights stay the same."""
    inside = [
        _sharded(value) if any(axis is not None for axis in spec) else _still(value)
        for value, spec in zip(values, eqn.params["in_specs"], strict=True)
    ]
    return [plain(out) for out in enter(eqn.bodies[0], inside, devices(eqn))]


def _sharded(value: Value) -> Value:
    if isinstance(value, View):
        reason = "it is sharded inside a shard_map"
        return Entangled(frozenset({value.parameter}), reason, opaque=True)
    return plain(value)


def devices(eqn: Equation) -> int:
    """On how many devices a shard_map runs its program."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["axes"])


CONTROL = {"scan": scan, "cond": cond}
TRANSPARENT = {"shard_map": shard_map, **dict.fromkeys(INLINE, inline)}


def plain(value: Value) -> Value:
    """The value across a boundary behind which no bias can be told."""
    if isinstance(value, Data) and value.output is not None:
        return dataclasses.replace(value, output=MIXED)
    return value


def split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    parts, start = [], 0
    for size in (*sizes, len(values) - sum(sizes)):
        parts.append(list(values[start : start + size]))
        start += size
    return parts
