"""The static pass: follows every parameter through a jaxpr to the places where it meets data."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core as jex

from . import _axes
from ._program import Step
from ._rules import SITE_RULES, VIEW_RULES, pair_bias, relabel
from ._values import MIXED, Const, Data, Entangled, Output, Site, Use, Value, View

# Primitives whose results are their operands, one for one.
FORWARDING = frozenset(
    "copy copy_p name sharding_constraint pvary pcast mesh_cast reshard layout_constraint "
    "device_put optimization_barrier".split()
)
# Calls that are as good as inlined: name -> the parameter that holds their jaxpr.
INLINE = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
OPAQUE_PREFIXES = ("custom_", "pallas_call", "ffi_call", "pure_callback", "io_callback", "while")
# Linear in all operands, but what comes out of a site is no longer told apart in their result.
BLENDING = frozenset(
    "slice dynamic_slice split reduce_sum concatenate pad select_n gather cumsum neg rev psum "
    "psum_invariant dynamic_update_slice scatter scatter-add mul div sub add add_any".split()
)
ADDITIONS = frozenset({"add", "add_any", "sub"})
JOINS = frozenset("concatenate select_n dynamic_update_slice scatter scatter-add pad".split())
# Through these, and sums, a penalty reaches the loss without meeting data.
TAIL = frozenset(
    "add sub add_any neg convert_element_type reduce_sum reshape squeeze broadcast_in_dim psum "
    "psum_invariant copy pvary pcast expand_dims".split()
)


class Scope:
    """A jaxpr as it stands in the program: its sites, and the jaxprs inside."""

    def __init__(self, loops: tuple[int, ...] = (), sharded: bool = False):
        self.loops = loops
        self.sharded = sharded
        self.sites: list[Site] = []
        self.inner: dict[int, list[Scope]] = {}
        self.uses: collections.Counter[Any] = collections.Counter()

    def all_sites(self) -> list[Site]:
        inner = itertools.chain.from_iterable(self.inner.values())
        return [*self.sites, *itertools.chain.from_iterable(s.all_sites() for s in inner)]


@dataclasses.dataclass(frozen=True)
class Lineage:
    """All uses of every parameter, and the scopes where its sites stand."""

    scope: Scope
    uses: dict[int, list[Use]]
    axes: list[_axes.Axes]
    origins: dict[int, tuple[Scope, Any]]  # of each residual slot: scope and variable


def trace_lineage(jaxpr: jex.Jaxpr, consts: Sequence[Any], parameters: int) -> Lineage:
    """Follows the first `parameters` inputs of `jaxpr`."""
    walker = _Walker()
    axes = [_axes.fresh(var.aval.shape, "parameter") for var in jaxpr.invars[:parameters]]
    values: list[Value] = [View(index, a) for index, a in enumerate(axes)]
    values += [Data()] * (len(jaxpr.invars) - parameters)
    scope = Scope()
    known = [_captured(const) for const in consts]
    walker.run(scope, jaxpr, known, values, [True] * len(jaxpr.outvars))
    return Lineage(scope, dict(walker.uses), axes, walker.origins)


class _Walker:
    def __init__(self) -> None:
        self.uses: dict[int, list[Use]] = collections.defaultdict(list)
        self.origins: dict[int, tuple[Scope, Any]] = {}

    # -- the walk -------------------------------------------------------------------------------

    def run(
        self,
        scope: Scope,
        jaxpr: jex.Jaxpr,
        consts: Sequence[Value],
        arguments: Sequence[Value],
        tail_outputs: Sequence[bool],
    ) -> list[Value]:
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, arguments, strict=True))
        tail = _tail(jaxpr, tail_outputs)
        atoms = [*itertools.chain.from_iterable(e.invars for e in jaxpr.eqns), *jaxpr.outvars]
        scope.uses.update(atom for atom in atoms if not isinstance(atom, jex.Literal))
        for index, eqn in enumerate(jaxpr.eqns):
            values = [_read(env, atom) for atom in eqn.invars]
            env.update(
                zip(eqn.outvars, self.equation(scope, index, eqn, values, tail), strict=True)
            )
        return [_read(env, atom) for atom in jaxpr.outvars]

    def equation(
        self, scope: Scope, index: int, eqn: Any, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in FORWARDING:
            return values
        if all(isinstance(value, Const) for value in values):
            return _fold(eqn, values)
        relevant = any(isinstance(v, View | Entangled) for v in values)
        tagged = any(isinstance(v, Data) and v.output is not None for v in values)
        if name in INLINE and (relevant or tagged):
            return self.inline(scope, index, eqn, values, tail)
        if not relevant:
            at = _scaled(scope, eqn, values)
            return [
                _data(eqn, values) if at is None else self.rescaled(scope, eqn, values, at)
            ] * len(eqn.outvars)
        if name == "scan":
            return self.scan(scope, index, eqn, values, tail)
        if name == "cond":
            return self.cond(scope, index, eqn, values, tail)
        if name == "shard_map":
            return self.shard_map(scope, index, eqn, values, tail)
        if name == "stop_gradient" or not _differentiable(eqn):
            return [Data()] * len(eqn.outvars)
        return self.meeting(scope, eqn, values, tail)

    # -- where parameters meet something --------------------------------------------------------

    def meeting(self, scope: Scope, eqn: Any, values: list[Value], tail: set[Any]) -> list[Value]:
        name = eqn.primitive.name
        views = [i for i, v in enumerate(values) if isinstance(v, View)]
        if len(views) == 1 and not any(isinstance(v, Entangled) for v in values):
            result = self.single_view(scope, eqn, values, views[0], tail)
            if result is not None:
                return result
        data = any(isinstance(v, Data) for v in values)
        if data and name in ADDITIONS and eqn.outvars[0] in tail:
            return [_data(eqn, values)]  # a penalty, on its way to the loss
        if data and name in JOINS:
            for i in views:
                self.use(values[i], Use("identity"))
            for value in values:
                if isinstance(value, Entangled):
                    self.reject(value)
            return [Data(MIXED)] * len(eqn.outvars)
        entangled = _entangle(eqn, values)
        if not data:
            return [entangled] * len(eqn.outvars)
        self.reject(entangled)
        return [Data()] * len(eqn.outvars)

    def single_view(
        self, scope: Scope, eqn: Any, values: list[Value], at: int, tail: set[Any]
    ) -> list[Value] | None:
        name = eqn.primitive.name
        view = values[at]
        assert isinstance(view, View)
        others = [value for i, value in enumerate(values) if i != at]
        if all(isinstance(v, Const) for v in others) and name in VIEW_RULES:
            changes = VIEW_RULES[name](eqn, at, view, values)
            if changes is not None:
                return [
                    view.then(self.step(scope, eqn, at, output), **change)
                    for output, change in enumerate(changes)
                ]
        if name in SITE_RULES and not any(isinstance(v, Entangled) for v in others):
            found = SITE_RULES[name](eqn, at, view, values)
            if found is not None:
                return [self.site(scope, eqn, at, view, found)]
        if name in ADDITIONS and isinstance(others[0], Data):
            return [self.addition(eqn, at, view, others[0], tail)]
        return None

    def site(self, scope: Scope, eqn: Any, at: int, view: View, found: dict[str, Any]) -> Value:
        out_axes = found.pop("out_axes", None)
        steps = (self.step(scope, eqn, at, 0),)
        site = Site(view=view, steps=steps, scope=scope, loops=scope.loops, **found)
        scope.sites.append(site)
        self.use(view, Use("site", site))
        return Data(Output(site, out_axes) if out_axes is not None else MIXED)

    def addition(self, eqn: Any, at: int, view: View, data: Data, tail: set[Any]) -> Value:
        output = data.output
        if eqn.primitive.name == "sub" and at == 1:
            view = view.then(Step.make("neg", jnp.negative), scale=-view.scale)
        if isinstance(output, Output) and output.site.bias is None:
            pairs = pair_bias(view, output, eqn.outvars[0].aval.shape)
            if pairs is not None:
                site = output.site
                site.bias, site.bias_pairs, site.after = view, pairs, output.steps
                self.use(view, Use("bias", site))
                return Data(MIXED)
        if not (eqn.outvars[0] in tail and eqn.outvars[0].aval.shape == ()):
            self.use(view, Use("identity"))
        return Data(None if output is None else MIXED)

    def rescaled(self, scope: Scope, eqn: Any, values: list[Value], at: int) -> Value:
        """A scale that has met one factor of its features meets another.

        Normalisation layers write (x - mean) * (rsqrt(variance) * scale): all of it is what the
        scale is fed.
        """
        output = values[at].output  # type: ignore[union-attr]
        site, shape = output.site, eqn.outvars[0].aval.shape
        axes = relabel(_axes.spread(output.axes, shape))
        site.features = (*site.features, eqn.invars[1 - at])
        site.steps = (*site.steps, *output.steps, self.step(scope, eqn, at, 0))
        site.options["stages"] += ((output.steps, shape),)
        site.feature_axes = axes
        site.positions = _axes.size(a for a in _axes.flatten(axes) if a.label == "position")
        return Data(Output(site, axes))

    def step(self, scope: Scope, eqn: Any, at: int, output: int) -> Step:
        slots, literals = [], []
        for i, atom in enumerate(eqn.invars):
            literal = isinstance(atom, jex.Literal)
            slots.append(None if literal or i == at else len(self.origins))
            literals.append(atom.val if literal else None)
            if slots[-1] is not None:
                self.origins[slots[-1]] = (scope, atom)
        key = f"{eqn.primitive.name} {eqn.params} {[str(a.aval) for a in eqn.invars]}"
        several = eqn.primitive.multiple_results
        return Step(
            _exact(eqn), key, at, tuple(slots), tuple(literals), output if several else None
        )

    def use(self, value: Value, use: Use) -> None:
        assert isinstance(value, View)
        self.uses[value.parameter].append(use)

    def reject(self, value: Entangled) -> None:
        for parameter in value.parameters:
            kind = "opaque" if value.opaque else "nonlinear"
            self.uses[parameter].append(Use(kind, reason=value.reason))

    # -- control flow ---------------------------------------------------------------------------

    def inline(
        self, scope: Scope, index: int, eqn: Any, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        jaxpr, consts = _open(eqn.params[INLINE[eqn.primitive.name]])
        inner = Scope(scope.loops, scope.sharded)
        scope.inner[index] = [inner]
        known = [_captured(const) for const in consts]
        return self.run(inner, jaxpr, known, values, [var in tail for var in eqn.outvars])

    def cond(
        self, scope: Scope, index: int, eqn: Any, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        scope.inner[index] = []
        results = []
        for branch in eqn.params["branches"]:
            inner = Scope(scope.loops, scope.sharded)
            scope.inner[index].append(inner)
            known = [_captured(const) for const in branch.consts]
            flags = [var in tail for var in eqn.outvars]
            results.append(self.run(inner, branch.jaxpr, known, values[1:], flags))
        return [self.merge(outs) for outs in zip(*results, strict=True)]

    def merge(self, values: Sequence[Value]) -> Value:
        """One of several values, by a choice made at run time."""
        views = [value for value in values if isinstance(value, View)]
        if views and all(value == views[0] for value in values):
            return views[0]
        for value in values:
            if isinstance(value, View):
                self.use(value, Use("identity"))
            elif isinstance(value, Entangled):
                self.reject(value)
        return Data(MIXED)

    def scan(
        self, scope: Scope, index: int, eqn: Any, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        params = eqn.params
        body = params["jaxpr"]
        n_consts, n_carry = params["num_consts"], params["num_carry"]
        consts, carry, xs = _split(values, [n_consts, n_carry])
        outer: list[Value] = [
            *(v.loop(False) if isinstance(v, View) else _still(v) for v in consts),
            *(v.loop(False) if isinstance(v, View) else _still(v) for v in carry),
            *(v.loop(True) if isinstance(v, View) else _turning(v) for v in xs),
        ]
        flags = [var in tail for var in eqn.outvars]
        known = [_captured(const) for const in body.consts]
        inner = Scope((*scope.loops, params["length"]), scope.sharded)
        # A carried value is what it was at the start only if the body leaves it so.
        unchanged = [
            out is var
            for out, var in zip(
                body.jaxpr.outvars[:n_carry],
                body.jaxpr.invars[n_consts : n_consts + n_carry],
                strict=True,
            )
        ]
        for k in range(n_carry):
            value = outer[n_consts + k]
            if isinstance(value, View | Entangled) and not unchanged[k]:
                self.carried(value)
                outer[n_consts + k] = Data()
            elif isinstance(value, Const) and not unchanged[k]:
                outer[n_consts + k] = _counter(body.jaxpr, value, n_consts + k, k, params["length"])
        while any(isinstance(v, Const) for v in outer[n_consts : n_consts + n_carry]):
            trial = _Walker()
            results = trial.run(Scope(inner.loops), body.jaxpr, known, outer, flags)
            wrong = [
                k
                for k in range(n_carry)
                if isinstance(outer[n_consts + k], Const) and not isinstance(results[k], Const)
            ]
            if not wrong:
                break
            for k in wrong:
                outer[n_consts + k] = Data()
        scope.inner[index] = [inner]
        results = self.run(inner, body.jaxpr, known, outer, flags)
        final = []
        for k, value in enumerate(results):
            if k < n_carry and unchanged[k]:
                final.append(carry[k])
            elif isinstance(value, View):
                final.append(Entangled(frozenset({value.parameter}), "it leaves a loop changed"))
            else:
                final.append(_plain(value))
        return final

    def carried(self, value: View | Entangled) -> None:
        """A parameter that starts a recurrence is added to it, so to speak: M = I."""
        if isinstance(value, View):
            self.use(value, Use("identity"))
        else:
            self.reject(value)

    def shard_map(
        self, scope: Scope, index: int, eqn: Any, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        jaxpr, consts = _open(eqn.params["jaxpr"])
        inner = Scope(scope.loops, sharded=True)
        scope.inner[index] = [inner]
        arguments = []
        for value, spec in zip(values, eqn.params["in_specs"], strict=True):
            if isinstance(value, View | Entangled) and any(axis is not None for axis in spec):
                value = Entangled(
                    value.parameters
                    if isinstance(value, Entangled)
                    else frozenset({value.parameter}),
                    "it is sharded inside a shard_map",
                    opaque=True,
                )
            arguments.append(_plain(value))
        known = [_captured(const) for const in consts]
        results = self.run(inner, jaxpr, known, arguments, [var in tail for var in eqn.outvars])
        return [_plain(value) for value in results]


# -- small helpers ------------------------------------------------------------------------------


def _counter(jaxpr: jex.Jaxpr, start: Const, at: int, out: int, length: int) -> Const:
    """A carried constant: known at every turn if the body adds a known number to it."""
    eqn = next((e for e in jaxpr.eqns if jaxpr.outvars[out] in e.outvars), None)
    if start.value is None or eqn is None or eqn.primitive.name != "add":
        return Const()
    step = [atom.val for atom in eqn.invars if isinstance(atom, jex.Literal)]
    if jaxpr.invars[at] not in eqn.invars or len(step) != 1 or np.size(start.value) != 1:
        return Const()
    return Const(turns=np.ravel(start.value) + np.ravel(step[0]) * np.arange(length))


def _read(env: dict[Any, Value], atom: Any) -> Value:
    return Const(_scalar(atom.val)) if isinstance(atom, jex.Literal) else env[atom]


def _captured(const: Any) -> Const:
    return Const(_scalar(const), captured=np.size(const) > 1)


def _scalar(value: Any) -> Any:
    """The value itself where it is a concrete scalar, `None` elsewhere."""
    if isinstance(value, jax.core.Tracer) or np.size(value) != 1:
        return None
    dtype = jnp.result_type(value)
    numeric = dtype == np.bool_ or jnp.issubdtype(dtype, jnp.number)
    return np.asarray(value) if numeric else None


def _open(jaxpr: Any) -> tuple[jex.Jaxpr, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, jex.ClosedJaxpr) else (jaxpr, ())


def _plain(value: Value) -> Value:
    """The value across a boundary behind which no bias can be told."""
    if isinstance(value, Data) and value.output is not None:
        return Data(MIXED)
    return value


def _still(value: Value) -> Value:
    """The value inside a loop: what an outer loop counts is no longer known there."""
    return dataclasses.replace(value, turns=None) if isinstance(value, Const) else _plain(value)


def _turning(value: Value) -> Value:
    """The value that a loop takes a slice of at each turn."""
    if isinstance(value, Const):
        return Const(turns=value.value, captured=value.captured)
    return _plain(value)


def _split(values: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    parts, start = [], 0
    for size in (*sizes, len(values) - sum(sizes)):
        parts.append(list(values[start : start + size]))
        start += size
    return parts


def _binder(eqn: Any) -> Any:
    params = eqn.primitive.get_bind_params(eqn.params)
    return lambda *operands: eqn.primitive.bind(*operands, **params)


def _exact(eqn: Any) -> Any:
    """The equation in full precision: no casts, and products as exact as the operands."""
    if eqn.primitive.name in {"convert_element_type", "reduce_precision"}:
        return lambda operand: operand
    params = dict(eqn.primitive.get_bind_params(eqn.params))
    if "precision" in params:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = None
    return lambda *operands: eqn.primitive.bind(*operands, **params)


def _differentiable(eqn: Any) -> bool:
    return any(
        jnp.issubdtype(getattr(var.aval, "dtype", np.bool_), jnp.inexact) for var in eqn.outvars
    )


def _fold(eqn: Any, values: Sequence[Value]) -> list[Value]:
    """Known scalars stay known: scales such as 1 / sqrt(d), and the indices of loops."""
    captured = any(isinstance(value, Const) and value.captured for value in values)
    unknown: list[Value] = [Const(captured=captured)] * len(eqn.outvars)
    if eqn.primitive.name == "iota" and len(eqn.outvars[0].aval.shape) == 1:
        return [Const(np.arange(eqn.outvars[0].aval.shape[0]))]
    known = [
        (v.value, v.turns)
        for v in values
        if isinstance(v, Const) and (v.turns is not None or np.size(v.value) == 1)
    ]
    scalar = all(math.prod(var.aval.shape) == 1 for var in (*eqn.invars, *eqn.outvars))
    if not known or len(known) < len(values) or not scalar or eqn.effects:
        return unknown
    if any(value is None and turns is None for value, turns in known):
        return unknown
    turning = any(turns is not None for _, turns in known)
    length = max([len(turns) for _, turns in known if turns is not None], default=1)
    with jax.ensure_compile_time_eval():
        arguments = [
            jnp.asarray(turns if turns is not None else np.repeat(value, length), atom.aval.dtype)
            for (value, turns), atom in zip(known, eqn.invars, strict=True)
        ]
        shaped = [x.reshape(-1, *a.aval.shape) for x, a in zip(arguments, eqn.invars, strict=True)]
        results = jax.vmap(_binder(eqn))(*shaped)
    results = results if eqn.primitive.multiple_results else [results]
    if turning:
        return [Const(turns=np.ravel(result)) for result in results]
    return [Const(_scalar(result[0])) for result in results]


def _data(eqn: Any, values: Sequence[Value]) -> Data:
    """What is known of the result of an equation that only data (and constants) enter."""
    name = eqn.primitive.name
    tags = [
        value.output for value in values if isinstance(value, Data) and value.output is not None
    ]
    if not tags:
        return Data()
    if len(tags) == 1 and isinstance(tags[0], Output):
        output = tags[0]
        at = next(i for i, v in enumerate(values) if isinstance(v, Data) and v.output is output)
        same_shape = eqn.invars[at].aval.shape == eqn.outvars[0].aval.shape
        if name in ADDITIONS and same_shape and not (name == "sub" and at == 1):
            return Data(output)
        if name in VIEW_RULES and name in _REARRANGING:
            view = View(0, output.axes)
            changes = VIEW_RULES[name](eqn, at, view, values)
            axes = None if changes is None else changes[0].get("axes", output.axes)
            if axes is not None and "broadcast" not in _axes.labels(_axes.flatten(axes)):
                slots = (None,) * len(eqn.invars)
                key = f"{name} {eqn.params} {eqn.invars[at].aval}"
                step = Step(_exact(eqn), key, at, slots, slots, None)
                return Data(Output(output.site, axes, (*output.steps, step)))
    return Data(MIXED if name in BLENDING or name in _REARRANGING else None)


_REARRANGING = frozenset(
    "reshape squeeze expand_dims transpose broadcast_in_dim convert_element_type".split()
)


def _scaled(scope: Scope, eqn: Any, values: Sequence[Value]) -> int | None:
    """Which operand is a scale's output that goes nowhere but into this product, if one is."""
    if eqn.primitive.name != "mul":
        return None
    for at, value in enumerate(values):
        output = value.output if isinstance(value, Data) else None
        if (
            isinstance(output, Output)
            and output.site.kind == "scale"
            and output.site.roles is not None
            and output.site.scope is scope
            and isinstance(values[1 - at], Data)
            and scope.uses[eqn.invars[at]] == 1
            and len(output.axes) == len(eqn.outvars[0].aval.shape)
        ):
            return at
    return None


def _entangle(eqn: Any, values: Sequence[Value]) -> Entangled:
    parameters: set[int] = set()
    views = [value for value in values if isinstance(value, View)]
    parameters.update(view.parameter for view in views)
    inherited = [value for value in values if isinstance(value, Entangled)]
    for value in inherited:
        parameters.update(value.parameters)
    name = eqn.primitive.name
    opaque = name.startswith(OPAQUE_PREFIXES)
    if opaque:
        reason = f"it is used inside {name}, which is opaque"
    elif len(parameters) > 1:
        reason = f"it is combined with another parameter ({name})"
    elif inherited:
        return inherited[0]
    elif len(views) > 1:
        reason = f"it is combined with itself ({name})"
    else:
        reason = f"a non-linear function of it ({name}) meets data"
    return Entangled(frozenset(parameters), reason, opaque)


def _tail(jaxpr: jex.Jaxpr, outputs: Sequence[bool]) -> set[Any]:
    """The variables that reach the tail outputs through sums and constant factors alone."""
    broken: set[Any] = set()
    reached: set[Any] = set()

    def mark(atom: Any, good: bool) -> None:
        if not isinstance(atom, jex.Literal):
            reached.add(atom)
            if not good:
                broken.add(atom)

    for atom, good in zip(jaxpr.outvars, outputs, strict=True):
        mark(atom, good)
    for eqn in reversed(jaxpr.eqns):
        good = [var in reached and var not in broken for var in eqn.outvars]
        for atom, flag in zip(eqn.invars, _tail_inputs(eqn, good), strict=True):
            mark(atom, flag)
    return reached - broken


def _tail_inputs(eqn: Any, good: Sequence[bool]) -> Sequence[bool]:
    name = eqn.primitive.name
    if name in INLINE or name == "shard_map":
        jaxpr, _ = _open(eqn.params[INLINE.get(name, "jaxpr")])
        inner = _tail(jaxpr, good)
        return [var in inner for var in jaxpr.invars]
    constant_factor = name in {"mul", "div"} and isinstance(eqn.invars[1], jex.Literal)
    constant_factor |= name == "mul" and isinstance(eqn.invars[0], jex.Literal)
    return [all(good) and (name in TAIL or constant_factor)] * len(eqn.invars)
