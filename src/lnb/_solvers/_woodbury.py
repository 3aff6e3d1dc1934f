"""A running inverse, updated by the Woodbury identity."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from .._inverse import inverse, invert
from .._metric import matmul, moments
from .._neurons import Neuron
from ._cholesky import Cholesky, InverseState


@dataclass(frozen=True)
class Woodbury(Cholesky):
    r"""A running inverse with rank-k updates: the paper's third online option.

    Where a neuron has fewer rows than inputs, k rows cost :math:`O(k d^2)` in a step. The inverse
    of a matrix that only decays grows without bound in the directions that features no longer
    visit, damping included, so it is made afresh from the running second moment every so often.
    Elsewhere there is nothing to gain: this is then `Cholesky`.

    Args:
      decay: decay of the running moments.
      every: steps from one fresh inverse to the next.
      fallback: see `lnb.Cholesky`.
    """

    every: int = 20

    def update(self, neuron, features: Any, known, damping, step):
        rows = _few_rows(neuron, features)
        if rows is None:
            return super().update(neuron, features, known, damping, step)
        bias, seen = neuron.bias is not None, features.count > 0
        running = known.running.absorb(moments(features), (self.decay, self.decay), seen)
        rate = (1 - self.decay) / running.second.mass
        # Control flow may have left out some of the rows: then they are not the batch.
        afresh = (lax.rem(step, jnp.int32(self.every)) == 0) | (features.count != rows.shape[1])
        updated = lax.cond(
            afresh,
            lambda: invert(running.moments, neuron.kind, bias, damping),
            lambda: _absorb_rows(known, rows.astype(known.inverse.dtype), rate, bias),
        )
        good = jnp.isfinite(updated).all((1, 2), keepdims=True) & seen
        return InverseState(running, jnp.where(good, updated, known.inverse))


def _few_rows(neuron: Neuron, features: Any) -> Array | None:
    """The rows [g, k, d] of a dense neuron, if they are all of its positions and fewer than d."""
    if neuron.kind != "dense":
        return None
    sites = [site.arrangement for site, _ in features.rows]
    if any(a.stride > 1 for a in sites) or sum(a.shape[1] for a in sites) >= sites[0].inputs_count:
        return None
    return jnp.concatenate([s.arrangement.rows(x) for s, x in features.rows], axis=1)


def _absorb_rows(known: InverseState, x: Array, rate: Array, bias: bool) -> Array:
    r"""The inverse after one more batch.

    With weight r for the batch a second moment becomes :math:`(1 - r) S + r X^T X / n`. So does a
    covariance, with centred rows and one more for how far the mean moves.
    """
    n, mean, rate = x.shape[1], known.running.first.value, rate.astype(x.dtype)
    if bias:
        batch_mean = jnp.mean(x, axis=1, keepdims=True)
        shift = jnp.sqrt((1 - rate) * n) * (mean[:, None, :] - batch_mean)
        x = jnp.concatenate([x - batch_mean, shift], axis=1)
    old, x = known.inverse / (1 - rate), x * jnp.sqrt(rate / n)
    projected = matmul(x, old)
    inner = jnp.eye(x.shape[1], dtype=x.dtype)[None] + matmul(projected, x.mT)
    return old - matmul(projected.mT, matmul(inverse(inner), projected))
