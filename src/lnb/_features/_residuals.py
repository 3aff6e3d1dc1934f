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

from ._fed import Fed
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
    """outputs = f(weight, bias; residuals), affine in weight and bias.

    One chain a level of nested loops, outermost first. The residuals of inner levels carry the
    loops' axes in front.

    Attributes:
      weight: the steps of the weight, from itself to the outputs.
      bias: those of the bias.
      layout: the weight as a column, `bias_layout` the bias as a row.
      fraction: how much of the weight the site sees.
    """

    weight: tuple[Chain, ...]
    bias: tuple[Chain, ...] | None
    layout: Layout
    bias_layout: Layout | None
    fraction: float

    def slots(self, level: int) -> list[str]:
        """The residuals of a level."""
        return self.weight[level].slots + ([] if self.bias is None else self.bias[level].slots)

    def all_slots(self) -> set[str]:
        return {slot for level in range(len(self.weight)) for slot in self.slots(level)}

    def __call__(
        self, weight: Array, bias: Array | None, residuals: Mapping[str, Array], level: int = 0
    ) -> Array:
        weight = self.weight[level](weight, residuals)
        biases = self.bias if bias is not None else None
        if biases is not None and bias is not None:
            bias = biases[level](bias, residuals)
        if level + 1 == len(self.weight):
            return weight if biases is None or bias is None else weight + bias
        inner = range(level + 1, len(self.weight))
        own = {slot: residuals[slot] for i in inner for slot in self.slots(i)}
        axis = lambda chain: 0 if chain.scanned else None
        return jax.vmap(
            lambda w, b, r: self(w, b, {**residuals, **r}, level + 1),
            in_axes=(axis(self.weight[level + 1]), biases and axis(biases[level + 1]), 0),
        )(weight, bias, own)


class Residuals(Fed):
    """What the outputs of a neuron without a matrix form depend on, beside its parameters.

    The sites are `Program`s. Their arrays are dictionaries by slot; `"count"` is 0 where a branch
    was not taken.
    """

    @property
    def layout(self) -> Layout:
        return self.sites[0].layout

    def outputs(self, weight: Array, bias: Array | None) -> tuple[Array, ...]:
        """The neuron's outputs at all its positions, for parameters given as matrices."""
        weight, bias_layout = self.layout.from_matrix(weight), self.sites[0].bias_layout
        if bias is not None and bias_layout is not None:
            bias = bias_layout.from_matrix(bias[:, None, :])
        return tuple(
            _if_taken(arrays.get("count"), program(weight, bias, arrays))
            for program, arrays in zip(self.sites, self.arrays, strict=True)
        )

    def squared(self) -> Residuals:
        """The same with the square of every number."""
        square = lambda x: x * x if jnp.issubdtype(x.dtype, jnp.inexact) else x
        return dataclasses.replace(self, arrays=jax.tree.map(square, self.arrays))


def _if_taken(count: Array | None, outputs: Array) -> Array:
    """Zeros where a branch was not taken: a bias is not added there."""
    if count is None:
        return outputs
    taken = (count > 0).astype(outputs.dtype)
    return outputs * taken.reshape(*count.shape, *(1,) * (outputs.ndim - count.ndim))
