"""A running second moment, factorised every so often."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .._damping import Damping
from .._factor import Factor
from .._metric import Gram, Moments, Theta, gram
from .._moments import Average
from .._neurons import Neuron
from ._cg import CG
from ._protocol import Solver


class Statistics(NamedTuple):
    """Means over positions: of x, where there is a bias, and of x x^T, or of its diagonal."""

    first: Array | None  # [g, d]
    second: Array  # [g, d, d] or [g, d]


class CholeskyState(NamedTuple):
    """What `Cholesky` remembers about a neuron."""

    count: Array  # batches since the factorisation was last due
    average: Average
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
        statistics = empty_statistics(neuron, theta)
        # Until the first factorisation succeeds, M = I.
        identity = jnp.ones_like(statistics.second)
        if identity.ndim == 3:
            identity = identity * jnp.eye(identity.shape[-1], dtype=identity.dtype)[None]
        factor = Factor(statistics.first, identity)
        return CholeskyState(jnp.zeros((), jnp.int32), Average.empty(statistics), factor)

    def update(self, neuron: Neuron, features: Any, state: Any, damping: Damping) -> Any:
        if not neuron.has_gram:
            return self.fallback.update(neuron, features, state, damping)
        batch = gram(features)
        average = absorb(state.average, batch, self.decay)
        factor = lax.cond(
            state.count == 0,
            lambda: _keep_finite(factorize(neuron, average.value, damping), state.factor),
            lambda: state.factor,
        )
        count = next_count(state.count, batch, self.every)
        return CholeskyState(count, average, factor)

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not neuron.has_gram:
            return self.fallback.direction(neuron, features, gradient, state, damping)
        return state.factor.solve(gradient), state

    def factor(self, neuron: Neuron, state: Any) -> Factor | None:
        return state.factor if neuron.has_gram else self.fallback.factor(neuron, state)


def empty_statistics(neuron: Neuron, theta: Theta) -> Statistics:
    """Zeros in the shapes of a neuron's running moments."""
    blocks, inputs, _ = theta.weight.shape
    diagonal = neuron.kind == "lookup" or inputs == 1
    shape = (blocks, inputs) if diagonal else (blocks, inputs, inputs)
    first = None if theta.bias is None else jnp.zeros((blocks, inputs), theta.weight.dtype)
    return Statistics(first, jnp.zeros(shape, theta.weight.dtype))


def absorb(average: Average, batch: Gram, decay: float) -> Average:
    """Running moments with those of one more batch; unchanged by a batch without positions."""
    kept: Statistics = average.value
    n = batch.count.astype(kept.second.dtype)
    first = None if kept.first is None else batch.first / n
    second = batch.second.reshape(kept.second.shape) / n
    return average.absorb(Statistics(first, second), decay, seen=batch.count > 0)


def next_count(count: Array, batch: Gram, every: int) -> Array:
    """Counts the batches that had positions, modulo `every`."""
    return jnp.where(batch.count > 0, (count + 1) % every, count)


def damped(neuron: Neuron, statistics: Statistics, damping: Damping) -> Array:
    r""":math:`E[x x^T] + \gamma I`, or its diagonal."""
    first, second = statistics
    square = second if second.ndim == 2 else jnp.diagonal(second, axis1=1, axis2=2)
    gamma = damping.gamma(neuron, Moments(first, square), bias=first is not None)
    if second.ndim == 2:
        return second + gamma
    return second + gamma[..., None] * jnp.eye(second.shape[-1], dtype=second.dtype)[None]


def factorize(neuron: Neuron, statistics: Statistics, damping: Damping) -> Factor:
    r"""Factor of the damped metric, :math:`\Sigma + \gamma I = C C^T` where there is a bias."""
    mean, matrix = statistics.first, damped(neuron, statistics, damping)
    if matrix.ndim == 2:
        return Factor(mean, jnp.sqrt(matrix if mean is None else matrix - mean**2))
    if mean is not None:
        matrix = matrix - mean[:, :, None] * mean[:, None, :]
    return Factor(mean, jnp.linalg.cholesky(matrix))


def _keep_finite(new: Factor, old: Factor) -> Factor:
    """The new factor in the blocks where the factorisation succeeded, the old one elsewhere."""
    if new.root.ndim == 2:
        good = jnp.isfinite(new.root) & (new.root > 0)
        mean = None if new.mean is None else jnp.where(good, new.mean, old.mean)
        return Factor(mean, jnp.where(good, new.root, old.root))
    good = jnp.isfinite(new.root).all((1, 2))[:, None]
    mean = None if new.mean is None else jnp.where(good, new.mean, old.mean)
    return Factor(mean, jnp.where(good[..., None], new.root, old.root))
