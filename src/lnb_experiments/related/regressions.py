"""Boosted backpropagation as it was first written: each neuron's features and errors, as rows.

The library's own steps need no errors (paper, section "Reduction"); comparisons with methods that
regress on them do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lnb import Neuron, Neurons
from lnb._backprop import EmittingLoss
from lnb._features import Layout, accumulator, dims
from lnb._jaxpr import Claim, Emitter, Key, Site


class Regression(NamedTuple):
    r"""What a neuron's weak learner is fitted to, one row a position.

    Attributes:
      features: [blocks, positions, inputs].
      errors: n times the gradient of the loss with respect to the neuron's outputs, the paper's
        :math:`\lambda`, [blocks, positions, outputs].
    """

    features: Array
    errors: Array


class TappedEmitter(Emitter):
    """Adds an array, a tap, to the output of every site.

    The gradient with respect to a tap is the error at that output.

    Attributes:
      taps: by the sites' keys.
    """

    taps: dict[Key, Array]

    def __init__(self, claims: Sequence[Claim], origins: Mapping[str, Any]):
        super().__init__(claims, origins)
        self.keys = {(site.scope, site.output): key for key, site in self.sites.items()}

    def changed(self, scope: Any, var: Any, value: Any) -> Any:
        key = self.keys.get((scope, var))
        return value if key is None else value + self.taps[key]

    def zeros(self) -> dict[Key, Array]:
        """Taps that change nothing."""
        outputs = {key: var.aval for (_, var), key in self.keys.items()}
        return {key: jnp.zeros(aval.shape, aval.dtype) for key, aval in outputs.items()}


def regressions(
    loss_fn: Callable[..., Any], neurons: Neurons
) -> Callable[..., tuple[Array, Any, dict[str, Regression]]]:
    """Like `lnb.backprop`, with the errors at each neuron's outputs beside its features.

    Args:
      loss_fn: the loss that `neurons` were found in.
      neurons: the `Neurons`, found with `rows="all"`. Each must be applied outside of loops and
        branches, to features that stand as rows: dense, convolution or scale.

    Returns:
      A function of the loss's arguments that returns `(value, grads, regressions)`.
    """
    if neurons.rows != "all":
        raise ValueError(
            "regressions need the features of all positions. Call "
            'find_neurons(loss_fn, params, batch, rows="all").'
        )

    def run(params: Any, *args: Any, **kwargs: Any) -> tuple[Array, Any, dict[str, Regression]]:
        program = EmittingLoss(loss_fn, neurons, params, args, kwargs, TappedEmitter)
        for neuron, sites in program.claims:
            _check(neuron, sites)
        emitter = program.emitter
        assert isinstance(emitter, TappedEmitter)

        def tapped(parameters: Sequence[Any], taps: dict[Key, Array]) -> Any:
            emitter.taps = taps
            return program(parameters)

        value_and_grad = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (value, (_, payloads)), (grads, errors) = value_and_grad(
            program.trace.parameters, emitter.zeros()
        )
        features, found = program.features(payloads), {}
        for neuron, sites in program.claims:
            keyed = {(neuron.name, number): site for number, site in enumerate(sites)}
            if any((key, "count") in payloads for key in keyed):
                raise ValueError(_cannot(neuron, "is applied in a branch of lax.cond or switch"))
            x = [site.arrangement.rows(array) for site, array in features[neuron.name].rows]
            y = [_error_rows(site, neuron.layout, errors[key]) for key, site in keyed.items()]
            found[neuron.name] = Regression(
                jnp.concatenate(x, axis=1), neuron.n * jnp.concatenate(y, axis=1)
            )
        return value, program.trace.gradient_tree(grads), found

    return run


def _error_rows(site: Site, layout: Layout, errors: Array) -> Array:
    """Errors at a site's outputs as [blocks, positions, outputs], in the order of its features."""
    axes = dims.flatten(site.output_axes or ())
    positions = [i for i, dim in enumerate(axes) if not dim.stride]
    units = [i for i, dim in enumerate(axes) if dim.stride]
    units.sort(key=lambda i: -axes[i].stride)
    errors = errors.reshape([dim.size for dim in axes]).transpose(*positions, *units)
    # The units now stand in the order of the weight's elements, blocks and outputs mixed.
    blocks, _, outputs = layout.dims
    mixed = sorted((*blocks, *outputs), key=lambda dim: -dim.stride)
    errors = errors.reshape(-1, *(dim.size for dim in mixed))
    place = {dim: 1 + i for i, dim in enumerate(mixed)}
    errors = errors.transpose(*(place[dim] for dim in blocks), 0, *(place[dim] for dim in outputs))
    rows = errors.reshape(dims.size(blocks), -1, dims.size(outputs))
    return rows.astype(accumulator(rows.dtype))


def _check(neuron: Neuron, sites: Sequence[Site]) -> None:
    if neuron.kind == "lookup" or not neuron.has_matrix:
        raise ValueError(_cannot(neuron, "has no features that stand as rows"))
    if any(site.scope.loops for site in sites):
        raise ValueError(_cannot(neuron, "is applied in a loop, or in a shard_map"))
    # Positions along which the weight is repeated come first in the outputs, not in the features.
    dense = (site.view.axes or () for site in sites if site.kind == "dense")
    if not all(dims.of_elements(dims.flatten(axes)) for axes in dense):
        raise ValueError(_cannot(neuron, "is repeated along an axis of its features"))


def _cannot(neuron: Neuron, why: str) -> str:
    return (
        f"the neuron {neuron.name!r} {why}, so there is no explicit regression on its errors. "
        "lnb.algorithm1 finds the same direction without one, or leave the neuron out: "
        f"find_neurons(loss_fn, params, batch, exclude={neuron.weight!r})."
    )
