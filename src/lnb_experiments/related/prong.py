r"""PRONG: "Natural Neural Networks".

Desjardins, Simonyan, Pascanu and Kavukcuoglu, NeurIPS 2015. What is trained are the parameters
:math:`\phi` of a network whose neurons are fed whitened features, by plain gradient descent. Now
and then the whitening follows the features, and :math:`\phi` with it, such that the network's
function stays the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import lnb
from lnb._metric import Theta
from lnb._parameters import join, split

from ..method import Method, Problem
from .neurons import descend
from .whitening import Whitening


class PRONGState(NamedTuple):
    """State of `prong`.

    Attributes:
      count: steps taken.
      phi: the parameters of the whitened neurons, by name.
      whitening: by name.
    """

    count: Array
    phi: dict[str, Theta]
    whitening: dict[str, Whitening]


def prong(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    damping: float = 0.1,
    every: int = 10,
) -> Method:
    """Gradient descent on the parameters of the whitened network.

    Args:
      problem: the loss.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: added to the diagonal of the features' covariance.
      every: steps from one whitening to the next.

    Returns:
      The method.
    """
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    features = lnb.forward_features(problem.loss, neurons)
    solved = {n.name: n for n in neurons if n.kind != "identity" and n.has_matrix}

    def merge(params: Any, phi: dict[str, Theta], whitening: dict[str, Whitening]) -> Any:
        """The parameters, those of whitened neurons from phi."""
        thetas, rest = split(neurons, params)
        whitened = {name: whitening[name].theta(phi[name]) for name in solved}
        return join(neurons, params, {**thetas, **whitened}, rest)

    def init(params: Any) -> PRONGState:
        thetas, _ = split(neurons, params)
        phi = {name: thetas[name] for name in solved}
        whitening = {
            name: Whitening.identity(phi[name], neuron.kind == "lookup")
            for name, neuron in solved.items()
        }
        state = PRONGState(jnp.zeros((), jnp.int32), phi, whitening)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def refresh(params: Any, phi: dict[str, Theta], batch: Any, key: Any):
        """Whitens the features as they are now, and leaves the function as it is."""
        found, (thetas, _) = features(params, batch, key), split(neurons, params)
        whitening = {
            name: Whitening.of(found[name], theta.bias is not None, damping)
            for name, theta in phi.items()
        }
        return {name: whitening[name].phi(thetas[name]) for name in phi}, whitening

    def step(learning_rate, params, state, batch, key):
        phi, whitening = lax.cond(
            state.count % every == 0,
            lambda: refresh(params, state.phi, batch, key),
            lambda: (state.phi, state.whitening),
        )
        loss, (gradients, gradient) = jax.value_and_grad(
            lambda params, phi: problem.loss(merge(params, phi, whitening), batch, key), (0, 1)
        )(params, phi)
        # The gradients of `params` are zero where phi took their place.
        params = descend(params, gradients, learning_rate)
        phi = descend(phi, gradient, learning_rate)
        return merge(params, phi, whitening), PRONGState(state.count + 1, phi, whitening), loss

    return Method(init, step)
