r"""Natural gradient descent (Amari 1998), by the generalised Gauss-Newton matrix.

For a cross entropy, or a squared error, the matrix :math:`G = J^T H J` is the Fisher matrix (the
paper, section "(Quasi-) Second-order methods"). Conjugate gradients need products with it only, and
begin with the last step's solution (Martens, ICML 2010, "Hessian-free optimization").
"""

from typing import Any

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg

from ..method import Method, Problem
from .levenberg_marquardt import gauss_newton


def natural_gradient(
    problem: Problem,
    params: Any,
    batch: Any,
    key: Any,
    *,
    damping: float = 0.01,
    cg_steps: int = 20,
    memory: float = 0.95,
    tolerance: float = 1e-4,
) -> Method:
    """Steps along (G + damping)^-1 g.

    Args:
      problem: the loss; its objective should be convex in the outputs.
      params: parameters, arrays or their shapes.
      batch: a batch, likewise.
      key: a random key, likewise, or None.
      damping: added to G's diagonal.
      cg_steps: at most so many products a step.
      memory: conjugate gradients begin with so much of the last solution.
      tolerance: of the residual that they leave, relative to the gradient.

    Returns:
      The method. Its state is the last solution, as a vector.
    """
    del params, batch, key

    def step(learning_rate, params, state, batch, key):
        flat, unravel = ravel_pytree(params)
        loss, gradient, product = gauss_newton(problem, unravel, flat, batch, key)
        system = lambda vector: product(vector) + damping * vector
        start = memory * state
        direction = cg(system, gradient, x0=start, tol=tolerance, maxiter=cg_steps)[0]
        change = jnp.asarray(learning_rate, flat.dtype) * direction
        return unravel(flat - change), direction, loss

    return Method(lambda params: jnp.zeros_like(ravel_pytree(params)[0]), step)
