"""Running moments of a neuron's features."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._average import Average, judge, no_sizes
from .._metric import Moments


class Running(NamedTuple):
    """Running means of x, and of x x^T or x * x.

    Attributes:
      first: of x, [g, d].
      second: of x x^T, [g, d, d], or x * x, [g, d].
      recent: how large the features of the latest batches were.
    """

    first: Average
    second: Average
    recent: Array

    @classmethod
    def empty(cls, first: Array, second: Array) -> Running:
        return cls(Average.empty(first), Average.empty(second), no_sizes())

    @property
    def moments(self) -> Moments:
        return Moments(self.first.value, self.second.value)

    def absorb(
        self, batch: Moments, decays: tuple[ArrayLike, ArrayLike], seen: ArrayLike = True
    ) -> Running:
        """With one more batch, unless it was not seen, is not finite, or is an outlier."""
        kept = self.second.value.dtype
        second = batch.second.reshape(self.second.value.shape).astype(kept)
        first = jnp.zeros_like(self.first.value) if batch.first is None else batch.first
        seen &= jnp.isfinite(jnp.sum(second))
        first, second = (jnp.where(jnp.isfinite(x), x, 0) for x in (first.astype(kept), second))
        size = jnp.sqrt(jnp.sum(Moments(None, second).square)).astype(self.recent.dtype)
        recent, factor, stale = judge(self.recent, size, self.second.size)
        stale, size = seen & stale, factor * size
        first, second = jax.tree.map(lambda x: x * factor.astype(kept) ** 2, (first, second))
        return Running(
            self.first.absorb(first, decays[0], seen, stale, size),
            self.second.absorb(second, decays[1], seen, stale, size),
            jnp.where(seen, recent, self.recent),
        )
