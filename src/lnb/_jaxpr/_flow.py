"""The static pass through control flow: what parameters are inside, and what comes out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._values import MIXED, Const, Data, Entangled, Scope, Use, Value, View
from ._versions import Body, Equation, literals

if TYPE_CHECKING:
    from ._walk import Walker


def inline(
    walker: Walker, scope: Scope, index: int, eqn: Equation, values: list[Value], tail: set[Any]
) -> list[Value]:
    """A call: as if its body stood here."""
    flags = [var in tail for var in eqn.outvars]
    return walker.run(scope.enter(index), eqn.bodies[0], values, flags)


def cond(
    walker: Walker, scope: Scope, index: int, eqn: Equation, values: list[Value], tail: set[Any]
) -> list[Value]:
    """One of several branches, by a choice made at run time."""
    flags = [var in tail for var in eqn.outvars]
    results = [walker.run(scope.enter(index), branch, values[1:], flags) for branch in eqn.bodies]
    return [_either(walker, outs) for outs in zip(*results, strict=True)]


def _either(walker: Walker, values: Sequence[Value]) -> Value:
    if isinstance(values[0], View) and all(value == values[0] for value in values):
        return values[0]
    for value in values:
        walker.use(value, Use("identity"))
    return Data(MIXED)


def scan(
    walker: Walker, scope: Scope, index: int, eqn: Equation, values: list[Value], tail: set[Any]
) -> list[Value]:
    """A loop: weights may be scanned over, or the same in every iteration."""
    params, (body,) = eqn.params, eqn.bodies
    consts, carry, xs = split(values, [params["consts"], params["carry"]])
    inside = [*map(_still, consts), *map(_still, carry), *map(_sliced, xs)]
    carried = range(len(consts), len(consts) + len(carry))
    outs, ins = body.outvars, body.invars
    kept = [outs[k] is ins[i] for k, i in enumerate(carried)]
    for k, i in enumerate(carried):
        if not kept[k]:
            # A parameter that starts a recurrence is added to it, so to speak: M = I.
            walker.use(carry[k], Use("identity"))
            start = carry[k]
            known = isinstance(start, Const)
            inside[i] = _counter(body, start, i, k, params["length"]) if known else Data()

    def run(walker: Walker, scope: Scope) -> list[Value]:
        flags = [var in tail for var in eqn.outvars]
        return walker.run(scope, body, inside, flags)

    # What starts as a constant need not stay one: try, until nothing changes.
    while any(isinstance(inside[i], Const) for i in carried):
        results = run(type(walker)(), Scope((*scope.loops, params["length"])))
        wrong = [
            i
            for k, i in enumerate(carried)
            if isinstance(inside[i], Const) and not isinstance(results[k], Const)
        ]
        if not wrong:
            break
        for i in wrong:
            inside[i] = Data()
    results = run(walker, scope.enter(index, params["length"]))
    for k in range(len(carry)):
        if kept[k]:
            results[k] = carry[k]
        elif isinstance(results[k], View | Entangled):
            walker.use(results[k], Use("identity"))
            results[k] = Data(MIXED)
    return [_leaving(value) if k >= len(carry) else plain(value) for k, value in enumerate(results)]


def _still(value: Value) -> Value:
    """A value that is the same in every iteration of a loop, as its body sees it."""
    if isinstance(value, View):
        return value.inside(scanned=False)
    # What an outer loop counts is no longer known here.
    return dataclasses.replace(value, iterates=None) if isinstance(value, Const) else plain(value)


def _sliced(value: Value) -> Value:
    """A value that a loop takes a slice of in every iteration, as its body sees it."""
    if isinstance(value, View):
        return value.inside(scanned=True)
    if isinstance(value, Const):
        return Const(iterates=value.value, captured=value.captured)
    return plain(value)


def _leaving(value: Value) -> Value:
    if isinstance(value, View):
        return Entangled(frozenset({value.parameter}), "it leaves a loop changed")
    return Const() if isinstance(value, Const) else plain(value)


def _counter(body: Body, start: Const, at: int, out: int, length: int) -> Const:
    """A carried constant: known in every iteration if the body adds a known number to it."""
    eqn = next((e for e in body.equations if body.outvars[out] in e.outvars), None)
    if eqn is None or eqn.name != "add" or np.size(start.value) != 1:
        return Const()
    step = literals(eqn.invars)
    if start.value is None or body.invars[at] not in eqn.invars or len(step) != 1:
        return Const()
    return Const(iterates=np.ravel(start.value) + np.ravel(step[0]) * np.arange(length))


def shard_map(
    walker: Walker, scope: Scope, index: int, eqn: Equation, values: list[Value], tail: set[Any]
) -> list[Value]:
    """A program on every device: like a loop over devices, in which weights stay the same."""
    inside = [
        _sharded(value) if any(axis is not None for axis in spec) else _still(value)
        for value, spec in zip(values, eqn.params["in_specs"], strict=True)
    ]
    flags = [var in tail for var in eqn.outvars]
    inner = scope.enter(index, devices(eqn))
    return [plain(out) for out in walker.run(inner, eqn.bodies[0], inside, flags)]


def _sharded(value: Value) -> Value:
    if isinstance(value, View):
        reason = "it is sharded inside a shard_map"
        return Entangled(frozenset({value.parameter}), reason, opaque=True)
    return plain(value)


def devices(eqn: Equation) -> int:
    """On how many devices a shard_map runs its program."""
    return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["axes"])


CONTROL = {"scan": scan, "cond": cond, "shard_map": shard_map}


def plain(value: Value) -> Value:
    """The value across a boundary behind which no bias can be told."""
    if isinstance(value, Data) and value.output is not None:
        return Data(MIXED)
    return value


def split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    parts, start = [], 0
    for size in (*sizes, len(values) - sum(sizes)):
        parts.append(list(values[start : start + size]))
        start += size
    return parts
