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
from ._protocol import Solver, check_settings
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

    def __post_init__(self) -> None:
        check_settings(self.decay, every=self.every)

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
        due = self.due(neuron, state)
        running = state.running.absorb(features, self.decay, due)

        def factorize() -> Factor:
            root = _root(running.metric(neuron, damping))
            return _keep_finite(Factor(running.first, root), state.factor)

        if self.every == 1:
            return CholeskyState(running, factorize())
        due &= ~running.missed
        return CholeskyState(running, lax.cond(due, factorize, lambda: state.factor))

    def due(self, neuron: Neuron, state: Any) -> Array:
        if not neuron.has_gram:
            return self.fallback.due(neuron, state)
        return state.running.due(neuron, self.every)

    def remembers(self, neuron: Neuron) -> bool:
        return neuron.has_gram or self.fallback.remembers(neuron)

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not neuron.has_gram:
            return self.fallback.direction(neuron, features, gradient, state, damping)
        return state.factor.solve(gradient), state

    def factor(self, neuron: Neuron, state: Any) -> Factor | None:
        return state.factor if neuron.has_gram else self.fallback.factor(neuron, state)


def _root(metric: Array) -> Array:
    """The Cholesky factor; NaN where there is none."""
    if metric.ndim == 2:
        return jnp.sqrt(jnp.where(metric > 0, metric, jnp.nan))
    return jnp.linalg.cholesky(metric)


def _keep_finite(new: Factor, old: Factor) -> Factor:
    """The new factor in the blocks where the factorisation succeeded, the old one elsewhere."""
    finite = jnp.isfinite(new.root)
    if finite.ndim == 3:
        finite = jnp.all(finite, (1, 2))[:, None]

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(finite if new.ndim == 2 else finite[..., None], new, old)

    return jax.tree.map(keep, new, old)
