"""The static pass: follows every parameter through a jaxpr to the places where it meets data."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from .._features import Step, dims
from . import _flow
from ._constants import (
    ADDITIONS,
    blend,
    constant,
    differentiable,
    entangle,
    fold,
    is_sum,
    read,
)
from ._sites import GROWTH_RULES, find_site, pair_bias
from ._values import (
    MIXED,
    Const,
    Data,
    Entangled,
    Output,
    Scope,
    Site,
    Use,
    Value,
    View,
    penalties_of,
)
from ._versions import Body, Equation, is_literal
from ._views import REARRANGING, VIEW_RULES

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
    """What the walk finds.

    Attributes:
      scope: that of the program; the scopes where sites stand are inside.
      uses: all uses of every parameter.
      origins: the scope and the variable of each residual slot.
    """

    scope: Scope = dataclasses.field(default_factory=Scope)
    uses: dict[int, list[Use]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    origins: dict[str, tuple[Scope, Any]] = dataclasses.field(default_factory=dict)


def trace_lineage(body: Body, parameters: int) -> Lineage:
    """Follows the first `parameters` inputs of a program."""
    lineage = Lineage()
    values: list[Value] = [
        View(index, dims.of_parameter(var.aval.shape))
        for index, var in enumerate(body.invars[:parameters])
    ]
    values += [Data()] * (len(body.invars) - parameters)
    Walker(lineage, lineage.scope).run(body, values)
    return lineage


class Walker:
    """Walks one program, and those inside."""

    def __init__(self, lineage: Lineage, scope: Scope):
        self.lineage, self.scope = lineage, scope

    # -- the walk -------------------------------------------------------------------------------

    def run(self, body: Body, arguments: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = {var: constant(value) for var, value in body.constants}
        env.update(zip(body.invars, arguments, strict=True))
        atoms = [*itertools.chain.from_iterable(e.invars for e in body.equations), *body.outvars]
        self.scope.uses.update(atom for atom in atoms if not is_literal(atom))
        for index, eqn in enumerate(body.equations):
            values = [read(env, atom) for atom in eqn.invars]
            enter = functools.partial(self.enter, index)
            env.update(zip(eqn.outvars, self.equation(eqn, values, enter), strict=True))
        return [read(env, atom) for atom in body.outvars]

    def enter(self, index: int, body: Body, values: Sequence[Value], *loop: int) -> list[Value]:
        """Walks a program inside equation `index`."""
        return Walker(self.lineage, self.scope.enter(index, *loop)).run(body, values)

    def equation(self, eqn: Equation, values: list[Value], enter: _flow.Enter) -> list[Value]:
        name = eqn.name
        if name in FORWARDING:
            return values
        if name in _flow.TRANSPARENT and eqn.bodies:
            return _flow.TRANSPARENT[name](self, eqn, values, enter)
        constants = [value for value in values if isinstance(value, Const)]
        if len(constants) == len(values):
            return fold(eqn, constants)
        penalties = penalties_of(values)
        if not is_sum(eqn, values):
            for parameter, use in penalties:
                self.lineage.uses[parameter].append(use)
            penalties = ()
        results = self.result(eqn, values, enter)
        return [
            dataclasses.replace(result, penalties=(*result.penalties, *penalties))
            if isinstance(result, Data)
            else result
            for result in results
        ]

    def result(self, eqn: Equation, values: list[Value], enter: _flow.Enter) -> list[Value]:
        if not any(isinstance(v, View | Entangled) for v in values):
            return self.data(eqn, values)
        if eqn.name in _flow.CONTROL and eqn.bodies:
            return _flow.CONTROL[eqn.name](self, eqn, values, enter)
        if eqn.name == "stop_gradient" and isinstance(values[0], View):
            return [Data(frozen=values[0].parameter)]
        if eqn.name == "stop_gradient" or not differentiable(eqn):
            return [Data()] * len(eqn.outvars)
        return self.meeting(eqn, values)

    # -- where parameters meet something --------------------------------------------------------

    def meeting(self, eqn: Equation, values: list[Value]) -> list[Value]:
        views = [i for i, v in enumerate(values) if isinstance(v, View)]
        entangled = any(isinstance(v, Entangled) for v in values)
        if len(views) == 1 and not entangled and not eqn.unreadable:
            result = self.single_view(eqn, values, views[0])
            if result is not None:
                return result
        data = [value for value in values if isinstance(value, Data)]
        if data and eqn.name in JOINS and not eqn.unreadable:
            frozen = {value.frozen for value in data}
            for value in values:
                switched = isinstance(value, View) and value.parameter in frozen
                use = Use("opaque", reason=SWITCHED) if switched else Use("identity")
                self.use(value, use)
            return [Data(MIXED)] * len(eqn.outvars)
        result = entangle(eqn, values)
        if not data:
            return [result] * len(eqn.outvars)
        if eqn.name in ADDITIONS:
            penalties = tuple(_uses(result, Use("nonlinear")))
            return [dataclasses.replace(blend(eqn, values), penalties=penalties)]
        self.use(result, Use("nonlinear"))
        return [Data()] * len(eqn.outvars)

    def single_view(self, eqn: Equation, values: list[Value], at: int) -> list[Value] | None:
        name = eqn.name
        view = values[at]
        assert isinstance(view, View)
        others = [value for i, value in enumerate(values) if i != at]
        if all(isinstance(v, Const) for v in others) and name in VIEW_RULES:
            changes = VIEW_RULES[name](eqn, at, view, values)
            if changes is not None:
                return [
                    view.then(self.step(eqn, at, output), **change)
                    for output, change in enumerate(changes)
                ]
        found = find_site(eqn, at, view)
        if found is not None:
            steps = (self.step(eqn, at),)
            site = Site(view=view, steps=steps, scope=self.scope, output=eqn.outvars[0], **found)
            self.use(view, Use("site", site))
            return [_output_of(site)]
        if name in ADDITIONS and isinstance(others[0], Data):
            return [self.addition(eqn, at, view, others[0])]
        return None

    def addition(self, eqn: Equation, at: int, view: View, data: Data) -> Value:
        output, shape = data.output, eqn.outvars[0].aval.shape
        if eqn.name == "sub" and at == 1:
            view = view.then(Step(jnp.negative, "neg"), scale=-view.scale)
        if isinstance(output, Output) and output.site.kind != "lookup" and not output.site.bias:
            pairs = pair_bias(view, output, shape)
            if pairs is not None:
                site = output.site
                site.bias, site.bias_pairs, site.after = view, pairs, output.steps
                site.view = output.view
                self.use(view, Use("bias", site))
                return Data(MIXED)
        output, identity = None if output is None else MIXED, Use("identity")
        if shape == ():
            return Data(output, penalties=((view.parameter, identity),))
        self.use(view, identity)
        return Data(output)

    def data(self, eqn: Equation, values: list[Value]) -> list[Value]:
        """An equation without parameters. Site outputs pass through it, and some sites grow."""
        for at, value in enumerate(values):
            output = value.output if isinstance(value, Data) else None
            if not isinstance(output, Output) or output.site.kind not in GROWTH_RULES:
                continue
            site = output.site
            here, shared = site.scope is self.scope, self.scope.uses[eqn.invars[at]] > 1
            fed = site.kind == "lookup" or all(isinstance(v, Data) for v in values)
            grows = fed and here and not shared and not eqn.unreadable
            found = GROWTH_RULES[site.kind](eqn, at, output) if grows else None
            if found is not None:
                steps = (*site.steps, *output.steps, self.step(eqn, at))
                vars(site).update(found, steps=steps, output=eqn.outvars[0])
                return [_output_of(site)]
            if shared or (site.kind == "lookup" and not (here and eqn.name in REARRANGING)):
                return [Data(MIXED)] * len(eqn.outvars)
        return [blend(eqn, values)] * len(eqn.outvars)

    def step(self, eqn: Equation, at: int, output: int = 0) -> Step:
        """The equation as a function of operand `at`; the other operands are residuals."""
        origins = self.lineage.origins
        operands: list[Any] = [atom.val if is_literal(atom) else None for atom in eqn.invars]
        for i, atom in enumerate(eqn.invars):
            if i != at and not is_literal(atom):
                operands[i] = str(len(origins))
                origins[operands[i]] = (self.scope, atom)
        several = output if eqn.several else None
        return Step(eqn.exact(), eqn.key, at, tuple(operands), several)

    def use(self, value: Value, use: Use) -> None:
        for parameter, own in _uses(value, use):
            self.lineage.uses[parameter].append(own)


def _output_of(site: Site) -> Data:
    return Data(MIXED if site.output_axes is None else Output(site, site.output_axes))


def _uses(value: Value, use: Use) -> Iterator[tuple[int, Use]]:
    """What becomes of a view is given; an entangled parameter has no use."""
    if isinstance(value, View):
        yield value.parameter, use
    elif isinstance(value, Entangled):
        own = Use("opaque" if value.opaque else "nonlinear", reason=value.reason)
        yield from ((parameter, own) for parameter in value.parameters)
