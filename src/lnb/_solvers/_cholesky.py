"""A running second moment, inverted every so often."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._inverse import Inverse, invert
from .._metric import moments
from .._plan import EVERY, is_inverted
from ._cg import CG
from ._protocol import Solver, check_settings
from ._running import Running


class InverseState(NamedTuple):
    """What `Cholesky` knows of a neuron's M.

    Attributes:
      running: moments.
      inverse: of the damped running covariance (without a bias, of the second moment).
    """

    running: Running
    inverse: Array


@dataclass(frozen=True)
class Cholesky(Solver):
    """Exact directions for a running metric: the paper's second online option.

    Every so often a neuron's M is refreshed: its features join the running second moment, and that
    is inverted. This is frequent at first, and different neurons have it at different steps. The
    metric of a lookup or a scale is diagonal and needs no factorisation.

    Args:
      decay: decay of the running moments in one step; from one refresh to the next it is a power
        of that.
      every: steps from one refresh to the next, once training has gone on for a while.
      fallback: the solver for neurons that are used in two orientations, or have too many inputs.
    """

    decay: float = 0.95
    every: int = EVERY
    fallback: Solver = field(default_factory=CG)

    def __post_init__(self) -> None:
        check_settings(self.decay, every=self.every)

    def serving(self, neuron):
        return self if is_inverted(neuron) else self.fallback

    def init(self, neuron, theta):
        blocks, inputs, _ = theta.weight.shape
        first = jnp.zeros((blocks, inputs), theta.weight.dtype)
        if neuron.kind == "lookup" or inputs == 1:
            return InverseState(Running.empty(first, first), jnp.ones_like(first)), ()
        # Until the first refresh succeeds, M = I.
        identity = jnp.broadcast_to(jnp.eye(inputs, dtype=first.dtype), (blocks, inputs, inputs))
        return InverseState(Running.empty(first, jnp.zeros_like(identity)), identity), ()

    def update(self, neuron, features: Any, known, damping, step):
        interval = lax.min(1 + lax.div(step, jnp.int32(self.every)), jnp.int32(self.every))
        due = lax.rem(step + neuron.fed % self.every, interval) == 0
        due |= known.running.second.mass == 0  # no features so far

        def refresh() -> InverseState:
            decay = self.decay ** interval.astype(known.running.second.mass.dtype)
            running = known.running.absorb(moments(features), (decay, decay))
            inverse = invert(running.moments, neuron.kind, neuron.bias is not None, damping)
            # A factorisation that failed is NaN: the old one stays.
            return InverseState(running, jnp.where(jnp.isfinite(inverse), inverse, known.inverse))

        return lax.cond(due & (features.count > 0), refresh, lambda: known)

    def direction(self, neuron, features, gradient, known, memory, damping):
        return self.inverse(neuron, known).solve(gradient), ()

    def inverse(self, neuron, known):
        return Inverse(known.running.first.value, known.inverse)
