"""Backpropagation that keeps the features: value, gradients, and what each neuron was fed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ._checks import check_neurons, check_shapes
from ._features import Features
from ._jaxpr import Claim, Emitter, Key, Payloads, Site, Trace, trace_loss
from ._neurons import Neurons, claim
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
        self.lineage, claims, _ = claim(self.trace, excluded.__contains__, neurons.rows)
        self.claims = _match(neurons, claims, self.trace)
        self.emitter = make_emitter(self.claims, self.lineage.origins)

    def __call__(self, parameters: Sequence[Any]) -> tuple[Any, tuple[list[Any], Payloads]]:
        """The value, then all outputs and what the sites handed out."""
        arguments = [*parameters, *self.trace.data]
        outs, payloads = self.emitter.run(self.lineage.scope, self.trace.body, arguments)
        return outs[0], (outs, payloads)

    def features(self, payloads: Payloads) -> dict[str, Features]:
        return {c.neuron.name: _features(c, payloads) for c in self.claims}


def _features(c: Claim, payloads: Payloads) -> Features:
    """The features of one neuron, from what its sites handed out."""
    keyed = [((c.neuron.name, number), site) for number, site in enumerate(c.sites)]
    return Features(
        arrays=tuple(_arrays(key, payloads) for key, _ in keyed),
        positions=tuple(_positions(site, payloads.get((key, "count"))) for key, site in keyed),
        sites=c.neuron.forms,
    )


def _arrays(site: Key, payloads: Payloads) -> Any:
    """The rows of a site, or all residuals of its program."""
    own = {slot: x for (key, slot), x in payloads.items() if key == site}
    return own.get("rows", own)


def _positions(site: Site, count: jax.Array | None) -> jax.Array:
    """How many positions a site has: static, unless branches decide whether it is visited."""
    if count is None:
        return jnp.float32(site.count())
    scanned = [chain.scanned for chain in site.view.chains[1:]][: count.ndim]
    return jnp.max(jnp.sum(count, axis=tuple(i for i, s in enumerate(scanned) if not s)))


def _match(neurons: Neurons, claims: Sequence[Claim], trace: Trace) -> list[Claim]:
    """What was found for each neuron in this trace of the loss."""
    found = {c.neuron.name: c for c in claims}
    check_shapes(neurons, dict(zip(trace.names, trace.shapes, strict=True)))
    layouts = lambda neuron: (neuron.layout, neuron.bias_layout)
    solved = [neuron for neuron in neurons if neuron.kind != "identity"]
    for neuron in solved:
        c = found.get(neuron.name)
        if c is None or layouts(c.neuron) != layouts(neuron):
            raise ValueError(
                f"the neuron {neuron.name!r} is not used in this loss as it was in the one that "
                "find_neurons saw. Call find_neurons(loss_fn, params, batch) on this loss, with "
                "arguments of the same kinds: Python's numbers are constants, arrays are data."
            )
    return [found[neuron.name] for neuron in solved]
