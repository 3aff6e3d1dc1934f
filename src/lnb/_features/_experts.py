"""Experts: tables of weights of which each position takes one. Which features went to which?"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from ._program import Step


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Experts taken by index: `x @ w[index]`.

    Attributes:
      count: the number of experts.
      column: which of the indices is the expert's.
      table_shape: of `w[index]`; `index_axes` are those of the index.
      steps: what rearranged it before it met the features.
      table_order: its axes: those shared with the features, other axes of the index, the weight's.
      features_order: those of the features: shared ones, all others, inputs.
      sizes: how many shared positions, other positions and other experts there are.
    """

    count: int
    column: int
    index_axes: tuple[int, ...]
    table_shape: tuple[int, ...]
    steps: tuple[Step, ...]
    table_order: tuple[int, ...]
    features_order: tuple[int, ...]
    sizes: tuple[int, int, int]

    def rows(self, x: Array, indices: Array) -> tuple[Array, Array]:
        """Features [positions, inputs], and the expert of each position."""
        shared, others, several = self.sizes
        table = lax.broadcast_in_dim(indices[..., self.column], self.table_shape, self.index_axes)
        for step in self.steps:
            table = step(table, {})
        expert = table.transpose(self.table_order).reshape(shared, 1, several, -1)[..., 0]
        expert = jnp.clip(expert, 0, self.count - 1)
        x = x.transpose(self.features_order).reshape(shared, others, 1, -1)
        x = jnp.broadcast_to(x, (*self.sizes, x.shape[-1]))
        return x.reshape(-1, x.shape[-1]), jnp.broadcast_to(expert, self.sizes).reshape(-1)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Experts of `lax.ragged_dot`: positions in the experts' order, and how many each one has."""

    count: int
    features_order: tuple[int, ...]

    def rows(self, x: Array, sizes: Array) -> tuple[Array, Array]:
        """As of `Gathered`; positions beyond the last expert's have none."""
        x = x.transpose(self.features_order)
        positions = jnp.arange(len(x), dtype=sizes.dtype)
        return x, jnp.searchsorted(jnp.cumsum(sizes), positions, side="right")
