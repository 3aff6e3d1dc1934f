r"""ProxProp: "Proximal Backpropagation".

Frerix, Möllenhoff, Moeller and Cremers, ICLR 2018, arXiv 1706.04638. Each layer takes an implicit
step towards outputs that are one gradient step away,

.. math:: \min_\delta \tfrac12 \Vert J \delta + \lambda \Vert^2
          + \tfrac1{2 \tau} \Vert \delta \Vert^2,

a sum over the batch. The solution is :math:`\delta = -\tau (I + \tau J^T J)^{-1} g`, the direction
of LNB with a damping of :math:`1 / (\tau n)`: its limits are the gradient and boosting.
"""

from typing import Any

import jax
import jax.numpy as jnp

import lnb
from lnb._metric import Moments, Theta, moments
from lnb._parameters import split

from ..method import Method, Problem
from .neurons import damped, descend, direct, multiply


def proxprop(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    tau: float = 0.05,
    momentum: float = 0.95,
) -> Method:
    """Gradient descent with Nesterov's momentum, on (I + tau J^T J)^-1 g in the gradient's place.

    Args:
      problem: the loss.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      tau: the step of a layer's own parameters, the paper's tau_theta. The authors' code has it as
        a factor of the direction too: their learning rate of 1 is tau here.
      momentum: how much of the last step's direction is kept.

    Returns:
      The method. Its state is the momentum.
    """
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    backprop: Any = lnb.backprop(problem.loss, neurons)
    solved = {n.name: n for n in neurons if n.kind != "identity" and n.has_matrix}

    def step(learning_rate, params, state, batch, key):
        loss, gradients, features = backprop(params, batch, key)
        thetas, _ = split(neurons, gradients)
        directions = {
            name: implicit(moments(features[name]), thetas[name], tau * neuron.n)
            for name, neuron in solved.items()
        }
        directions = direct(neurons, gradients, directions)
        trace = jax.tree.map(lambda m, d: momentum * m + d, state, directions)
        ahead = jax.tree.map(lambda m, d: momentum * m + d, trace, directions)
        return descend(params, ahead, learning_rate), trace, loss

    return Method(lambda params: jax.tree.map(jnp.zeros_like, params), step)


def implicit(fed: Moments, gradient: Theta, tau: float) -> Theta:
    """(I + tau M)^-1 g, for the M of features with a one for the bias."""
    first, second = fed
    weight, bias = gradient
    if second.ndim == 2:  # a lookup: M is diagonal
        matrix = 1 / damped(tau * second, 1.0)
        return Theta(multiply(matrix, weight), bias)
    if bias is None:
        return Theta(jnp.linalg.solve(damped(tau * second, 1.0), weight), None)
    assert first is not None
    top = jnp.concatenate([second, first[:, :, None]], axis=2)
    last = jnp.concatenate([first, jnp.ones_like(first[:, :1])], axis=1)[:, None, :]
    matrix = damped(tau * jnp.concatenate([top, last], axis=1), 1.0)
    rows = jnp.linalg.solve(matrix, jnp.concatenate([weight, bias[:, None, :]], axis=1))
    return Theta(rows[:, :-1], rows[:, -1])
