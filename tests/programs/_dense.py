"""Dense layers."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ._layer import Layer, normal, positions
from ._stored import Stored


@dataclasses.dataclass(frozen=True)
class Dense(Layer):
    """`einsum`, with the axes of data, weight, bias and output in any order.

    Inputs and outputs may be two axes each: "de" and "op". `bias` says in which way it is used;
    `half` whether the layer computes in bfloat16, with weights that are "cast" or "stored" so.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weight_order: str = "do"
    output_order: str = "bto"
    bias_order: str = "o"
    bias: str | None = "added"
    form: str = "plain"
    weight_first: bool = False
    half: str | None = None

    @property
    def d_in(self) -> int:
        return math.prod(self.inputs)

    @property
    def d_out(self) -> int:
        return math.prod(self.outputs)

    @property
    def letters(self) -> tuple[str, str]:
        return "de"[: len(self.inputs)], "op"[: len(self.outputs)]

    def _shape(self, order: str) -> tuple[int, ...]:
        ins, outs = self.letters
        sizes = dict(zip(ins + outs, self.inputs + self.outputs, strict=True))
        return tuple(sizes[letter] for letter in order)

    @property
    def stored(self) -> Stored:
        return Stored(self._shape(self.weight_order), self.form)

    def init(self, rng):
        params = {"w": normal(rng, *self.stored.stored_shape, inputs=self.d_in)}
        params |= {"b": normal(rng, *self._shape(self.bias_order))} if self.bias else {}
        if self.half == "stored":
            return {name: p.astype(ml_dtypes.bfloat16) for name, p in params.items()}
        return params

    def run(self, params, x, data):
        dtype, lead = x.dtype, "bt"[3 - x.ndim :]
        ins, outs = self.letters
        order = "".join(c for c in self.output_order if c in lead + outs)
        if self.half:
            x = x.astype(jnp.bfloat16)
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        operands = {lead + ins: x.reshape(*x.shape[:-1], *self.inputs)}
        operands |= {self.weight_order: self.stored.view(params["w"])}
        terms = sorted(operands, key=lambda term: (term == self.weight_order) != self.weight_first)
        y = jnp.einsum(",".join(terms) + "->" + order, *(operands[term] for term in terms))
        if self.bias:
            y = self._add_bias(params["b"], y, order)
        y = jnp.transpose(y, [order.index(letter) for letter in lead + outs])
        return y.reshape(*x.shape[:-1], self.d_out).astype(dtype)

    def _add_bias(self, bias, y, order: str):
        kept = [letter for letter in order if letter in self.letters[1]]
        bias = jnp.transpose(bias, [self.bias_order.index(letter) for letter in kept])
        bias = bias.reshape([n if c in kept else 1 for c, n in zip(order, y.shape, strict=True)])
        if self.bias == "subtracted":
            return y - bias
        return y + (0.5 * bias if self.bias == "halved" else bias)

    def apply(self, w, b, x):
        ins, outs = self.letters
        w = np.einsum(f"{self.weight_order}->{ins}{outs}", self.stored.view(w))
        y = x @ w.reshape(self.d_in, self.d_out)
        if b is None:
            return y
        factor = {"subtracted": -1.0, "halved": 0.5}.get(self.bias or "", 1.0)
        return y + factor * np.einsum(f"{self.bias_order}->{outs}", b).ravel()

    def by_hand(self, tape, place, x, data):
        bias = place / "b" if self.bias else None
        half = self.half is not None
        return tape.site(self.apply, place / "w", bias, x, positions(x), half=half)

    def __str__(self):
        ins, _ = self.letters
        bias = f", bias {self.bias_order} {self.bias}" if self.bias else ""
        half = f", bfloat16 {self.half}" if self.half else ""
        first = "weight first, " if self.weight_first else ""
        sizes = f"{'x'.join(map(str, self.inputs))} -> {'x'.join(map(str, self.outputs))}"
        einsum = f"{first}bt{ins},{self.weight_order}->{self.output_order}"
        return f"dense {sizes} ({einsum}{bias}{self.stored}{half})"


@dataclasses.dataclass(frozen=True)
class PerTime(Layer):
    """A weight for each time: an axis of the weight that is no position."""

    time: int
    width: int
    outputs: int
    bias: bool

    def init(self, rng):
        params = {"w": normal(rng, self.time, self.width, self.outputs, inputs=self.width)}
        return params | ({"b": normal(rng, self.time, self.outputs)} if self.bias else {})

    def run(self, params, x, data):
        y = jnp.einsum("...td,tdo->...to", x, params["w"])
        if not self.bias:
            return y
        return y + (params["b"] if x.ndim == 2 else params["b"][None])

    def by_hand(self, tape, place, x, data):
        def apply(w, b, x):
            return np.einsum("btd,tdo->bto", x, w) + (0 if b is None else b)

        bias = place / "b" if self.bias else None
        return tape.site(apply, place / "w", bias, x, len(x.value))

    def __str__(self):
        bias = ", bias" if self.bias else ""
        return f"dense per time {self.width} -> {self.outputs} (btd,tdo->bto{bias})"


@dataclasses.dataclass(frozen=True)
class LowRank(Layer):
    """`x @ u @ v`: one neuron fed by another, with nothing between them."""

    width: int
    rank: int
    outputs: int

    def init(self, rng):
        return {
            "u": normal(rng, self.width, self.rank, inputs=self.width),
            "v": normal(rng, self.rank, self.outputs, inputs=self.rank),
        }

    def run(self, params, x, data):
        return (x @ params["u"]) @ params["v"]

    def by_hand(self, tape, place, x, data):
        def apply(w, b, x):
            return x @ w

        y = tape.site(apply, place / "u", None, x, positions(x))
        return tape.site(apply, place / "v", None, y, positions(x))

    def __str__(self):
        return f"low rank {self.width} -> {self.rank} -> {self.outputs}: (x @ u) @ v"
