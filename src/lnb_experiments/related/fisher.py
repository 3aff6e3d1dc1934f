r"""Gradients of targets that the model draws itself, whose second moment is the Fisher matrix.

Targets need not be drawn. Per example, the Fisher matrix of the outputs is the Hessian H of the
objective (Kunstner et al. 2019; the paper, section "(Quasi-) Second-order methods"), and all that
matters of a drawn target is the gradient that it has: one with :math:`E[g g^T] = H`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..method import Problem


def sampled_loss(
    problem: Problem, params: Any, batch: Any, key: Any
) -> Callable[[Any, Any, Any, Array], Array]:
    """A function like the loss whose gradient is that of targets drawn from the model.

    Of a cross entropy of classes, a class is drawn, softmax(outputs) its probabilities. Of others
    (squares, cross entropies of independent pixels) each output has a random sign times its
    standard deviation. The objective should be a mean over examples.

    Args:
      problem: the loss.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.

    Returns:
      A function of parameters, a batch, the loss's key and a key to draw with.
    """
    outputs = jax.eval_shape(problem.outputs, params, batch, key)
    classes = _is_softmax(problem, outputs, batch)

    def loss(params: Any, batch: Any, key: Any, draw: Array) -> Array:
        outputs = problem.outputs(params, batch, key)
        at = lax.stop_gradient(outputs)
        _, curve = jax.linearize(jax.grad(lambda y: problem.objective(y, batch)), at)
        error = _class_error(draw, at, curve) if classes else _independent_error(draw, at, curve)
        return jnp.vdot(lax.stop_gradient(error), outputs)

    return loss


def examples(outputs: Any) -> int:
    """How many the objective is a mean of: all axes of the outputs but the last count them."""
    return outputs.size // outputs.shape[-1]


def _class_error(draw: Array, outputs: Array, curve: Callable[[Array], Array]) -> Array:
    """p - e_y for a drawn class y, which is -H e_y / p_y."""
    drawn = jax.random.categorical(draw, outputs)
    one = jax.nn.one_hot(drawn, outputs.shape[-1], dtype=outputs.dtype)
    p = jnp.sum(one * jax.nn.softmax(outputs), axis=-1, keepdims=True)
    return -curve(one) / jnp.maximum(p, jnp.finfo(p.dtype).tiny)


def _independent_error(draw: Array, outputs: Array, curve: Callable[[Array], Array]) -> Array:
    signs = jax.random.rademacher(draw, (outputs.size,), outputs.dtype).reshape(outputs.shape)
    variance = jnp.maximum(curve(signs) * signs, 0)  # of a diagonal H, the diagonal
    return signs * jnp.sqrt(variance / examples(outputs))


def _is_softmax(problem: Problem, outputs: Any, batch: Any) -> bool:
    """Whether outputs that all grow by the same amount say the same, as logits of classes do."""
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    gradient = jax.grad(lambda y: problem.objective(y, zeros(batch)))
    ones = jnp.ones(outputs.shape, outputs.dtype)
    first = ones.at[..., 1:].set(0)
    curved = lambda along: jnp.max(jnp.abs(jax.jvp(gradient, (zeros(outputs),), (along,))[1]))
    return bool(curved(ones) < 1e-3 * curved(first))
