r"""Tensor normal training: the Fisher matrix as the covariance of a tensor normal distribution.

Ren and Goldfarb, NeurIPS 2021, arXiv 2106.02925. A matrix G of gradients, of targets that the model
draws, is taken to be normal with covariance :math:`U \otimes V`. Then :math:`E[G G^T] =
U \mathop{tr} V` and :math:`E[G^T G] = V \mathop{tr} U`, which tells both but for a factor between
them: such that their mean eigenvalues are equal. Only the shapes of parameters matter, as for
Shampoo; but the powers are -1, and the targets are not the data's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lnb._average import Average
from lnb._metric import matmul

from ..method import Method, Problem
from ..peers.matrices import Stacks, stack, unstack
from .fisher import examples, sampled_loss
from .kfac import clip
from .neurons import damped, descend


class TensorNormalState(NamedTuple):
    """State of `tensor_normal`.

    Attributes:
      count: steps taken.
      momentum: of the direction, shaped like the parameters.
      seconds: the running averages of E[G G^T] and E[G^T G], or of a vector's E[g g^T], for each
        stack of parameters of one shape.
      inverses: what the gradient is multiplied by, as it was when it was last due.
    """

    count: Array
    momentum: Any
    seconds: Average
    inverses: dict[str, list[Array]]


def tensor_normal(
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
    """Gradient descent with momentum, preconditioned by the inverses of both covariances.

    Args:
      problem: the loss, a mean over examples.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: of the Fisher matrix; each of its factors has the root of it.
      momentum: how much of the last step's direction is kept.
      decay: decay of the running averages.
      every: steps from one inversion to the next.
      kl_clip: as for K-FAC.

    Returns:
      The method.
    """
    loss = sampled_loss(problem, params, batch, key)
    count = examples(jax.eval_shape(problem.outputs, params, batch, key))

    def init(params: Any) -> TensorNormalState:
        seconds = jax.tree.map(jnp.zeros_like, measure(stack(params)))
        zeros = optax.tree.zeros_like(params)
        start = jnp.zeros((), jnp.int32)
        state = TensorNormalState(start, zeros, Average.empty(seconds), seconds)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def step(learning_rate, params, state, batch, key):
        value, gradients = jax.value_and_grad(problem.loss)(params, batch, key)
        draw = jax.random.fold_in(jax.random.key(0) if key is None else key, state.count)
        drawn = jax.grad(loss)(params, batch, key, draw)
        # The mean over examples has a covariance of F / count.
        drawn = jax.tree.map(lambda g: count**0.5 * g, stack(drawn))
        seconds = state.seconds.absorb(measure(drawn), decay)
        inverses = lax.cond(
            state.count % every == 0,
            lambda: {name: invert(own, damping) for name, own in seconds.value.items()},
            lambda: state.inverses,
        )
        stacks = stack(gradients)
        directions = {name: solve(inverses[name], g) for name, g in stacks.items()}
        scale = clip(stacks, directions, learning_rate, kl_clip)
        directions = unstack(directions, gradients)
        trace = jax.tree.map(
            lambda m, d: momentum * m + scale.astype(d.dtype) * d, state.momentum, directions
        )
        state = TensorNormalState(state.count + 1, trace, seconds, inverses)
        return descend(params, trace, learning_rate), state, value

    return Method(init, step)


def measure(drawn: Stacks) -> dict[str, list[Array]]:
    """G G^T and G^T G of matrices, g g^T of vectors."""

    def sides(g: Array) -> list[Array]:
        g = g[:, :, None] if g.ndim == 2 else g
        rows, columns = (matmul(x, x.mT) for x in (g, g.mT))
        return [rows, columns] if columns.shape[1] > 1 else [rows]

    return {name: sides(g) for name, g in drawn.items()}


def invert(seconds: list[Array], damping: float) -> list[Array]:
    """(U + sqrt(damping))^-1 and (V + sqrt(damping))^-1, or a vector's (U + damping)^-1."""
    if len(seconds) == 1:
        return [jnp.linalg.inv(damped(seconds[0], damping))]
    rows, columns = seconds
    total = jnp.maximum(jnp.trace(rows, axis1=1, axis2=2), jnp.finfo(rows.dtype).tiny ** 0.5)
    ratio, total = rows.shape[1] / columns.shape[1], total[:, None, None]
    covariances = rows * jnp.sqrt(ratio / total), columns * jnp.sqrt(1 / (ratio * total))
    return [jnp.linalg.inv(damped(x, damping**0.5)) for x in covariances]


def solve(inverses: list[Array], gradient: Array) -> Array:
    g = gradient[:, :, None] if gradient.ndim == 2 else gradient
    g = matmul(inverses[0], g)
    if len(inverses) == 2:
        g = matmul(g, inverses[1])
    return g.reshape(gradient.shape)
