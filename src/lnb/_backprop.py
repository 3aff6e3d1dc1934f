"""Backpropagation that keeps the features: value, gradients, and what each neuron was fed."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _plan
from ._checks import check_neurons, check_shapes
from ._features import Residuals, Rows, SiteRows
from ._jaxpr import Claim, Emitter, Payloads, Plan, Trace, trace_loss
from ._metric import Features
from ._neurons import Neuron, Neurons, claim
from ._renamed import renamed


@renamed(
    opt_state="leave it out, features no longer depend on the state",
    has_aux="find_neurons(..., has_aux=True) is enough",
)
def backprop(
    loss_fn: Callable[..., Any], neurons: Neurons
) -> Callable[..., tuple[Any, Any, dict[str, Features]]]:
    """Like `jax.value_and_grad`, with the features of every neuron as a third result.

    Value and gradients are those of `jax.value_and_grad`; the features come out of the same
    forward pass. All inexact arrays of `params` are differentiated, other leaves get `None`.

    Features of micro-batches may not be added. Those of any one of them are a fair sample: add up
    the gradients, and pass the features of the last micro-batch.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`.

    Returns:
      A function of the loss's arguments that returns `(value, grads, features)`, or
      `((value, aux), grads, features)` if `neurons` were found with `has_aux`.
    """
    check_neurons(neurons, "lnb.backprop(loss_fn, neurons)(params, batch)")

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, dict[str, Features]]:
        program = EmittingLoss(loss_fn, neurons, params, args, kwargs)
        value_and_grad = jax.value_and_grad(program, has_aux=True)
        (_, (outs, payloads)), grads = value_and_grad(program.trace.parameters)
        value, aux = program.trace.output_tree(outs)
        grads, features = program.trace.gradient_tree(grads), program.features(payloads)
        return (value, aux) if neurons.has_aux else value, grads, features

    return run


def forward_features(
    loss_fn: Callable[..., Any], neurons: Neurons
) -> Callable[..., dict[str, Features]]:
    """The features alone, by a forward pass.

    The paper's first option for online learning: M from a larger sample than the gradient's. The
    labels that the loss asks for may be anything.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`.

    Returns:
      A function of the loss's arguments that returns the features.
    """
    check_neurons(neurons, "lnb.forward_features(loss_fn, neurons)(params, batch)")

    def run(params: Any, *args: Any, **kwargs: Any) -> dict[str, Features]:
        program = EmittingLoss(loss_fn, neurons, params, args, kwargs)
        return program.features(program(program.trace.parameters)[1][1])

    return run


class EmittingLoss:
    """A loss, traced for the arguments at hand, that emits the features of `neurons`."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        neurons: Neurons,
        params: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        make_emitter: type[Emitter] = Emitter,
    ):
        self.trace = trace_loss(loss_fn, params, args, kwargs, neurons.has_aux)
        excluded = {path for path, reason in neurons.unclaimed if reason == "excluded"}
        self.lineage, claims, _ = claim(self.trace, excluded.__contains__)
        self.pairs = _match(neurons, claims, self.trace)
        self.plans: dict[str, list[Plan]] = {}
        keys = itertools.count()
        for neuron, c in self.pairs:
            if c.rows is None:
                forms = [site.program(c.layout, c.bias_layout) for site in c.sites]
            else:
                forms = _plan.thinned(c.rows, neurons.rows)
            self.plans[neuron.name] = list(map(Plan, keys, c.sites, forms))
        every_plan = [plan for plans in self.plans.values() for plan in plans]
        self.emitter = make_emitter(every_plan, self.lineage.origins)

    def __call__(self, parameters: Sequence[Any]) -> tuple[Any, tuple[list[Any], Payloads]]:
        """The value, then all outputs and what the sites handed out."""
        arguments = [*parameters, *self.trace.data]
        outs, payloads = self.emitter.run(self.lineage.scope, self.trace.body, arguments)
        return outs[0], (outs, payloads)

    def features(self, payloads: Payloads) -> dict[str, Features]:
        return {name: _features(plans, payloads) for name, plans in self.plans.items()}


def _features(plans: Sequence[Plan], payloads: Payloads) -> Features:
    """The features of one neuron, from what its sites handed out."""
    positions = tuple(_positions(plan, payloads) for plan in plans)
    sites = tuple(plan.form for plan in plans)
    if isinstance(sites[0], SiteRows):
        return Rows(tuple(payloads[plan.key, "rows"] for plan in plans), positions, sites)
    arrays = tuple(
        {slot: x for (key, slot), x in payloads.items() if key == plan.key} for plan in plans
    )
    return Residuals(arrays, positions, sites)


def _positions(plan: Plan, payloads: Payloads) -> jax.Array:
    """How many positions a site has: static, unless branches decide whether it is visited."""
    count = payloads.get((plan.key, "count"))
    if count is None:
        return jnp.float32(plan.site.count())
    scanned = [chain.scanned for chain in plan.site.view.chains[1:]][: count.ndim]
    return jnp.max(jnp.sum(count, axis=tuple(i for i, s in enumerate(scanned) if not s)))


def _match(neurons: Neurons, claims: Sequence[Claim], trace: Trace) -> list[tuple[Neuron, Claim]]:
    """Each neuron with what was found for it in this trace of the loss."""
    found = {trace.names[c.weight] + c.suffix: c for c in claims}
    check_shapes(neurons, dict(zip(trace.names, trace.shapes, strict=True)))
    pairs = []
    for neuron in neurons:
        if neuron.kind == "identity":
            continue
        c = found.get(neuron.name)
        if c is None or c.layout != neuron.layout or c.bias_layout != neuron.bias_layout:
            raise ValueError(
                f"the neuron {neuron.name!r} is not used in this loss as it was in the one that "
                "find_neurons saw. Call find_neurons(loss_fn, params, batch) on this loss, with "
                "arguments of the same kinds: Python's numbers are constants, arrays are data."
            )
        pairs.append((neuron, c))
    return pairs
