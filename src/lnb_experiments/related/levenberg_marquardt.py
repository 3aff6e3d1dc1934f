r"""Levenberg-Marquardt: Gauss-Newton steps whose damping follows how well they were predicted.

The matrix is the generalised Gauss-Newton matrix :math:`G = J^T H J` (Schraudolph 2002), with the
Jacobian J of the network's outputs and the Hessian H of the objective with respect to them: for a
sum of squares, :math:`2 J^T J`. Damping goes by the gain ratio (Marquardt 1963; Nielsen 1999).

Conjugate gradients need a preconditioner here, and LNB's metric is one: were the neurons
independent, and the loss as curved in all directions of a neuron's outputs, G would be c M, with a
number c for each neuron.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

import lnb
from lnb._inverse import Inverse, inverse
from lnb._metric import moments
from lnb._parameters import join, split

from ..method import Method, MethodError, Problem
from .neurons import centred, damped

DENSE_LIMIT = 20_000  # parameters; their matrix would take 1.6 GB in float32


class LevenbergMarquardtState(NamedTuple):
    """State of `levenberg_marquardt`.

    Attributes:
      damping: in units of the mean of G's diagonal.
      growth: what damping is multiplied by if the next step is rejected.
      rejected: steps rejected so far.
    """

    damping: Array
    growth: Array
    rejected: Array


def levenberg_marquardt(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    damping: float = 1.0,
    solver: str = "auto",
    cg_steps: int = 100,
    tolerance: float = 1e-4,
) -> Method:
    """Damped Gauss-Newton steps; one that does not lower the loss of its batch is not taken.

    Args:
      problem: the loss; its objective should be convex in the outputs.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: at the start, in units of the mean of G's diagonal.
      solver: "dense" writes G down, "cg" needs products with it only; "auto" is dense for up to
        500 parameters.
      cg_steps: at most so many products a step.
      tolerance: of the residual that conjugate gradients leave, relative to the gradient.

    Returns:
      The method. A learning rate of 1 makes it the classical one.
    """
    dense = _is_dense(solver, sum(leaf.size for leaf in jax.tree.leaves(params)))
    neurons = lnb.find_neurons(problem.loss, params, batch, key, rows="all")
    features = lnb.forward_features(problem.loss, neurons)

    def init(params: Any) -> LevenbergMarquardtState:
        dtype = jnp.result_type(*jax.tree.leaves(params))
        return LevenbergMarquardtState(
            jnp.asarray(damping, dtype), jnp.asarray(2, dtype), jnp.zeros((), jnp.int32)
        )

    def step(learning_rate, params, state, batch, key):
        flat, unravel = ravel_pytree(params)
        loss, gradient, product = gauss_newton(problem, unravel, flat, batch, key)
        signs = jax.random.rademacher(jax.random.key(0), flat.shape, flat.dtype)
        image = product(signs)
        shift = state.damping * _mean_diagonal(signs, image)
        system = lambda vector: product(vector) + shift * vector
        if dense:
            matrix = jax.vmap(system)(jnp.eye(flat.size, dtype=flat.dtype))
            change = -jax.scipy.linalg.solve(matrix, gradient, assume_a="pos")
        else:
            fed = features(params, batch, key)
            precondition = _preconditioner(neurons, fed, unravel(signs), unravel(image), shift)
            whiten = lambda vector: ravel_pytree(precondition(unravel(vector)))[0]
            change = -cg(system, gradient, tol=tolerance, maxiter=cg_steps, M=whiten)[0]
        change = jnp.asarray(learning_rate, change.dtype) * change
        trial = problem.loss(unravel(flat + change), batch, key)
        predicted = -jnp.vdot(gradient + product(change) / 2, change)
        gain = (loss - trial) / jnp.where(predicted > 0, predicted, jnp.inf)
        accepted = (gain > 0) & jnp.isfinite(trial)
        params = optax.tree.where(accepted, unravel(flat + change), params)
        return params, _adapt(state, gain, accepted), loss

    return Method(init, step)


def gauss_newton(
    problem: Problem, unravel: Callable[[Array], Any], flat: Array, batch: Any, key: Any
) -> tuple[Array, Array, Callable[[Array], Array]]:
    """The loss at a flat vector of parameters, its gradient, and products with G."""
    objective = lambda outputs: problem.objective(outputs, batch)
    outputs, forward = jax.linearize(lambda v: problem.outputs(unravel(v), batch, key), flat)
    backward = jax.linear_transpose(forward, flat)
    slope, curve = jax.linearize(jax.grad(objective), outputs)
    return objective(outputs), backward(slope)[0], lambda v: backward(curve(forward(v)))[0]


def _preconditioner(
    neurons: lnb.Neurons, features: dict[str, Any], signs: Any, image: Any, shift: Array
) -> Callable[[Any], Any]:
    r""":math:`(c M + \gamma I)^{-1}` of each neuron, as a function of trees of parameters.

    The number c makes the mean of the diagonal that of G, as estimated from `image`, G times
    `signs`. Where there is no M, that mean takes its place.
    """
    (thetas, rest), (images, others) = split(neurons, signs), split(neurons, image)
    inverses: dict[str, tuple[Array, Inverse]] = {}
    for neuron in neurons:
        if neuron.kind == "identity":
            continue
        weight, bias = thetas[neuron.name]
        curvature = _mean_diagonal(weight, images[neuron.name].weight)
        if not neuron.has_matrix:
            ones = jnp.ones(weight.shape[:2], weight.dtype)
            inverses[neuron.name] = curvature + shift, Inverse(None, ones)
            continue
        fed = moments(features[neuron.name])
        c = curvature / jnp.mean(fed.square)
        c = jnp.where((c > 0) & jnp.isfinite(c), c, 1)
        mean, matrix = centred(fed, bias is not None)
        matrix = damped(matrix, shift / c)
        matrix = 1 / matrix if matrix.ndim == 2 else inverse(matrix)
        inverses[neuron.name] = c, Inverse(mean, matrix)
    scales = {name: _mean_diagonal(rest[name], others[name]) + shift for name in rest}

    def multiply(tree: Any) -> Any:
        thetas, rest = split(neurons, tree)
        solved = {
            name: jax.tree.map(lambda x, c=c: x / c, own.solve(thetas[name]))
            for name, (c, own) in inverses.items()
        }
        return join(neurons, tree, solved, {name: x / scales[name] for name, x in rest.items()})

    return multiply


def _mean_diagonal(signs: Array, image: Array) -> Array:
    """An estimate: v . G v / d for random signs v. Not negative, as G is not."""
    return jnp.maximum(jnp.vdot(signs, image) / signs.size, 0)


def _adapt(state: LevenbergMarquardtState, gain: Array, accepted: Array) -> LevenbergMarquardtState:
    """Nielsen's rule: less damping after a step that went as predicted, more after failures."""
    eased = state.damping * jnp.maximum(1 / 3, 1 - (2 * gain - 1) ** 3)
    limits = jnp.finfo(gain.dtype)
    return LevenbergMarquardtState(
        jnp.clip(jnp.where(accepted, eased, state.damping * state.growth), limits.eps, 1e6),
        jnp.where(accepted, 2, jnp.minimum(2 * state.growth, 1e3)).astype(state.growth.dtype),
        jnp.where(accepted, state.rejected, state.rejected + 1),
    )


def _is_dense(solver: str, size: int) -> bool:
    if solver not in ("auto", "dense", "cg"):
        raise MethodError(f'solver={solver!r} is not one of "auto", "dense", "cg".')
    if solver == "dense" and size > DENSE_LIMIT:
        raise MethodError(
            f"a dense Gauss-Newton matrix of {size:,} parameters would have {size**2:,} elements; "
            f'{DENSE_LIMIT:,} parameters are the limit. solver="cg" needs products with it only; '
            "lnb.lnb, foof, prong and locoprop scale with the width of a layer instead."
        )
    return solver == "dense" or (solver == "auto" and size <= 500)
