"""A running second moment, factorised every so often."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._damping import Damping
from .._factor import Factor
from .._metric import Theta
from .._neurons import Neuron
from ._cg import CG
from ._protocol import Solver
from ._running import Running


class CholeskyState(NamedTuple):
    """What `Cholesky` remembers about a neuron."""

    running: Running
    factor: Factor


@dataclass(frozen=True)
class Cholesky(Solver):
    """Exact directions for a running metric: the paper's second online option.

    The metric of a lookup or a scale is diagonal and needs no factorisation. Neurons without a
    gram, those used in two orientations, are left to another solver.

    Args:
      decay: decay of the running moments.
      every: steps from one factorisation to the next.
      fallback: the solver for neurons without a gram.
    """

    decay: float = 0.95
    every: int = 1
    fallback: Solver = field(default_factory=CG)

    def init(self, neuron: Neuron, theta: Theta) -> Any:
        if not neuron.has_gram:
            return self.fallback.init(neuron, theta)
        running = Running.empty(neuron, theta)
        # Until the first factorisation succeeds, M = I.
        root = jnp.ones_like(running.second)
        if root.ndim == 3:
            root = root * jnp.eye(root.shape[-1], dtype=root.dtype)[None]
        return CholeskyState(running, Factor(running.first, root))

    def update(self, neuron: Neuron, features: Any, state: Any, damping: Damping) -> Any:
        if not neuron.has_gram:
            return self.fallback.update(neuron, features, state, damping)
        running = state.running.absorb(features, self.decay, self.every)

        def factorize() -> Factor:
            return _keep_finite(_factorize(running.first, running.damped(neuron, damping)), state)

        if self.every == 1:
            return CholeskyState(running, factorize())
        due = state.running.count == 0
        return CholeskyState(running, lax.cond(due, factorize, lambda: state.factor))

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not neuron.has_gram:
            return self.fallback.direction(neuron, features, gradient, state, damping)
        return state.factor.solve(gradient), state

    def factor(self, neuron: Neuron, state: Any) -> Factor | None:
        return state.factor if neuron.has_gram else self.fallback.factor(neuron, state)


def _factorize(mean: Array | None, second: Array) -> Factor:
    r"""Factor of :math:`E[x x^T]`, or of the covariance where there is a mean; NaN if it fails."""
    if second.ndim == 2:
        square = second if mean is None else second - mean**2
        return Factor(mean, jnp.sqrt(jnp.where(square > 0, square, jnp.nan)))
    covariance = second if mean is None else second - mean[:, :, None] * mean[:, None, :]
    return Factor(mean, jnp.linalg.cholesky(covariance))


def _keep_finite(factor: Factor, state: CholeskyState) -> Factor:
    """The new factor in the blocks where the factorisation succeeded, the old one elsewhere."""
    finite = jnp.isfinite(factor.root)
    if finite.ndim == 3:
        finite = jnp.all(finite, (1, 2))[:, None]

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(finite if new.ndim == 2 else finite[..., None], new, old)

    return jax.tree.map(keep, factor, state.factor)
