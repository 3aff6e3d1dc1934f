r"""LocoProp-S: "LocoProp: Enhancing BackProp via Local Loss Optimization".

Amid, Anil and Warmuth, AISTATS 2022. Each neuron descends its own squared loss,
:math:`\frac12 E \Vert f(x; \theta) - (f(x; \theta_0) - \gamma \lambda) \Vert^2`, a few steps from
where it stands. The targets need not be made: with :math:`M = E[J^T J]` and :math:`g = E[J^T
\lambda]`, the local gradient is :math:`M (\theta - \theta_0) + \gamma g`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

import lnb
from lnb._metric import Theta, product
from lnb._parameters import split

from ..method import Method, Problem
from .neurons import descend, direct


def locoprop(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    local_steps: int = 10,
    local_rate: float = 1.0,
    power_steps: int = 10,
) -> Method:
    """Local gradient descent of every neuron; the learning rate is the paper's gamma.

    Args:
      problem: the loss.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      local_steps: gradient steps that a neuron takes on its local loss.
      local_rate: their size, in units of the largest that is safe: one over M's largest eigenvalue.
      power_steps: power iterations to find that eigenvalue.

    Returns:
      The method. It keeps no state.
    """
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    backprop = lnb.backprop(problem.loss, neurons)

    def local_descent(neuron: lnb.Neuron, features: Any, gradient: Theta) -> Theta:
        """How far a neuron has come from theta_0, for gamma = 1; all is linear in gamma."""
        metric = lambda theta: product(features, theta, neuron.layout, neuron.bias_layout)
        largest = _largest_eigenvalue(metric, gradient, power_steps)
        rate = local_rate * jnp.where(largest > 0, 1 / largest, 0)

        def local_step(_, change: Theta) -> Theta:
            pull = jax.tree.map(jnp.add, metric(change), gradient)
            return jax.tree.map(lambda c, p: c - rate * p, change, pull)

        return lax.fori_loop(0, local_steps, local_step, optax.tree.zeros_like(gradient))

    def step(learning_rate, params, state, batch, key):
        loss, gradients, features = backprop(params, batch, key)
        thetas, _ = split(neurons, gradients)
        changes = {
            name: optax.tree.scale(-1, local_descent(neurons[name], features[name], gradient))
            for name, gradient in thetas.items()
        }
        return descend(params, direct(neurons, gradients, changes), learning_rate), state, loss

    return Method(lambda params: (), step)


def _largest_eigenvalue(metric: Callable[[Theta], Theta], like: Theta, steps: int) -> Array:
    """Of M, by power iterations from a fixed random start."""

    def unit(theta: Theta) -> Theta:
        norm = optax.tree.norm(theta)
        return optax.tree.scale(jnp.where(norm > 0, 1 / norm, 0), theta)

    keys = iter(jax.random.split(jax.random.key(0)))
    start = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, x.dtype), like)
    last = lax.fori_loop(0, steps, lambda _, theta: unit(metric(theta)), start)
    return optax.tree.norm(metric(last))
