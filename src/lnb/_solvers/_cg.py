"""Preconditioned conjugate gradients, the solver of the paper's Algorithm 2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from .._inverse import preconditioner
from .._metric import (
    Damping,
    Theta,
    damped_product,
    damping_constant,
    diagonal_moments,
)
from .._neurons import Neuron
from ._protocol import Solver, check_settings
from ._running import Running


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
    """

    steps: int = 2
    mean_decay: float = 0.9
    second_decay: float = 0.999
    shrinkage: float = 0.1

    def __post_init__(self) -> None:
        check_settings(self.mean_decay, self.second_decay)

    def init(self, neuron: Neuron, theta: Theta) -> tuple[Running, CGMemory]:
        moment = jnp.zeros_like(theta.weight[:, :, 0])
        residual = jnp.zeros((), theta.weight.dtype)
        return Running.empty(moment, moment), CGMemory(optax.tree.zeros_like(theta), residual)

    def update(
        self, neuron: Neuron, features: Any, known: Running, damping: Damping, step: Array
    ) -> Running:
        """Algorithm 2, lines 6 and 7: running means of x and x * x."""
        batch = diagonal_moments(features, neuron.layout)
        return known.absorb(batch, (self.mean_decay, self.second_decay), features.count > 0)

    def direction(
        self,
        neuron: Neuron,
        features: Any,
        gradient: Theta,
        known: Running,
        memory: CGMemory,
        damping: Damping,
    ) -> tuple[Theta, CGMemory]:
        """Algorithm 2, lines 8 to 10."""
        bias = gradient.bias is not None and neuron.has_matrix  # otherwise there is no mean
        running = known.moments
        gamma = damping_constant(damping, neuron.kind, running, bias)
        precondition = preconditioner(neuron.kind, running, bias, self.shrinkage, damping).solve
        product = damped_product(features, gamma, neuron.layout, neuron.bias_layout)
        direction, residual = _solve(product, precondition, gradient, memory.direction, self.steps)
        # A branch not taken has no features: M says nothing, P still knows the earlier ones.
        direction = optax.tree.where(features.count > 0, direction, precondition(gradient))
        residual = _ratio(optax.tree.norm(residual), optax.tree.norm(gradient))
        return direction, CGMemory(direction, residual)


def _solve(
    product: Callable[[Theta], Theta],
    precondition: Callable[[Theta], Theta],
    gradient: Theta,
    start: Theta,
    steps: int,
) -> tuple[Theta, Theta]:
    """Conjugate gradients as in any textbook, but for two things.

    1. The start is scaled to the best multiple of itself. However stale it is, the quadratic
       h.Mh / 2 - h.g is then at most 0, and stays so as it descends: h.g >= h.Mh / 2 >= 0.
    2. A ratio whose denominator is 0 is 0, so a zero gradient has a zero direction.
    """
    vdot, add_scale = optax.tree.vdot, optax.tree.add_scale
    image = product(start)
    scale = _ratio(vdot(start, gradient), vdot(start, image))
    direction, residual = optax.tree.scale(scale, start), add_scale(gradient, -scale, image)
    search = optax.tree.zeros_like(gradient)
    square = jnp.zeros_like(scale)
    for _ in range(steps):
        preconditioned = precondition(residual)
        square, previous = vdot(residual, preconditioned), square
        search = add_scale(preconditioned, _ratio(square, previous), search)
        image = product(search)
        scale = _ratio(square, vdot(search, image))
        direction = add_scale(direction, scale, search)
        residual = add_scale(residual, -scale, image)
    return direction, residual


def _ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    denominator = jnp.asarray(denominator)
    positive = denominator > jnp.finfo(denominator.dtype).tiny
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), 0)
