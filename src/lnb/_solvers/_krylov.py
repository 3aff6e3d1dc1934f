"""Any linear solver that asks for products only, as in the paper's Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import optax
from jax import Array

from .._inverse import preconditioner
from .._metric import Damping, Theta, damped_product, damping_constant, diagonal_moments
from .._neurons import Neuron
from ._protocol import Solver


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

    def init(self, neuron: Neuron, theta: Theta) -> tuple[tuple, KrylovMemory]:
        return (), KrylovMemory(jnp.zeros((), theta.weight.dtype))

    def direction(
        self,
        neuron: Neuron,
        features: Any,
        gradient: Theta,
        known: tuple,
        memory: KrylovMemory,
        damping: Damping,
    ) -> tuple[Theta, KrylovMemory]:
        """Algorithm 1, lines 5 and 6."""
        batch = diagonal_moments(features, neuron.layout)
        batch = jax.tree.map(lambda x: x.astype(gradient.weight.dtype), batch)
        bias = gradient.bias is not None and neuron.has_matrix  # otherwise there is no mean
        gamma = damping_constant(damping, neuron.kind, batch, bias)
        product = damped_product(features, gamma, neuron.layout, neuron.bias_layout)
        precondition = preconditioner(neuron.kind, batch, bias, 0.0, damping).solve
        direction, _ = self.solve(product, gradient, M=precondition)
        # Solvers divide by h.Mh, which is zero for a dead neuron: that one does not move.
        finite = jnp.isfinite(optax.tree.norm(direction))
        direction = optax.tree.where(finite, direction, optax.tree.zeros_like(direction))
        error = optax.tree.norm(optax.tree.sub(product(direction), gradient))
        size = optax.tree.norm(gradient)
        return direction, KrylovMemory(error / jnp.where(size > 0, size, 1))
