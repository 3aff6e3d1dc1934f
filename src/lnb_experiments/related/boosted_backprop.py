"""Boosted backpropagation with linear weak learners, as it was first written.

Grubb and Bagnell, "Boosted Backpropagation Learning for Training Deep Modular Networks", ICML 2010.
At each neuron a weak learner is fitted to the backpropagated errors, by a regression on the
features that the neuron was fed, and is added to the neuron with a step of fixed length.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import lnb
from lnb._metric import Theta
from lnb._parameters import join, split

from ..method import Method, MethodError, Problem
from .neurons import damped, descend
from .regressions import Regression, regressions

_HIGHEST = lax.Precision.HIGHEST


def boosted_backprop(
    problem: Problem, params: Any, batch: Any, key: Any, *, ridge: float = 0.1
) -> Method:
    """Functional gradient descent: f <- f - learning_rate h / ||h||, for every neuron.

    Args:
      problem: the loss. Its neurons must be applied outside of loops and branches; lookups have no
        regression.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      ridge: the penalty on squared weights (not on biases), beside the mean squared error. Without
        it, the least squares solution of least norm, which takes longer.

    Returns:
      The method. It keeps no state.
    """
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    backprop = regressions(problem.loss, neurons)
    try:
        jax.eval_shape(backprop, params, batch, key)
    except ValueError as error:
        raise MethodError(f"boosted backpropagation: {error}") from error

    def step(learning_rate, params, state, batch, key):
        loss, gradients, found = backprop(params, batch, key)
        thetas, rest = split(neurons, gradients)
        learners = {
            name: _unit(found[name], fit(found[name], theta.bias is not None, ridge))
            for name, theta in thetas.items()
        }
        # Of a parameter that is merely added, the weak learner is a constant: its gradient.
        rest = {name: g * _reciprocal(jnp.linalg.norm(g)) for name, g in rest.items()}
        params = descend(params, join(neurons, gradients, learners, rest), learning_rate)
        return params, state, loss

    return Method(lambda params: (), step)


def fit(regression: Regression, bias: bool, ridge: float) -> Theta:
    """The linear function of the features that is nearest to the errors."""
    x, y = regression
    x_mean, y_mean = jnp.mean(x, axis=1, keepdims=True), jnp.mean(y, axis=1, keepdims=True)
    if not bias:
        return Theta(_least_squares(x, y, ridge), None)
    # A bias that is free of penalty makes up for the means, whatever the weight.
    weight = _least_squares(x - x_mean, y - y_mean, ridge)
    shift = y_mean - jnp.matmul(x_mean, weight, precision=_HIGHEST)
    return Theta(weight, shift[:, 0, :])


def _least_squares(x: Array, y: Array, ridge: float) -> Array:
    """Block by block, the weight of least mean squared error plus penalty."""
    if ridge == 0:
        return jax.vmap(lambda x, y: jnp.linalg.lstsq(x, y)[0])(x, y)
    n = x.shape[1]
    second = jnp.matmul(x.mT, x, precision=_HIGHEST) / n
    target = jnp.matmul(x.mT, y, precision=_HIGHEST) / n
    root = jnp.linalg.cholesky(damped(second, ridge))
    return jax.vmap(lambda root, y: jax.scipy.linalg.cho_solve((root, True), y))(root, target)


def _unit(regression: Regression, learner: Theta) -> Theta:
    """The weak learner, scaled to norm one as a function: E||h(x)||^2 = 1."""
    outputs = jnp.matmul(regression.features, learner.weight, precision=_HIGHEST)
    if learner.bias is not None:
        outputs = outputs + learner.bias[:, None, :]
    norm = jnp.linalg.norm(outputs) / outputs.shape[1] ** 0.5
    return jax.tree.map(lambda leaf: leaf * _reciprocal(norm), learner)


def _reciprocal(norm: Array) -> Array:
    """1 / norm, or 0 where the norm is 0."""
    return jnp.where(norm > 0, 1 / norm, 0)
