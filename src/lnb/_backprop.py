"""Backpropagation that keeps the features: value, gradients, and what each neuron was fed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._interpret import (
    Claim,
    Emitter,
    Plan,
    Trace,
    arrange,
    make_program,
    trace_loss,
)
from ._metric import Features, Gram, MatrixFree, Postponed, SiteMap, empty_unless
from ._neurons import Neuron, Neurons, claim, orientations
from ._packed import is_packed, unpack

Payloads = dict[int, dict[str, Any]]


class Due(NamedTuple):
    """Of which neurons a solver wants features at the next step; part of an optimizer's state."""

    flags: dict[str, jax.Array]


def backprop(
    loss_fn: Callable[..., Any], neurons: Neurons, has_aux: bool = False, opt_state: Any = None
) -> Callable[..., tuple[Any, Any, dict[str, Features]]]:
    """Like `jax.value_and_grad`, with the features of every neuron as a third result.

    Value and gradients are those of `jax.value_and_grad`; the features come out of the same
    forward pass. All inexact arrays of `params` are differentiated, other leaves get `None`.

    Features of micro-batches or devices may be added, as gradients may, if the neurons were found
    with `find_neurons(..., metric="gram")`, in a batch as large as each of these: then they are
    sums. Otherwise some are the arrays themselves, and may not.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`.
      has_aux: whether `loss_fn` returns (value, auxiliary output).
      opt_state: the state of the optimizer that the features are for. Given that, grams are only
        computed for the neurons whose turn it is, from every `Neuron.stride`-th example; the
        others' are empty, and count nothing. Features that take little more memory than their gram
        are then handed over as they are, unless `find_neurons` was asked for grams.

    Returns:
      A function of the loss's arguments that returns `(value, grads, features)`, or
      `((value, aux), grads, features)` with `has_aux`.
    """

    _check_neurons(neurons)

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Features]]:
        due = None if opt_state is None else _due(opt_state)
        program = _Program(loss_fn, neurons, params, args, kwargs, has_aux, due)
        value_and_grad = jax.value_and_grad(program.value, has_aux=True)
        (_, (outs, payloads)), grads = value_and_grad(program.trace.parameters)
        value, aux = program.trace.output_tree(outs)
        features_ = program.features(payloads)
        return (value, aux) if has_aux else value, program.trace.gradient_tree(grads), features_

    return run


def features(loss_fn: Callable[..., Any], neurons: Neurons) -> Callable[..., dict[str, Features]]:
    """The features alone, by a forward pass.

    The paper's first option for online learning: M from a larger sample than the gradient's. The
    labels that the loss asks for may be anything.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`.

    Returns:
      A function of the loss's arguments that returns the features.
    """

    _check_neurons(neurons)

    def run(params: Any, *args: Any, **kwargs: Any) -> dict[str, Features]:
        program = _Program(loss_fn, neurons, params, args, kwargs, None)
        return program.features(program.value(program.trace.parameters)[1][1])

    return run


class _Program:
    """A loss, traced for the arguments at hand, set up to emit the features of `neurons`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        neurons: Neurons,
        params: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        has_aux: bool | None,
        due: dict[str, jax.Array] | None = None,
    ):
        self.trace = trace_loss(loss_fn, params, args, kwargs, has_aux)
        excluded = {path for path, reason in neurons.unclaimed if reason == "excluded"}
        self.lineage, claims, _ = claim(self.trace, lambda name: name in excluded)
        self.pairs = _match(neurons, claims, self.trace)
        self.due = due or {}
        self.plans: dict[str, list[Plan]] = {}
        flags: dict[int, jax.Array] = {}
        index = 0
        for neuron, c in self.pairs:
            flag = self.due.get(neuron.name)
            gram, postponed = neuron.metric == "gram", neuron.postponed and flag is not None
            stride = 1 if flag is None else neuron.stride
            plans = self.plans[neuron.name] = []
            for site in c.feeding if gram else c.sites:
                moments = dataclasses.replace(arrange(site, c), stride=stride) if gram else None
                plans.append(Plan(index, site, moments, postponed))
                if flag is not None:
                    flags[index] = flag
                index += 1
        every_plan = [plan for plans in self.plans.values() for plan in plans]
        self.emitter = Emitter(every_plan, self.lineage.origins, flags)

    def value(
        self, parameters: Sequence[Any], taps: dict[int, jax.Array] | None = None
    ) -> tuple[Any, tuple[list[Any], Payloads]]:
        arguments = [*parameters, *self.trace.data]
        emitter = self.emitter.tapped(taps) if taps else self.emitter
        outs, payloads = emitter.run(self.lineage.scope, self.trace.body, arguments)
        return outs[0], (outs, payloads)

    def features(self, payloads: Payloads) -> dict[str, Features]:
        return {
            neuron.name: empty_unless(
                self.due.get(neuron.name, True),
                _assemble(neuron, c, self.plans[neuron.name], payloads),
            )
            for neuron, c in self.pairs
        }


def find_nodes(tree: Any, kind: type) -> list[Any]:
    """All nodes of a type in an optimizer's state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]


def _check_neurons(neurons: Any) -> None:
    if not isinstance(neurons, Neurons):
        raise TypeError(
            f"neurons must be what lnb.find_neurons returns, not {type(neurons).__name__}: "
            "lnb.backprop(loss_fn, neurons)(params, batch)."
        )


def _due(opt_state: Any) -> dict[str, jax.Array]:
    nodes = find_nodes(opt_state, Due)
    if not nodes:
        raise ValueError(
            "opt_state is no state of an optimizer with lnb.scale_by_lnb in it. Pass the one that "
            "goes into its update: lnb.backprop(loss_fn, neurons, opt_state=opt_state)."
        )
    return {name: flag for node in nodes for name, flag in node.flags.items()}


def _match(neurons: Neurons, claims: Sequence[Claim], trace: Trace) -> list[tuple[Neuron, Claim]]:
    """Each neuron with what was found for it in this trace of the loss."""
    found = {trace.names[c.weight] + c.suffix: c for c in claims}
    shapes = dict(zip(trace.names, trace.shapes, strict=True))
    expected = dict(neurons.shapes)
    for name in (*expected, *shapes):
        if name not in shapes:
            problem = "is gone"
        elif name not in expected:
            problem = "was not there when find_neurons was called"
        elif shapes[name] != expected[name]:
            problem = f"has shape {shapes[name]}, but find_neurons saw {expected[name]}"
        else:
            continue
        raise ValueError(
            f"the parameter {name!r} {problem}. Call find_neurons again on these parameters, or "
            "pass those that it saw."
        )
    pairs = []
    for neuron in neurons:
        if neuron.kind == "identity":
            continue
        c = found.get(neuron.name)
        if c is None or c.layout != neuron.layout or c.bias_layout != neuron.bias_layout:
            raise ValueError(
                f"the neuron {neuron.name!r} is not used in this loss as it was in the one that "
                "find_neurons saw. Call find_neurons(loss_fn, params, batch) on this loss."
            )
        pairs.append((neuron, c))
    return pairs


def _assemble(neuron: Neuron, c: Claim, plans: Sequence[Plan], payloads: Payloads) -> Features:
    found = [payloads[plan.index] for plan in plans]
    n = _count(c, found)
    if neuron.metric == "gram":
        if plans[0].postponed:
            arrangements = [plan.moments.waiting() for plan in plans if plan.moments is not None]
            xs = tuple(tuple(payload.values()) for payload in found)
            return Postponed(xs, n, tuple(arrangements))
        totals = []
        packed = all(is_packed(payload["second"]) for payload in found)
        for payload in found:
            shape = (c.layout.blocks, c.layout.inputs)
            second = payload["second"]
            if c.kind == "lookup":
                second = second.reshape(shape)
            else:
                second = second.reshape(c.layout.blocks, *second.shape[-2:])
                second = second if packed else unpack(second)
            total = {"second": second}
            if "first" in payload:
                total["first"] = payload["first"].reshape(shape)
            totals.append(total)
        total = jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *totals)
        return Gram(total["second"], total.get("first"), n.astype(total["second"].dtype))
    sites = []
    # A site that is only visited at times has features all the same.
    sides = [] if any("count" in payload for payload in found) else orientations(c)
    forms = {id(site): c for site in c.feeding} if c.has_gram else {}
    forms |= {id(side.sites[0]): side for side in sides}
    for plan in plans:
        form = forms.get(id(plan.site))
        arrangement = None if form is None else arrange(plan.site, form)
        layout = form.layout if form in sides else None
        sites.append(SiteMap(make_program(plan.site), arrangement, _feature_slots(plan), layout))
    residuals = tuple({k: v for k, v in p.items() if k != "count"} for p in found)
    return MatrixFree(residuals, n, tuple(sites), c.layout, c.bias_layout)


def _feature_slots(plan: Plan) -> tuple[str, ...]:
    operands = [slot for step in plan.site.steps for slot in step.operands]
    return tuple(str(slot) for slot in operands if slot is not None)


def _count(c: Claim, payloads: Sequence[dict[str, Any]]) -> jax.Array:
    """n: static, unless control flow decides which sites are visited."""
    total: Any = 0.0
    for site, payload in zip(c.feeding, payloads, strict=False):
        share = 1.0 if c.has_gram else site.view.fraction
        total += share * (jnp.max(payload["count"]) if "count" in payload else site.count())
    return jnp.round(total) if isinstance(total, jax.Array) else jnp.float32(round(total))
