"""A running second moment, inverted every so often."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._cost import EVERY
from .._damping import Damping
from .._factor import Factor, Inverse, inverse_root, invert
from .._metric import Theta, count
from .._neurons import Neuron
from ._cg import CG
from ._protocol import Solver, check_settings
from ._running import Running


class CholeskyState(NamedTuple):
    """What `Cholesky` remembers about a neuron."""

    running: Running
    inverse: Inverse | Factor


@dataclass(frozen=True)
class Cholesky(Solver):
    """Exact directions for a running metric: the paper's second online option.

    Every so often it is a neuron's turn: its features join the running second moment, and that is
    factorised and inverted. Turns are frequent at first, and different neurons have theirs at
    different steps. The metric of a lookup or a scale is diagonal and needs no factorisation.
    Neurons without a gram, those used in two orientations, are left to another solver.

    Args:
      decay: decay of the running moments, from turn to turn.
      every: steps from one turn to the next, once training has gone on for a while.
      fallback: the solver for neurons without a gram.
      factors: whether to hold M as L L^T, as `norm="spectral"` asks for by itself, rather than
        its inverse.
    """

    decay: float = 0.95
    every: int = EVERY
    fallback: Solver = field(default_factory=CG)
    factors: bool = False

    def __post_init__(self) -> None:
        check_settings(self.decay, every=self.every)

    def factored(self) -> "Cholesky":
        return replace(self, fallback=self.fallback.factored(), factors=True)

    def init(self, neuron: Neuron, theta: Theta) -> Any:
        if not neuron.has_gram:
            return self.fallback.init(neuron, theta)
        running = Running.empty(neuron, theta)
        # Until the first factorisation succeeds, M = I.
        blocks, inputs, _ = theta.weight.shape
        identity = jnp.ones((blocks, inputs), theta.weight.dtype)
        if not running.is_diagonal:
            identity = identity[..., None] * jnp.eye(inputs, dtype=identity.dtype)[None]
        return CholeskyState(running, self._hold(running.first, identity))

    def _hold(self, mean: Array | None, inverse: Array) -> Inverse | Factor:
        return Factor(mean, inverse) if self.factors else Inverse.of(mean, inverse)

    def update(self, neuron: Neuron, features: Any, state: Any, damping: Damping) -> Any:
        if not neuron.has_gram:
            return self.fallback.update(neuron, features, state, damping)
        running, turn, seen = state.running, self.due(neuron, state), count(features) > 0

        def refresh() -> tuple[Any, Any]:
            new = running.absorb(features, self.decay)
            metric = new.metric(neuron, damping)
            inverse = inverse_root(metric) if self.factors else invert(metric)
            held = self._hold(new.first, inverse)
            return new.average, _keep_finite(inverse, held, state.inverse)

        average, inverse = lax.cond(turn & seen, refresh, lambda: (running.average, state.inverse))
        return CholeskyState(Running(running.count + 1, turn & ~seen, average), inverse)

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
        return state.inverse.solve(gradient), state

    def factor(self, neuron: Neuron, state: Any) -> Factor | None:
        if not neuron.has_gram:
            return self.fallback.factor(neuron, state)
        return state.inverse if isinstance(state.inverse, Factor) else None


def _keep_finite(inverse: Array, new: Any, old: Any) -> Any:
    """The new inverse in the blocks where the factorisation succeeded, the old one elsewhere.

    Each entry of a diagonal is a block of its own.
    """
    finite = jnp.isfinite(inverse if inverse.ndim == 2 else jnp.sum(inverse, (1, 2))[:, None])
    by_axes = {1: jnp.all(finite, 1), 2: finite, 3: finite[..., None]}
    return jax.tree.map(lambda new, old: jnp.where(by_axes[new.ndim], new, old), new, old)
