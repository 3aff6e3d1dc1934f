"""Boosted backpropagation as it was first written: each neuron's features and errors, as rows.

The library's own steps need no errors (paper, section "Reduction"); comparisons with methods that
regress on them do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ._backprop import Payloads, _Program
from ._interpret import Claim, output_rows
from ._metric import rows
from ._neurons import Neuron, Neurons


class Regression(NamedTuple):
    r"""What a neuron's weak learner is fitted to, one row a position.

    Attributes:
      features: [blocks, positions, inputs].
      errors: n times the gradient of the loss with respect to the neuron's outputs, the paper's
        :math:`\lambda`, [blocks, positions, outputs].
    """

    features: Array
    errors: Array


def regressions(
    loss_fn: Callable[..., Any], neurons: Neurons
) -> Callable[..., tuple[Array, Any, dict[str, Regression]]]:
    """Like `backprop`, with the errors at each neuron's outputs beside its features.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`, held matrix-free. Each must be applied outside of loops and branches,
        to features that stand as rows: dense, convolution or scale.

    Returns:
      A function of the loss's arguments that returns `(value, grads, regressions)`.
    """

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Array, Any, dict[str, Regression]]:
        program = _Program(loss_fn, neurons, params, args, kwargs, False)
        for neuron, claim in program.pairs:
            _check(neuron, claim)
        taps = {
            plan.index: jnp.zeros(plan.site.output.aval.shape, plan.site.output.aval.dtype)
            for plans in program.plans.values()
            for plan in plans
        }
        value_and_grad = jax.value_and_grad(program.value, argnums=(0, 1), has_aux=True)
        (value, (_, payloads)), (grads, errors) = value_and_grad(program.trace.parameters, taps)
        return value, program.trace.gradient_tree(grads), _regressions(program, payloads, errors)

    return run


def _regressions(
    program: _Program, payloads: Payloads, errors: dict[int, Array]
) -> dict[str, Regression]:
    features = program.features(payloads)
    found = {}
    for neuron, claim in program.pairs:
        plans = program.plans[neuron.name]
        if any("count" in payloads[plan.index] for plan in plans):
            raise ValueError(_cannot(neuron, "is applied in a branch of lax.cond or lax.switch"))
        x = rows(features[neuron.name])
        assert x is not None
        shares = [output_rows(plan.site, claim, errors[plan.index]) for plan in plans]
        found[neuron.name] = Regression(x, claim.n * jnp.concatenate(shares, axis=1))
    return found


def _check(neuron: Neuron, claim: Claim) -> None:
    if neuron.kind == "lookup" or not neuron.has_gram or claim.fed_alike:
        raise ValueError(_cannot(neuron, "has no features that stand as rows"))
    if any(site.loops or site.scope.sharded for site in claim.sites):
        raise ValueError(_cannot(neuron, "is applied in a loop, or in a shard_map"))
    if neuron.metric != "matrix-free":
        raise ValueError(
            f"the features of the neuron {neuron.name!r} are held as a gram, which has no rows. "
            'Call find_neurons(loss_fn, params, batch, metric="matrix-free").'
        )


def _cannot(neuron: Neuron, why: str) -> str:
    return (
        f"the neuron {neuron.name!r} {why}, so there is no explicit regression on its errors. "
        "lnb.algorithm1 finds the same direction without one, or leave the neuron out: "
        f"find_neurons(loss_fn, params, batch, exclude={neuron.weight!r})."
    )
