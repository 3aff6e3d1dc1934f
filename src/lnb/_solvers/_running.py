"""Running moments of a neuron's features."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import optax
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
        """With one more batch, unless it was not seen or is not finite; an outlier is shrunk."""
        size = _size(batch)
        recent, factor, stale = judge(self.recent, size, _size(self.moments))
        first = jnp.zeros_like(self.first.value) if batch.first is None else batch.first
        second = batch.second.reshape(self.second.value.shape)
        shrunk = [factor.astype(x.dtype) ** 2 * x for x in (first, second)]
        new = Running(
            self.first.absorb(shrunk[0], decays[0], stale),
            self.second.absorb(shrunk[1], decays[1], stale),
            recent,
        )
        return optax.tree.where(seen & jnp.isfinite(size), new, self)


def _size(moments: Moments) -> Array:
    """The root mean square length of the features."""
    return jnp.sqrt(jnp.sum(moments.square))
