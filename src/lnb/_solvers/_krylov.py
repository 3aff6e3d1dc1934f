"""Any linear solver that asks for products only, as in the paper's Algorithm 1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.scipy.sparse.linalg
import optax
from jax import Array

from .._metric import diagonal_moments
from .._numerics import ratio
from ._protocol import Solver
from ._system import System


class KrylovMemory(NamedTuple):
    """What `Krylov` remembers of a neuron: nothing that the next solve would use."""

    residual: Array


@dataclass(frozen=True)
class Krylov(Solver):
    """A solver given as a function, applied to this step's metric alone.

    Args:
      solve: called as `solve(product, gradient, M=preconditioner)`, returns `(direction, info)`:
        `jax.scipy.sparse.linalg.cg`, its neighbours, or `functools.partial` of one with other
        tolerances. The preconditioner is P from this step's moments.
    """

    solve: Callable[..., tuple[Any, Any]] = jax.scipy.sparse.linalg.cg

    def init(self, neuron, theta):
        return (), KrylovMemory(jnp.zeros((), theta.weight.dtype))

    def direction(self, neuron, features, gradient, known, memory, damping):
        """Algorithm 1, lines 5 and 6."""
        batch: Any = diagonal_moments(features, neuron.layout)
        batch = optax.tree.cast(batch, gradient.weight.dtype)
        system = System.of(neuron, features, batch, damping, in_p=damping)
        direction, _ = self.solve(system.product, gradient, M=system.precondition)
        # Solvers divide by h.Mh, which is zero for a dead neuron: that one does not move.
        finite = jnp.isfinite(optax.tree.norm(direction))
        direction = optax.tree.where(finite, direction, optax.tree.zeros_like(direction))
        residual = optax.tree.sub(system.product(direction), gradient)
        error = ratio(optax.tree.norm(residual), optax.tree.norm(gradient))
        return direction, KrylovMemory(error)
