"""The static pass: follows every parameter through a jaxpr to the places where it meets data."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._features import Step, dims
from . import _flow
from ._constants import (
    ADDITIONS,
    REARRANGING,
    blend,
    captured,
    differentiable,
    entangle,
    fold,
    read,
)
from ._sites import SITE_RULES, experts, first_position, pair_bias
from ._tail import tail_of
from ._values import MIXED, Const, Data, Entangled, Output, Scope, Site, Use, Value, View
from ._versions import INLINE, Body, Equation, is_literal
from ._views import VIEW_RULES

# Primitives whose results are their operands, one for one.
FORWARDING = frozenset(
    "copy copy_p name sharding_constraint pvary pcast mesh_cast reshard layout_constraint "
    "device_put optimization_barrier".split()
)
SWITCHED = (
    "it is used in a branch of a lax.switch or lax.cond under vmap, which runs all branches for "
    "all examples: stack the branches' weights and take one for each example, w[expert]"
)
JOINS = frozenset("concatenate select_n dynamic_update_slice scatter scatter-add pad".split())


@dataclasses.dataclass(frozen=True)
class Lineage:
    """All uses of every parameter, and the scopes where its sites stand."""

    scope: Scope
    uses: dict[int, list[Use]]
    origins: dict[int, tuple[Scope, Any]]  # of each residual slot: scope and variable


def trace_lineage(body: Body, parameters: int) -> Lineage:
    """Follows the first `parameters` inputs of a program."""
    walker = Walker()
    values: list[Value] = [
        View(index, dims.of_parameter(var.aval.shape))
        for index, var in enumerate(body.invars[:parameters])
    ]
    values += [Data()] * (len(body.invars) - parameters)
    scope = Scope()
    walker.run(scope, body, values, [True] * len(body.outvars))
    return Lineage(scope, dict(walker.uses), walker.origins)


class Walker:
    def __init__(self) -> None:
        self.uses: dict[int, list[Use]] = collections.defaultdict(list)
        self.origins: dict[int, tuple[Scope, Any]] = {}

    # -- the walk -------------------------------------------------------------------------------

    def run(
        self,
        scope: Scope,
        body: Body,
        arguments: Sequence[Value],
        tail_outputs: Sequence[bool],
    ) -> list[Value]:
        env: dict[Any, Value] = {var: captured(value) for var, value in body.constants}
        env.update(zip(body.invars, arguments, strict=True))
        tail = tail_of(body, tail_outputs)
        atoms = [*itertools.chain.from_iterable(e.invars for e in body.equations), *body.outvars]
        scope.uses.update(atom for atom in atoms if not is_literal(atom))
        for index, eqn in enumerate(body.equations):
            values = [read(env, atom) for atom in eqn.invars]
            env.update(
                zip(eqn.outvars, self.equation(scope, index, eqn, values, tail), strict=True)
            )
        return [read(env, atom) for atom in body.outvars]

    def equation(
        self, scope: Scope, index: int, eqn: Equation, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        name = eqn.name
        if name in FORWARDING:
            return values
        if all(isinstance(value, Const) for value in values):
            return fold(eqn, values)
        relevant = any(isinstance(v, View | Entangled) for v in values)
        tagged = any(isinstance(v, Data) and v.output is not None for v in values)
        if name in INLINE and eqn.bodies and (relevant or tagged):
            return _flow.inline(self, scope, index, eqn, values, tail)
        if not relevant:
            return self.data(scope, eqn, values)
        if name in _flow.CONTROL and eqn.bodies:
            return _flow.CONTROL[name](self, scope, index, eqn, values, tail)
        if name == "stop_gradient" and isinstance(values[0], View):
            return [Data(frozen=values[0].parameter)]
        if name == "stop_gradient" or not differentiable(eqn):
            return [Data()] * len(eqn.outvars)
        return self.meeting(scope, eqn, values, tail)

    # -- where parameters meet something --------------------------------------------------------

    def meeting(
        self, scope: Scope, eqn: Equation, values: list[Value], tail: set[Any]
    ) -> list[Value]:
        name = eqn.name
        views = [i for i, v in enumerate(values) if isinstance(v, View)]
        if (
            len(views) == 1
            and not eqn.unreadable
            and not any(isinstance(v, Entangled) for v in values)
        ):
            result = self.single_view(scope, eqn, values, views[0], tail)
            if result is not None:
                return result
        data = any(isinstance(v, Data) for v in values)
        if data and name in ADDITIONS and eqn.outvars[0] in tail:
            return [blend(eqn, values)]  # a penalty, on its way to the loss
        if data and name in JOINS and not eqn.unreadable:
            frozen = {value.frozen for value in values if isinstance(value, Data)}
            for value in values:
                switched = isinstance(value, View) and value.parameter in frozen
                use = Use("opaque", reason=SWITCHED) if switched else Use("identity")
                self.use(value, use)
            return [Data(MIXED)] * len(eqn.outvars)
        entangled = entangle(eqn, values)
        if not data:
            return [entangled] * len(eqn.outvars)
        self.use(entangled, Use("nonlinear"))
        return [Data()] * len(eqn.outvars)

    def single_view(
        self, scope: Scope, eqn: Equation, values: list[Value], at: int, tail: set[Any]
    ) -> list[Value] | None:
        name = eqn.name
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

    def site(
        self, scope: Scope, eqn: Equation, at: int, view: View, found: dict[str, Any]
    ) -> Value:
        steps = (self.step(scope, eqn, at, 0),)
        site = Site(view=view, steps=steps, scope=scope, output=eqn.outvars[0], **found)
        self.use(view, Use("site", site))
        return Data(MIXED if site.output_axes is None else Output(site, site.output_axes))

    def addition(self, eqn: Equation, at: int, view: View, data: Data, tail: set[Any]) -> Value:
        output = data.output
        if eqn.name == "sub" and at == 1:
            view = view.then(Step(jnp.negative, "neg"), scale=-view.scale)
        if isinstance(output, Output) and output.site.kind != "lookup" and not output.site.bias:
            pairs = pair_bias(view, output, eqn.outvars[0].aval.shape)
            if pairs is not None:
                site = output.site
                site.bias, site.bias_pairs, site.after = view, pairs, output.steps
                self.use(view, Use("bias", site))
                return Data(MIXED)
        if not (eqn.outvars[0] in tail and eqn.outvars[0].aval.shape == ()):
            self.use(view, Use("identity"))
        return Data(None if output is None else MIXED)

    def data(self, scope: Scope, eqn: Equation, values: list[Value]) -> list[Value]:
        """An equation without parameters. Site outputs pass through it, and scales grow in it."""
        for at, value in enumerate(values):
            output = value.output if isinstance(value, Data) else None
            if not isinstance(output, Output):
                continue
            if eqn.name == "mul" and _goes_on(scope, eqn, values, at, output):
                return [self.rescale(scope, eqn, at, output)]
            if output.site.kind == "lookup":
                return [self.looked_up(scope, eqn, at, output)] * len(eqn.outvars)
        return [blend(eqn, values)] * len(eqn.outvars)

    def rescale(self, scope: Scope, eqn: Equation, at: int, output: Output) -> Value:
        """A scale that has met one factor of its features meets another.

        Normalisation layers write (x - mean) * (rsqrt(variance) * scale): all of it is what the
        scale is fed.
        """
        site, shape = output.site, eqn.outvars[0].aval.shape
        axes = dims.spread(output.axes, shape)
        site.features = (*site.features, eqn.invars[1 - at])
        site.steps = (*site.steps, *output.steps, self.step(scope, eqn, at, 0))
        site.options["stages"] += ((output.steps, shape),)
        site.feature_axes = site.output_axes = axes
        site.output = eqn.outvars[0]
        site.examples = first_position(axes)
        site.positions = dims.size(dim for dim in dims.flatten(axes) if dim.stride == 0)
        return Data(Output(site, axes))

    def looked_up(self, scope: Scope, eqn: Equation, at: int, output: Output) -> Value:
        """Rows of a table go on; a product with data makes them weights, those of experts."""
        if scope is not output.site.scope or scope.uses[eqn.invars[at]] != 1:
            return Data(MIXED)
        if eqn.name in REARRANGING:
            return blend(eqn, [Data(output)])
        readable = eqn.name == "dot_general" and not eqn.unreadable
        found = experts(eqn, at, output) if readable else None
        if found is None:
            return Data(MIXED)
        site = output.site
        site.steps = (*site.steps, *output.steps, self.step(scope, eqn, at, 0))
        vars(site).update(found, output=eqn.outvars[0])
        return Data(MIXED)

    def step(self, scope: Scope, eqn: Equation, at: int, output: int) -> Step:
        slots, literals = [], []
        for i, atom in enumerate(eqn.invars):
            literal = is_literal(atom)
            slots.append(None if literal or i == at else len(self.origins))
            literals.append(atom.val if literal else None)
            if slots[-1] is not None:
                self.origins[slots[-1]] = (scope, atom)
        several = output if eqn.several else None
        return Step(eqn.exact(), eqn.key, at, tuple(slots), tuple(literals), several)

    def use(self, value: Value, use: Use) -> None:
        """Notes what becomes of a view; an entangled parameter can have no use."""
        if isinstance(value, View):
            self.uses[value.parameter].append(use)
        elif isinstance(value, Entangled):
            for parameter in value.parameters:
                kind = "opaque" if value.opaque else "nonlinear"
                self.uses[parameter].append(Use(kind, reason=value.reason))


def _goes_on(scope: Scope, eqn: Equation, values: list[Value], at: int, output: Output) -> bool:
    """Whether this product with data is the only place that a scale's output goes to."""
    return (
        output.site.kind == "scale"
        and output.site.roles is not None
        and output.site.scope is scope
        and isinstance(values[1 - at], Data)
        and scope.uses[eqn.invars[at]] == 1
        and len(output.axes) == len(eqn.outvars[0].aval.shape)
    )
