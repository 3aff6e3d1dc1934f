"""Preconditioned conjugate gradients, the solver of the paper's Algorithm 2."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from .._damping import Damping, damped_product
from .._kernels import finite_or_zero
from .._metric import Moments, Theta, count, moments
from .._moments import Average, judge, no_sizes, preconditioner
from .._neurons import Neuron
from ._protocol import Solver, check_settings


class CGState(NamedTuple):
    """What `CG` remembers about a neuron."""

    direction: Theta
    first: Average
    square: Average
    recent: Array  # how large the features of the latest batches were
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

    def init(self, neuron: Neuron, theta: Theta) -> CGState:
        moment = Average.empty(theta.weight[:, :, 0])
        residual = jnp.zeros((), theta.weight.dtype)
        return CGState(optax.tree.zeros_like(theta), moment, moment, no_sizes(), residual)

    def update(
        self, neuron: Neuron, features: Any, state: CGState, damping: Damping, step: Array
    ) -> CGState:
        first, square = moments(features)
        first = jnp.zeros_like(square) if first is None else first
        seen = (count(features) > 0) & jnp.isfinite(jnp.sum(square))
        first, square = finite_or_zero(first), finite_or_zero(square)
        size = jnp.sqrt(jnp.sum(square)).astype(state.recent.dtype)
        recent, factor, stale = judge(state.recent, size, state.square.size)
        size, factor, stale = factor * size, factor.astype(square.dtype), seen & stale
        first, square = factor * first, factor**2 * square
        return state._replace(
            first=state.first.absorb(first, self.mean_decay, seen, stale, size),
            square=state.square.absorb(square, self.second_decay, seen, stale, size),
            recent=jnp.where(seen, recent, state.recent),
        )

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: CGState, damping: Damping
    ) -> tuple[Theta, CGState]:
        bias = gradient.bias is not None and neuron.has_gram  # without a gram there is no mean
        running = Moments(state.first.value, state.square.value)
        gamma = damping.gamma(neuron.kind, running, bias)
        precondition = preconditioner(neuron.kind, running, bias, self.shrinkage, damping).solve
        product = partial(damped_product, features, gamma)
        direction, residual = _solve(product, precondition, gradient, state.direction, self.steps)
        # A branch not taken has no features: M says nothing, P still knows the earlier ones.
        direction = optax.tree.where(count(features) > 0, direction, precondition(gradient))
        residual = _ratio(optax.tree.norm(residual), optax.tree.norm(gradient))
        return direction, state._replace(direction=direction, residual=residual)


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
    2. A ratio with nothing below is 0, so a zero gradient has a zero direction.
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
