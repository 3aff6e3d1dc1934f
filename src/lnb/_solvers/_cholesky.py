"""A running second moment, inverted every so often."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._cost import EVERY
from .._damping import Damping
from .._inverse import Factor, Inverse, inverse_root, invert
from .._metric import Gram, Theta, count, gram
from .._neurons import Neuron
from ._cg import CG
from ._protocol import Solver, check_settings
from ._running import Running


class CholeskyState(NamedTuple):
    """What `Cholesky` remembers about a neuron.

    Attributes:
      running: moments.
      matrix: that of their inverse, or of its factor.
    """

    running: Running
    matrix: Array


class FactoredState(CholeskyState):
    """The same, where the matrix is the factor: a type of its own, since one is not the other."""


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
        return (FactoredState if self.factors else CholeskyState)(running, identity)

    def update(
        self, neuron: Neuron, features: Any, state: Any, damping: Damping, step: Array
    ) -> Any:
        if not neuron.has_gram:
            return self.fallback.update(neuron, features, state, damping, step)

        refresh = lambda: self._refresh(neuron.kind, gram(features), state, damping, step)
        return lax.cond(count(features) > 0, refresh, lambda: state)

    @functools.partial(jax.jit, static_argnums=(0, 1))  # traced once for all neurons of a shape
    def _refresh(
        self, kind: str, batch: Gram | None, state: CholeskyState, damping: Damping, step: Array
    ) -> CholeskyState:
        interval = self._interval(step).astype(state.running.average.mass.dtype)
        running = state.running.absorb(batch, self.decay**interval)
        metric = running.metric(kind, damping)
        matrix = inverse_root(metric) if self.factors else invert(metric)
        # A factorisation that failed is NaN all over: the old one stays.
        return type(state)(running, jnp.where(jnp.isfinite(matrix), matrix, state.matrix))

    def due(self, neuron: Neuron, step: Array) -> Array:
        """At every step at first, then more and more rarely, and not all at the same step."""
        if not neuron.has_gram:
            return self.fallback.due(neuron, step)
        return lax.rem(step + neuron.turn % self.every, self._interval(step)) == 0

    def _interval(self, step: Array) -> Array:
        """Steps from one turn to the next, at this time."""
        return lax.min(1 + lax.div(step, jnp.int32(self.every)), jnp.int32(self.every))

    def remembers(self, neuron: Neuron) -> bool:
        return neuron.has_gram or self.fallback.remembers(neuron)

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not neuron.has_gram:
            return self.fallback.direction(neuron, features, gradient, state, damping)
        return self._held(state).solve(gradient), state

    def inverse(self, neuron: Neuron, state: Any) -> Inverse | None:
        return self._held(state) if neuron.has_gram else self.fallback.inverse(neuron, state)

    def _held(self, state: CholeskyState) -> Inverse:
        return (Factor if self.factors else Inverse)(state.running.first, state.matrix)
