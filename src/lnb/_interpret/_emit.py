"""The emitting pass: runs the program anew, with the sites' features as further outputs.

Control flow is written again through JAX's public functions around the interpreted inner program,
so that custom derivative rules, rematerialisation and shardings stay what they were; whatever holds
no site is bound unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from ._flow import split
from ._program import Program
from ._statistics import Arrangement
from ._values import Scope, Site
from ._versions import INLINE, Body, Equation, is_literal, varying_axes

Payload = dict[Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a site's features leave the program: as moments, or as the residuals of its program.

    Moments may be postponed: what leaves the program is then the features in their arrangement.
    """

    index: int
    site: Site
    moments: Arrangement | None
    postponed: bool = False


def make_program(site: Site) -> Program:
    """The site's map from weight and bias to its outputs."""
    *outer, last = site.view.chains
    steps = (*last.steps, *site.steps, *site.after)
    weight = (*outer, dataclasses.replace(last, steps=steps))
    bias = None if site.bias is None else site.bias.chains
    slots = tuple(
        tuple(
            slot
            for chain in (weight[level], *([bias[level]] if bias else []))
            for step in chain.steps
            for slot in step.operands
            if slot is not None
        )
        for level in range(len(weight))
    )
    return Program(weight, bias, slots)


class Emitter:
    """Emits what the plans say; moments only where they are due, by the plans' indices."""

    def __init__(
        self,
        plans: Sequence[Plan],
        origins: dict[int, tuple[Scope, Any]],
        due: Mapping[int, Array] | None = None,
    ):
        self.moments: dict[Scope, list[Plan]] = {}
        self.residuals: dict[Scope, list[tuple[Plan, int, Any]]] = {}
        self.taps: dict[Scope, dict[Any, Array]] = {}
        self.due: Mapping[int, Array] = due or {}
        self.plans = {plan.index: plan for plan in plans}
        for plan in plans:
            if plan.moments is not None:
                self.moments.setdefault(plan.site.scope, []).append(plan)
                continue
            for slots in make_program(plan.site).slots:
                for slot in slots:
                    scope, var = origins[slot]
                    self.residuals.setdefault(scope, []).append((plan, slot, var))

    def tapped(self, taps: Mapping[int, Array]) -> Emitter:
        """The same, with arrays added to the outputs of planned sites, by the plans' indices.

        The gradient with respect to such an array is the error at that output. Sites in a loop
        cannot be told apart by turns.
        """
        other = copy.copy(self)
        other.taps = {}
        for index, tap in taps.items():
            site = self.plans[index].site
            other.taps.setdefault(site.scope, {})[site.output] = tap
        return other

    def _live(self, scope: Scope) -> bool:
        return (
            scope in self.moments
            or scope in self.residuals
            or scope in self.taps
            or any(self._live(s) for inner in scope.inner.values() for s in inner)
        )

    def run(
        self, scope: Scope, body: Body, arguments: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Payload]]:
        """The program's outputs, and each site's payload."""
        env: dict[Any, Any] = dict(body.constants)
        env.update(zip(body.invars, arguments, strict=True))
        read = lambda atom: atom.val if is_literal(atom) else env[atom]
        payloads: dict[int, Payload] = {}
        taps = self.taps.get(scope, {})
        for index, eqn in enumerate(body.equations):
            operands = [read(atom) for atom in eqn.invars]
            with eqn.context():
                inner = scope.inner.get(index, ())
                if any(self._live(s) for s in inner):
                    outs, emitted = self.nested(inner, eqn, operands)
                    _update(payloads, emitted)
                else:
                    outs = eqn.bind(*operands)
                    outs = outs if eqn.several else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in taps.keys() & set(eqn.outvars) if taps else ():
                env[var] = env[var] + taps[var]
        for plans in _fed_alike(self.moments.get(scope, ())):
            arrangement = plans[0].moments
            assert arrangement is not None
            features = [lax.stop_gradient(read(atom)) for atom in plans[0].site.features]
            payload = self.emit(plans, arrangement, features)
            _update(payloads, {plan.index: dict(payload) for plan in plans})
        for plan, slot, var in self.residuals.get(scope, ()):
            _update(payloads, {plan.index: {f"{slot}": lax.stop_gradient(read(var))}})
        return [read(atom) for atom in body.outvars], payloads

    def turn(self, plans: Sequence[Plan]) -> Array | None:
        """Whether it is the turn of one of these plans; `None` where there are no turns."""
        due = [self.due[plan.index] for plan in plans if plan.index in self.due]
        if len(due) < len(plans) or plans[0].site.scope.sharded:  # a shard_map closes over nothing
            return None
        return functools.reduce(jnp.logical_or, due)

    def emit(
        self, plans: Sequence[Plan], arrangement: Arrangement, features: Sequence[Array]
    ) -> Payload:
        """The moments of features that several plans share; zeros unless it is their turn."""
        if plans[0].postponed:
            return dict(enumerate(arrangement.wait(*features)))
        turn = self.turn(plans)
        if turn is None:
            return arrangement.moments(*features)
        shapes = jax.eval_shape(arrangement.packed_moments, *features)
        return lax.cond(
            turn,
            lambda: arrangement.packed_moments(*features),
            lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes),
        )

    def nested(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        name = eqn.name
        if name in INLINE:
            wrap = {"jit": _jit, "checkpoint": _checkpoint, "call": _call}[name]
            return wrap(eqn, lambda *xs: self.run(inner[0], eqn.bodies[0], xs))(*operands)
        return {"scan": self.scan, "cond": self.cond, "shard_map": self.shard_map}[name](
            inner, eqn, operands
        )

    def scan(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        params, (body,) = eqn.params, eqn.bodies
        n_carry = params["carry"]
        consts, init, xs = split(operands, [params["consts"], n_carry])
        level = len(inner[0].loops)

        def sums(index: int, entry: str) -> bool:
            """Moments of a weight that all turns share add up; all else is stacked."""
            plan = self.plans[index]
            scanned = plan.site.view.chains[level].scanned
            return not scanned and (plan.moments is not None or entry == "count")

        def turn(carry: list[Any], x: list[Any]):
            arguments = [*consts, *carry, *x]
            outs, payloads = self.run(inner[0], body, arguments)
            summed = {(i, k): v for i, p in payloads.items() for k, v in p.items() if sums(i, k)}
            stacked = {
                (i, k): v for i, p in payloads.items() for k, v in p.items() if not sums(i, k)
            }
            return outs[:n_carry], outs[n_carry:], summed, stacked

        def step(carry: Any, x: list[Any]):
            values, totals = carry
            values, ys, summed, stacked = turn(values, x)
            return (values, jax.tree.map(jnp.add, totals, summed)), (ys, stacked)

        first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
        shapes = jax.eval_shape(turn, init, first)[2]
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        (values, totals), (ys, stacked) = lax.scan(step, (init, zeros), xs, **params["options"])
        payloads: dict[int, Payload] = {}
        for (index, entry), value in (*totals.items(), *stacked.items()):
            payloads.setdefault(index, {})[entry] = value
        return [*values, *ys], payloads

    def cond(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        index, *operands = operands
        branches: list[Callable[..., Any]] = []
        for scope, branch in zip(inner, eqn.bodies, strict=True):
            branches.append(lambda *xs, s=scope, b=branch: self.branch(s, b, xs))
        shapes: dict[int, Any] = {}
        for branch in branches:
            shapes.update(jax.eval_shape(branch, *operands)[1])

        def filled(branch: Callable[..., Any]) -> Callable[..., Any]:
            def run(*xs: Any):
                outs, payloads = branch(*xs)
                blank = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
                return outs, {**blank, **payloads}

            return run

        return lax.switch(jnp.asarray(index, jnp.int32), [filled(b) for b in branches], *operands)

    def branch(self, scope: Scope, branch: Body, operands: Sequence[Any]):
        """Counts are traced from here on: a branch not taken counts nothing."""
        outs, payloads = self.run(scope, branch, operands)
        for index, payload in payloads.items():
            count = self.plans[index].site.count(len(scope.loops))
            payload.setdefault("count", jnp.asarray(count, jnp.float32))
        return outs, payloads

    def shard_map(self, inner: Sequence[Scope], eqn: Equation, operands: list[Any]):
        params, (body,) = eqn.params, eqn.bodies

        def local(*xs: Any):
            outs, payloads = self.run(inner[0], body, xs)
            for index, payload in payloads.items():
                count = self.plans[index].site.count(len(inner[0].loops))
                payload.setdefault("count", jnp.asarray(count, jnp.float32))
            return outs, {index: total(payload) for index, payload in payloads.items()}

        def total(payload: Payload) -> Payload:
            """The sums over all devices whose features differ."""
            axes = params["axes"]
            if params["check_vma"]:
                axes = varying_axes(payload["second"])
            return lax.psum(payload, tuple(sorted(axes))) if axes else payload

        return jax.shard_map(
            local,
            mesh=params["mesh"],
            in_specs=params["in_specs"],
            out_specs=(list(params["out_specs"]), PartitionSpec()),
            check_vma=params["check_vma"],
            axis_names=set(params["axes"]),
        )(*operands)


def _fed_alike(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans of the same arrays in the same arrangement, together: their moments are the same."""
    groups: dict[Any, list[Plan]] = {}
    for plan in plans:
        assert plan.moments is not None
        plain = plan.moments.kind in {"dense", "conv"}
        key = (plan.site.fed_by, plan.moments, plan.postponed) if plain else plan.index
        groups.setdefault(key, []).append(plan)
    return list(groups.values())


def _update(payloads: dict[int, Payload], further: dict[int, Payload]) -> None:
    for index, payload in further.items():
        payloads.setdefault(index, {}).update(payload)


def _call(eqn: Equation, run: Callable[..., Any]) -> Callable[..., Any]:
    return run


def _checkpoint(eqn: Equation, run: Callable[..., Any]) -> Callable[..., Any]:
    params = eqn.params
    return jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])


def _jit(eqn: Equation, run: Callable[..., Any]) -> Callable[..., Any]:
    params = eqn.params
    run.__name__ = params["name"]
    ins, outs = params["in_shardings"], params["out_shardings"]
    options: dict[str, Any] = {"inline": params["inline"]}
    if any(s is not None for s in ins):
        options["in_shardings"] = tuple(ins)
    if any(s is not None for s in outs):
        options["out_shardings"] = (outs, None)
    return jax.jit(run, **options)
