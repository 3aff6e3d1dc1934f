"""A site as a program: the map from a neuron's own parameters to its outputs, run again at will."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One equation of a parameter's lineage: its operand `position` is the parameter's view.

    `slots` say where the other operands come from: an `int` is a residual that the forward pass
    left, anything else is a literal's value. Two steps are equal when they would do the same,
    whichever trace they come from: features are compared by it when a function is jitted.
    """

    bind: Callable[..., Any]
    key: str
    position: int
    operands: tuple[int | None, ...]  # the slot of a residual, or None: see `literals`
    literals: tuple[Any, ...]
    output: int | None  # which result, of a primitive with several

    @classmethod
    def make(cls, key: str, function: Callable[[Array], Array]) -> Step:
        """A step that needs nothing but the view."""
        return cls(function, key, 0, (None,), (None,), None)

    def __call__(self, view: Array, residuals: Mapping[int, Array]) -> Array:
        operands = [
            _like(view, literal if slot is None else residuals[slot])
            for slot, literal in zip(self.operands, self.literals, strict=True)
        ]
        operands[self.position] = view
        result = self.bind(*operands)
        return result if self.output is None else result[self.output]

    def _identity(self) -> tuple:
        return self.key, self.position, self.operands, str(self.literals), self.output

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
    """The steps of a lineage within one loop (or outside of all), and how it enters that loop."""

    steps: tuple[Step, ...] = ()
    scanned: bool = False  # sliced by the loop, or the same at each of its turns

    def __call__(self, view: Array, residuals: Mapping[int, Array]) -> Array:
        for step in self.steps:
            view = step(view, residuals)
        return view


@dataclasses.dataclass(frozen=True)
class Program:
    """outputs = f(weight, bias; residuals), affine in weight and bias.

    One chain a level of nested loops, outermost first. `slots` are the residuals of each level;
    those of inner levels carry the loops' axes in front.
    """

    weight: tuple[Chain, ...]
    bias: tuple[Chain, ...] | None
    slots: tuple[tuple[int, ...], ...]

    def __call__(self, weight: Array, bias: Array | None, residuals: Mapping[int, Array]) -> Array:
        return self._level(0, weight, bias, residuals)

    def _level(self, level: int, weight: Array, bias: Any, residuals: Mapping[int, Array]) -> Array:
        weight = self.weight[level](weight, residuals)
        if self.bias is not None and bias is not None:
            bias = self.bias[level](bias, residuals)
        if level + 1 == len(self.weight):
            return weight if bias is None or self.bias is None else weight + bias
        inner = {slot: residuals[slot] for slots in self.slots[level + 1 :] for slot in slots}
        bias_axis = 0 if self.bias is not None and self.bias[level + 1].scanned else None
        return jax.vmap(
            lambda w, b, r: self._level(level + 1, w, b, {**residuals, **r}),
            in_axes=(0 if self.weight[level + 1].scanned else None, bias_axis, 0),
        )(weight, bias, inner)
