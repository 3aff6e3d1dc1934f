"""What a layer of a random program is."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from ._tape import Node, Place, Tape

Params = Any  # arrays by name, or a list of such


class Data(NamedTuple):
    """A batch, for JAX and for NumPy.

    Attributes:
      x: what goes in, [batch, time, width].
      y: what should come out.
      tokens: integers, [batch, time].
      each: a choice for each example, [batch].
      turns: a choice for each turn of a loop.
      flag: one choice for all.
    """

    x: Any
    y: Any
    tokens: Any
    each: Any
    turns: Any
    flag: Any


class Layer:
    """A function of [batch, time, width], written twice.

    `init(rng)` returns its parameters. `run(params, x, data)` is for JAX; under `vmap` the axis of
    the batch is missing. `by_hand(tape, place, x, data)` is for NumPy, its parameters are at
    `place`. `str` says what it does, in a line or more.
    """

    def init(self, rng: np.random.Generator) -> Params:
        return {}

    def run(self, params: Params, x: Any, data: Data) -> Any:
        raise NotImplementedError

    def by_hand(self, tape: Tape, place: Place, x: Node, data: Data) -> Node:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Chain(Layer):
    """One layer after another."""

    layers: tuple[Layer, ...]

    def init(self, rng):
        return [layer.init(rng) for layer in self.layers]

    def run(self, params, x, data):
        for layer, own in zip(self.layers, params, strict=True):
            x = layer.run(own, x, data)
        return x

    def by_hand(self, tape, place, x, data):
        for i, layer in enumerate(self.layers):
            x = layer.by_hand(tape, place / i, x, data)
        return x

    def __str__(self):
        return "\n".join(str(layer) for layer in self.layers)


def normal(rng: np.random.Generator, *shape: int, inputs: int = 1) -> np.ndarray:
    return rng.normal(size=shape) / np.sqrt(inputs)


def raised(array: Any, rank: int) -> Any:
    """With axes of size one in front."""
    return array.reshape((1,) * (rank - array.ndim) + array.shape)


def positions(x: Node) -> int:
    """How many there are in [batch, time, width]."""
    return x.value.shape[0] * x.value.shape[1]


def indent(text: Any) -> str:
    return "\n".join(f"  {line}" for line in str(text).splitlines())
