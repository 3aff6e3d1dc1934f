"""A running inverse, updated by the Woodbury identity."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from .._damping import Damping
from .._inverse import Inverse, invert
from .._metric import Theta, count, gram, rows
from .._neurons import Neuron
from ._cg import CG
from ._cholesky import Cholesky
from ._protocol import Solver, check_settings
from ._running import Running

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class WoodburyState(NamedTuple):
    """What `Woodbury` remembers about a neuron whose features it sees row by row."""

    running: Running
    inverse: Array  # [g, d, d], of the damped running covariance, or second moment without a bias


@dataclass(frozen=True)
class Woodbury(Solver):
    r"""A running inverse with rank-n updates: the paper's third online option.

    Where the n rows of X are held and fewer than the d inputs, a step costs :math:`O(n d^2)`. The
    inverse of a matrix that only decays grows without bound in the directions that features no
    longer visit, damping included, so it is made afresh from the running second moment every so
    often. Where X is not held there is nothing to update by: this is then `Cholesky`.

    Args:
      decay: decay of the running moments.
      every: steps from one fresh inverse to the next.
      fallback: the solver for neurons without a gram.
      factors: see `lnb.Cholesky`, which serves where X is not held.
    """

    decay: float = 0.95
    every: int = 20
    fallback: Solver = field(default_factory=CG)
    factors: bool = False

    def __post_init__(self) -> None:
        check_settings(self.decay, every=self.every)

    def factored(self) -> "Woodbury":
        return replace(self, fallback=self.fallback.factored(), factors=True)

    @property
    def _cholesky(self) -> Cholesky:
        return Cholesky(self.decay, self.every, self.fallback, self.factors)

    def init(self, neuron: Neuron, theta: Theta) -> Any:
        if not _holds_rows(neuron):
            return self._cholesky.init(neuron, theta)
        blocks, inputs, _ = theta.weight.shape
        identity = jnp.eye(inputs, dtype=theta.weight.dtype)
        inverse = jnp.broadcast_to(identity, (blocks, inputs, inputs))
        return WoodburyState(Running.empty(neuron, theta), inverse)

    def update(
        self, neuron: Neuron, features: Any, state: Any, damping: Damping, step: Array
    ) -> Any:
        if not _holds_rows(neuron):
            return self._cholesky.update(neuron, features, state, damping, step)
        x, n = rows(features), count(features)
        assert x is not None
        running = state.running.absorb(gram(features), self.decay)
        running = optax.tree.where(n > 0, running, state.running)
        # Control flow may have left out some of the rows: then they are not the batch.
        afresh = self._cholesky.due(neuron, step) | (n != x.shape[1])
        inverse = lax.cond(
            afresh,
            lambda: invert(running.metric(neuron.kind, damping)),
            lambda: _absorb_rows(state, x.astype(state.inverse.dtype), self.decay),
        )
        good = jnp.isfinite(inverse).all((1, 2), keepdims=True) & (n > 0)
        return WoodburyState(running, jnp.where(good, inverse, state.inverse))

    def due(self, neuron: Neuron, step: Array) -> Array:
        return jnp.asarray(True) if _holds_rows(neuron) else self._cholesky.due(neuron, step)

    def remembers(self, neuron: Neuron) -> bool:
        return _holds_rows(neuron) or self._cholesky.remembers(neuron)

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        if not _holds_rows(neuron):
            return self._cholesky.direction(neuron, features, gradient, state, damping)
        return Inverse(state.running.first, state.inverse).solve(gradient), state

    def inverse(self, neuron: Neuron, state: Any) -> Inverse | None:
        return None if _holds_rows(neuron) else self._cholesky.inverse(neuron, state)


def _holds_rows(neuron: Neuron) -> bool:
    return neuron.kind == "dense" and neuron.metric == "matrix-free" and neuron.has_gram


def _absorb_rows(state: WoodburyState, x: Array, decay: float) -> Array:
    r"""The inverse after one more batch.

    With weight r for the batch a second moment becomes :math:`(1 - r) S + r X^T X / n`. So does a
    covariance, with centred rows and one more for how far the mean moves.
    """
    n, mean = x.shape[1], state.running.first
    rate = state.running.average.rate(decay).astype(x.dtype)
    if mean is not None:
        batch_mean = jnp.mean(x, axis=1, keepdims=True)
        shift = jnp.sqrt((1 - rate) * n) * (mean[:, None, :] - batch_mean)
        x = jnp.concatenate([x - batch_mean, shift], axis=1)
    inverse, x = state.inverse / (1 - rate), x * jnp.sqrt(rate / n)
    projected = _matmul(x, inverse)
    inner = jnp.eye(x.shape[1], dtype=x.dtype)[None] + _matmul(projected, x.mT)
    return inverse - _matmul(projected.mT, _matmul(invert(inner), projected))
