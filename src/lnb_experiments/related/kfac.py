r"""K-FAC: "Optimizing Neural Networks with Kronecker-factored Approximate Curvature".

Martens and Grosse, ICML 2015, arXiv 1503.05671; convolutions as in Grosse and Martens, ICML 2016.
The Fisher matrix of a layer is taken to be :math:`A \otimes G`, with the second moments A of what
the layer is fed, with a one for the bias, and G of the derivatives at its outputs. This is a small
one of our own: kfac-jax 0.0.8, its authors', fails at the first step on jax 0.10.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import lnb
from lnb._average import Average
from lnb._metric import Theta, matmul
from lnb._parameters import split

from ..method import Method, MethodError, Problem
from .fisher import examples, sampled_loss
from .neurons import damped, descend, direct
from .regressions import Regression, regressions


class Factors(NamedTuple):
    """A and G of one layer, [blocks, size, size] each; a bias is the last of the inputs."""

    inputs: Array
    outputs: Array


class KFACState(NamedTuple):
    """State of `kfac`.

    Attributes:
      count: steps taken.
      momentum: of the direction, shaped like the parameters.
      factors: the running averages of A and G, by neuron.
      inverses: their damped inverses as they were when they were last due, by neuron.
    """

    count: Array
    momentum: Any
    factors: dict[str, Average]
    inverses: dict[str, Factors]


def kfac(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    damping: float = 0.003,
    momentum: float = 0.9,
    decay: float = 0.95,
    every: int = 10,
    kl_clip: float = 0.001,
) -> Method:
    """Gradient descent with momentum, preconditioned by A^-1 and G^-1.

    G is of targets that the model draws, one for each example. Parameters that are no dense layer
    or convolution, and lookups, descend their gradient.

    Args:
      problem: the loss, a mean over examples.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: of the Fisher matrix, shared between A and G (the paper's factored Tikhonov).
      momentum: how much of the last step's direction is kept.
      decay: decay of the running averages.
      every: steps from one inversion to the next.
      kl_clip: the step is no longer than what changes the outputs by this, as A and G predict.

    Returns:
      The method.
    """
    loss = sampled_loss(problem, params, batch, key)
    neurons = _neurons(loss, params, batch, key)
    backprop = regressions(loss, neurons)
    count = examples(jax.eval_shape(problem.outputs, params, batch, key))

    def init(params: Any) -> KFACState:
        thetas, _ = split(neurons, params)
        blank = {name: _blank(theta) for name, theta in thetas.items()}
        averages = {name: Average.empty(factors) for name, factors in blank.items()}
        zeros = jax.tree.map(jnp.zeros_like, params)
        state = KFACState(jnp.zeros((), jnp.int32), zeros, averages, blank)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def step(learning_rate, params, state, batch, key):
        value, gradients = jax.value_and_grad(problem.loss)(params, batch, key)
        draw = jax.random.fold_in(jax.random.key(0) if key is None else key, state.count)
        _, _, found = backprop(params, batch, key, draw)
        thetas, _ = split(neurons, gradients)
        averages = {
            name: average.absorb(measure(found[name], thetas[name].bias is not None, count), decay)
            for name, average in state.factors.items()
        }
        inverses = lax.cond(
            state.count % every == 0,
            lambda: {name: invert(average.value, damping) for name, average in averages.items()},
            lambda: state.inverses,
        )
        directions = {name: solve(inverses[name], theta) for name, theta in thetas.items()}
        scale = clip(thetas, directions, learning_rate, kl_clip)
        directions = jax.tree.map(lambda x: scale.astype(x.dtype) * x, directions)
        directions = direct(neurons, gradients, directions)
        trace = jax.tree.map(lambda m, d: momentum * m + d, state.momentum, directions)
        state = KFACState(state.count + 1, trace, averages, inverses)
        return descend(params, trace, learning_rate), state, value

    return Method(init, step)


def measure(regression: Regression, bias: bool, count: int) -> Factors:
    r"""A and G of one batch.

    Errors are n times the derivatives of the mean loss, at n positions in all. Derivatives of the
    loss of one example are `count` times those, and the examples' own Fisher matrix is a sum over
    their n / count positions (Grosse and Martens 2016, section 3). So
    :math:`F = \frac{\textrm{count}}{n} E[x x^T] \otimes E[\lambda \lambda^T]`.
    """
    x, errors = regression
    if bias:
        x = jnp.concatenate([x, jnp.ones_like(x[:, :, :1])], axis=2)
    n = x.shape[1]
    second = lambda rows: matmul(rows.mT, rows) / n
    return Factors(second(x), second(errors) * count / n)


def invert(factors: Factors, damping: float) -> Factors:
    r""":math:`(A + \pi \sqrt\gamma I)^{-1}` and :math:`(G + \sqrt\gamma / \pi\, I)^{-1}`.

    With :math:`\pi^2` the mean of A's diagonal over that of G's (the paper, section 6.3).
    """
    a, g = (jnp.trace(x, axis1=1, axis2=2) / x.shape[1] for x in factors)
    tiny = jnp.finfo(a.dtype).tiny ** 0.5
    pi = jnp.sqrt(jnp.maximum(a, tiny) / jnp.maximum(g, tiny))[:, None, None]
    inverse = lambda matrix, shift: jnp.linalg.inv(damped(matrix, shift))
    root = damping**0.5
    return Factors(inverse(factors.inputs, root * pi), inverse(factors.outputs, root / pi))


def solve(inverses: Factors, gradient: Theta) -> Theta:
    """A^-1 V G^-1, with the bias as the last row of V."""
    weight, bias = gradient
    rows = weight if bias is None else jnp.concatenate([weight, bias[:, None, :]], axis=1)
    rows = matmul(inverses.inputs, rows)
    rows = matmul(rows, inverses.outputs)
    return Theta(rows, None) if bias is None else Theta(rows[:, :-1], rows[:, -1])


def clip(gradients: Any, directions: Any, learning_rate: Any, kl_clip: float) -> Array:
    """min(1, sqrt(kl_clip / (rate^2 v . F v))), where v = F^-1 g makes v . F v = v . g."""
    size = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, gradients, directions)), jnp.zeros(()))
    size = jnp.asarray(learning_rate, size.dtype) ** 2 * size
    return jnp.minimum(1.0, jnp.sqrt(kl_clip / jnp.maximum(size, jnp.finfo(size.dtype).tiny)))


def _blank(theta: Theta) -> Factors:
    blocks, inputs, outputs = theta.weight.shape
    zeros = lambda size: jnp.zeros((blocks, size, size), theta.weight.dtype)
    return Factors(zeros(inputs + (theta.bias is not None)), zeros(outputs))


def _neurons(loss: Any, params: Any, batch: Any, key: Any) -> lnb.Neurons:
    """The layers whose inputs and errors stand as rows."""
    draw = jax.random.key(0)
    neurons = lnb.find_neurons(loss, params, batch, key, draw, rows="all")
    served = lambda neuron: neuron.kind in ("dense", "conv") and neuron.has_matrix
    others = {
        neuron.weight for neuron in neurons if neuron.kind != "identity" and not served(neuron)
    }
    if others:
        neurons = lnb.find_neurons(
            loss, params, batch, key, draw, rows="all", exclude=others.__contains__
        )
    try:
        jax.eval_shape(regressions(loss, neurons), params, batch, key, draw)
    except ValueError as error:
        raise MethodError(f"K-FAC: {error}") from error
    return neurons
