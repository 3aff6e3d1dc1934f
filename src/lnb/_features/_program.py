"""A site as a program: the map from a neuron's own parameters to its outputs, run again at will.

This is for weights without a matrix form: what meets the data is linear in them, but no mere
rearrangement of their elements. The forward pass leaves *residuals*: all that the map depends on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ._layout import Layout


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation on the way of a parameter: its operand `position` is the parameter's view.

    Two steps are equal when they would do the same, whichever trace they come from: features are
    compared by it when a function is jitted.

    Attributes:
      operands: the slot of the residual that each operand is, a string, or its value.
      output: which result, of a primitive with several.
    """

    bind: Callable[..., Any]
    key: str
    position: int = 0
    operands: tuple[Any, ...] = (None,)
    output: int | None = None

    def __call__(self, view: Array, residuals: Mapping[str, Array]) -> Array:
        operands = [
            _like(view, residuals[operand] if isinstance(operand, str) else operand)
            for operand in self.operands
        ]
        operands[self.position] = view
        result = self.bind(*operands)
        return result if self.output is None else result[self.output]

    def _identity(self) -> tuple:
        return self.key, self.position, str(self.operands), self.output

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Step) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


def _like(view: Array, operand: Any) -> Any:
    """Operands join in the precision of the solve, whatever the model's own."""
    if operand is None or not jnp.issubdtype(jnp.result_type(operand), jnp.inexact):
        return operand
    return jnp.asarray(operand, view.dtype)


@dataclasses.dataclass(frozen=True)
class Chain:
    """The steps within one loop (or outside of all), and whether that loop slices the view."""

    steps: tuple[Step, ...] = ()
    scanned: bool = False

    def __call__(self, view: Array, residuals: Mapping[str, Array]) -> Array:
        for step in self.steps:
            view = step(view, residuals)
        return view

    @property
    def slots(self) -> list[str]:
        return [slot for step in self.steps for slot in step.operands if isinstance(slot, str)]


@dataclasses.dataclass(frozen=True)
class Program:
    """outputs = f(weight; residuals) + f(bias; residuals), each linear up to a constant.

    One chain a level of nested loops, outermost first. The residuals of inner levels carry the
    loops' axes in front.

    Attributes:
      weight: the steps of the weight, from itself to the outputs.
      bias: those of the bias, none if there is none.
      layout: the weight as a column, `bias_layout` the bias as a row.
      fraction: how much of the weight the site sees; its positions count by as much.
    """

    weight: tuple[Chain, ...]
    bias: tuple[Chain, ...]
    layout: Layout
    bias_layout: Layout | None
    fraction: float

    def slots(self, level: int = 0) -> set[str]:
        """The residuals of a level and of those inside."""
        chains = (*self.weight[level:], *self.bias[level:])
        return {slot for chain in chains for slot in chain.slots}

    def __call__(self, weight: Array, bias: Array | None, residuals: Mapping[str, Array]) -> Array:
        """The outputs at all positions, for parameters given as matrices."""
        outputs = self._run(self.weight, self.layout.from_matrix(weight), residuals)
        if bias is not None and self.bias_layout is not None:
            bias = self.bias_layout.from_matrix(bias[:, None, :])
            outputs += self._run(self.bias, bias, residuals)
        count = residuals.get("count")
        if count is None:
            return outputs
        # Zeros where a branch was not taken: a bias is not added there.
        taken = (count > 0).astype(outputs.dtype)
        return outputs * taken.reshape(*count.shape, *(1,) * (outputs.ndim - count.ndim))

    def _run(
        self,
        chains: tuple[Chain, ...],
        view: Array,
        residuals: Mapping[str, Array],
        level: int = 0,
    ) -> Array:
        """What the chains make of a parameter, from a level on inwards."""
        view, inside = chains[level](view, residuals), level + 1
        if inside == len(chains):
            return view
        own = {slot: residuals[slot] for slot in self.slots(inside)}
        return jax.vmap(
            lambda view, own: self._run(chains, view, {**residuals, **own}, inside),
            in_axes=(0 if chains[inside].scanned else None, 0),
        )(view, own)
