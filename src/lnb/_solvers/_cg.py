"""Preconditioned conjugate gradients, the solver of the paper's Algorithm 2."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

from .._metric import Absolute, Theta, diagonal_moments
from .._numerics import ratio
from ._protocol import Solver, check_settings
from ._running import Running
from ._system import System


class CGMemory(NamedTuple):
    """What `CG` remembers of a neuron's last solve."""

    direction: Theta
    residual: Array


@dataclass(frozen=True)
class CG(Solver):
    r"""A few conjugate gradient steps, started from the previous direction.

    The metric is that of this step's batch; the preconditioner P holds the memory, as running
    moments of the features (paper, section "Online Learning").

    Args:
      steps: conjugate gradient steps; each costs one product with M, the start costs one more.
      mean_decay: decay of the running mean :math:`\mu`.
      second_decay: decay of the running second moment :math:`\chi`.
      shrinkage: how far the variances in P are moved towards their mean.
      careful: whether to depart from the paper in two ways: the start is scaled to its best
        multiple, and the damping is added to P too. However stale the start, h . g is then not
        negative.
    """

    steps: int = 2
    mean_decay: float = 0.9
    second_decay: float = 0.999
    shrinkage: float = 0.1
    careful: bool = True

    def __post_init__(self) -> None:
        check_settings(self.mean_decay, self.second_decay)

    def init(self, neuron, theta):
        moment = jnp.zeros_like(theta.weight[:, :, 0])
        residual = jnp.zeros((), theta.weight.dtype)
        return Running.empty(moment, moment), CGMemory(optax.tree.zeros_like(theta), residual)

    def update(self, neuron, features, known, damping, step):
        """Algorithm 2, lines 6 and 7: running means of x and x * x."""
        batch = diagonal_moments(features, neuron.layout)
        return known.absorb(batch, (self.mean_decay, self.second_decay), features.count > 0)

    def direction(self, neuron, features, gradient, known, memory, damping):
        """Algorithm 2, lines 8 to 10."""
        in_p = damping if self.careful else Absolute(0.0)
        system = System.of(neuron, features, known.moments, damping, in_p, self.shrinkage)
        start = memory.direction, system.product(memory.direction)
        start = _best_multiple(gradient, *start) if self.careful else start
        direction, residual = _solve(system, gradient, *start, self.steps)
        # A branch not taken has no features: M says nothing, P still knows the earlier ones.
        seen = features.count > 0
        direction = optax.tree.where(seen, direction, system.precondition(gradient))
        error = ratio(optax.tree.norm(residual), optax.tree.norm(gradient))
        return direction, CGMemory(direction, error)


def _best_multiple(gradient: Theta, start: Theta, image: Theta) -> tuple[Theta, Theta]:
    """The multiple of a start at which the quadratic h.Mh / 2 - h.g is lowest, and its image.

    There it is at most 0, and stays so as it descends: h.g >= h.Mh / 2 >= 0.
    """
    scale = ratio(optax.tree.vdot(start, gradient), optax.tree.vdot(start, image))
    return optax.tree.scale(scale, start), optax.tree.scale(scale, image)


def _solve(
    system: System, gradient: Theta, start: Theta, image: Theta, steps: int
) -> tuple[Theta, Theta]:
    """Conjugate gradients as in any textbook. A ratio whose denominator is 0 is 0, so a zero
    gradient has a zero direction."""
    vdot, add_scale = optax.tree.vdot, optax.tree.add_scale
    direction, residual = start, optax.tree.sub(gradient, image)
    search, square = optax.tree.zeros_like(gradient), jnp.zeros_like(vdot(start, image))
    for _ in range(steps):
        preconditioned = system.precondition(residual)
        square, previous = vdot(residual, preconditioned), square
        search = add_scale(preconditioned, ratio(square, previous), search)
        image = system.product(search)
        scale = ratio(square, vdot(search, image))
        direction = add_scale(direction, scale, search)
        residual = add_scale(residual, -scale, image)
    return direction, residual
