"""FOOF: "Gradient Descent on Neurons and its Link to Approximate Second-Order Optimization".

Benzing, ICML 2022. The gradient of a weight is multiplied by the inverse of a running average of
E[x x^T], which is inverted now and then. Biases are not part of it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import lnb
from lnb._average import Average
from lnb._metric import moments
from lnb._parameters import split

from ..method import Method, Problem
from .neurons import damped, descend, direct, multiply


class FOOFState(NamedTuple):
    """State of `foof`.

    Attributes:
      count: steps taken.
      momentum: of the gradient, shaped like the parameters.
      second: the running average of E[x x^T], by neuron.
      inverse: its damped inverse as it was when it was last due, by neuron.
    """

    count: Array
    momentum: Any
    second: dict[str, Average]
    inverse: dict[str, Array]


def foof(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    damping: float = 0.1,
    momentum: float = 0.9,
    decay: float = 0.95,
    every: int = 10,
) -> Method:
    """Gradient descent with momentum, preconditioned by the inverse of E[x x^T].

    Args:
      problem: the loss.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: added to the diagonal of E[x x^T].
      momentum: how much of the last step's gradient is kept.
      decay: decay of the running average.
      every: steps from one inversion to the next.

    Returns:
      The method.
    """
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    backprop: Callable[..., Any] = lnb.backprop(problem.loss, neurons)
    solved = [neuron for neuron in neurons if neuron.kind != "identity" and neuron.has_matrix]

    def init(params: Any) -> FOOFState:
        thetas, _ = split(neurons, params)
        blank = {}
        for neuron in solved:
            weight = thetas[neuron.name].weight
            inputs = weight.shape[1:2] * (1 if neuron.kind == "lookup" else 2)
            blank[neuron.name] = jnp.zeros((weight.shape[0], *inputs), weight.dtype)
        second = {name: Average.empty(value) for name, value in blank.items()}
        momentum = jax.tree.map(jnp.zeros_like, params)
        state = FOOFState(jnp.zeros((), jnp.int32), momentum, second, blank)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def step(learning_rate, params, state, batch, key):
        loss, gradients, features = backprop(params, batch, key)
        trace = jax.tree.map(lambda m, g: momentum * m + g, state.momentum, gradients)
        second = {
            name: average.absorb(moments(features[name]).second, decay)
            for name, average in state.second.items()
        }
        inverse = lax.cond(
            state.count % every == 0,
            lambda: {name: _inverse(average.value, damping) for name, average in second.items()},
            lambda: state.inverse,
        )
        thetas, _ = split(neurons, trace)
        directions = {
            name: thetas[name]._replace(weight=multiply(matrix, thetas[name].weight))
            for name, matrix in inverse.items()
        }
        params = descend(params, direct(neurons, trace, directions), learning_rate)
        return params, FOOFState(state.count + 1, trace, second, inverse), loss

    return Method(init, step)


def _inverse(second: Array, damping: float) -> Array:
    matrix = damped(second, damping)
    return 1 / matrix if matrix.ndim == 2 else jnp.linalg.inv(matrix)
