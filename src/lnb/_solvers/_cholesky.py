"""A running second moment, inverted every so often."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._cost import EVERY
from .._damping import Damping
from .._inverse import Factor, Inverse, inverse_root, invert
from .._kernels import blend, total
from .._metric import Theta, count
from .._neurons import Neuron
from ._cg import CG
from ._protocol import Solver, check_settings
from ._running import Running


class CholeskyState(NamedTuple):
    """What `Cholesky` remembers about a neuron."""

    running: Running
    inverse: Inverse


@dataclass(frozen=True)
class Cholesky(Solver):
    """Exact directions for a running metric: the paper's second online option.

    Every so often it is a neuron's turn: its features join the running second moment, and that is
    factorised and inverted. Turns are frequent at first, and different neurons have theirs at
    different steps. The metric of a lookup or a scale is diagonal and needs no factorisation.
    Neurons without a gram, those used in two orientations, are left to another solver.

    Args:
      decay: decay of the running moments in one step; from turn to turn it is a power of that.
      every: steps from one turn to the next, once training has gone on for a while.
      fallback: the solver for neurons without a gram.
      factors: whether to hold the inverse as a factor, as `norm="spectral"` asks for by itself.
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
        return CholeskyState(running, self._held(running.first, identity))

    def update(
        self, neuron: Neuron, features: Any, state: Any, damping: Damping, step: Array
    ) -> Any:
        if not neuron.has_gram:
            return self.fallback.update(neuron, features, state, damping, step)

        def refresh() -> CholeskyState:
            interval = self._interval(step).astype(state.running.average.mass.dtype)
            running = state.running.absorb(features, self.decay**interval)
            metric = running.metric(neuron, damping)
            inverse = inverse_root(metric) if self.factors else invert(metric)
            held = self._held(running.first, inverse)
            return CholeskyState(running, _keep_finite(held, state.inverse))

        return lax.cond(count(features) > 0, refresh, lambda: state)

    @property
    def _held(self) -> type[Inverse]:
        return Factor if self.factors else Inverse

    def due(self, neuron: Neuron, step: Array) -> Array:
        """At every step at first, then more and more rarely, and not all at the same step."""
        if not neuron.has_gram:
            return self.fallback.due(neuron, step)
        return (step + neuron.turn) % self._interval(step) == 0

    def _interval(self, step: Array) -> Array:
        """Steps from one turn to the next, at this time."""
        return jnp.clip(1 + step // self.every, 1, self.every)

    def remembers(self, neuron: Neuron) -> bool:
        return neuron.has_gram or self.fallback.remembers(neuron)

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not neuron.has_gram:
            return self.fallback.direction(neuron, features, gradient, state, damping)
        return state.inverse.solve(gradient), state

    def inverse(self, neuron: Neuron, state: Any) -> Inverse | None:
        return state.inverse if neuron.has_gram else self.fallback.inverse(neuron, state)


def _keep_finite(new: Inverse, old: Inverse) -> Inverse:
    """The new inverse in the blocks where the factorisation succeeded, the old one elsewhere.

    Each entry of a diagonal is a block of its own.
    """
    diagonal = new.matrix.ndim == 2
    finite = jnp.isfinite(new.matrix if diagonal else total(new.matrix, (1, 2))[:, None])
    good = lambda x: finite if x.ndim == 2 else finite[..., None]
    return jax.tree.map(lambda new, old: blend(good(new), new, old), new, old)
