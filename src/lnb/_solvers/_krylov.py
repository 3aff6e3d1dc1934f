"""Any linear solver that asks for products only, as in the paper's Algorithm 1."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.sparse.linalg
import optax
from jax import Array

from .._damping import Damping, damped_product
from .._metric import Theta, moments
from .._moments import preconditioner
from .._neurons import Neuron
from ._protocol import Solver


class KrylovState(NamedTuple):
    """What `Krylov` remembers about a neuron: nothing that the next solve would use."""

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

    def init(self, neuron: Neuron, theta: Theta) -> KrylovState:
        return KrylovState(jnp.zeros((), theta.weight.dtype))

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: KrylovState, damping: Damping
    ) -> tuple[Theta, KrylovState]:
        batch = jax.tree.map(lambda x: x.astype(gradient.weight.dtype), moments(features))
        bias = gradient.bias is not None and neuron.has_gram  # without a gram there is no mean
        product = partial(damped_product, features, damping.gamma(neuron.kind, batch, bias))
        precondition = preconditioner(neuron.kind, batch, bias, 0.0, damping).solve
        direction, _ = self.solve(product, gradient, M=precondition)
        # Solvers divide by h.Mh, which is zero for a dead neuron: that one does not move.
        finite = jnp.isfinite(optax.tree.norm(direction))
        direction = optax.tree.where(finite, direction, optax.tree.zeros_like(direction))
        error = optax.tree.norm(optax.tree.sub(product(direction), gradient))
        size = optax.tree.norm(gradient)
        return direction, KrylovState(error / jnp.where(size > 0, size, 1))
