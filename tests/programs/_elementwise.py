"""Layers that act on elements: activations, scales, lookups, parameters that are only added."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._layer import Layer, normal, raised

# Each in JAX and in NumPy; the latter also of complex numbers.
ACTIVATIONS = {
    "tanh": (jnp.tanh, np.tanh),
    "sin": (jnp.sin, np.sin),
    "softplus": (jax.nn.softplus, lambda x: np.log1p(np.exp(x))),
    "silu": (jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "relu": (jax.nn.relu, lambda x: x * (x.real > 0)),
    "gelu": (
        jax.nn.gelu,
        lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    ),
    # Bounded: the square itself, in some loops, makes numbers whose sine nobody knows.
    "square": (lambda x: x**2 / (1 + x**2), lambda x: x**2 / (1 + x**2)),
    "none": (lambda x: x, lambda x: x),
}
SMOOTH = ("tanh", "sin", "softplus", "silu")


@dataclasses.dataclass(frozen=True)
class Activation(Layer):
    name: str

    def run(self, params, x, data):
        return ACTIVATIONS[self.name][0](x)

    def by_hand(self, tape, place, x, data):
        return tape.pure(ACTIVATIONS[self.name][1], x)

    def __str__(self):
        return self.name


@dataclasses.dataclass(frozen=True)
class Scale(Layer):
    """A scale for each channel, each element, or all; behind a normalisation or not.

    `norm` is "layer", "rms", "late" (the scale meets 1 / std first, and x - mean afterwards) or
    "none".
    """

    shape: tuple[int, ...]
    norm: str
    bias: bool
    scale_first: bool

    def init(self, rng):
        params = {"s": 1 + normal(rng, *self.shape)}
        return params | ({"b": normal(rng, *self.shape)} if self.bias else {})

    def run(self, params, x, data):
        s = raised(params["s"], x.ndim)
        if self.norm == "late":
            y = self._centred(x) * (self._inverse(jnp, self._centred(x)) * s)
        else:
            normed = self._normed(jnp, x)
            y = s * normed if self.scale_first else normed * s
        return y + raised(params["b"], x.ndim) if self.bias else y

    def _centred(self, x):
        return x - x.mean(axis=-1, keepdims=True)

    def _inverse(self, xp, x):
        return 1 / xp.sqrt((x * x).mean(axis=-1, keepdims=True) + 0.1)

    def _normed(self, xp, x):
        if self.norm == "none":
            return x
        x = x if self.norm == "rms" else self._centred(x)
        return x * self._inverse(xp, x)

    def by_hand(self, tape, place, x, data):
        normed = tape.pure(lambda x: self._normed(np, x), x) if self.norm != "none" else x
        bias = place / "b" if self.bias else None
        apply = lambda s, b, x: s * x + (0 if b is None else b)
        n = normed.value.size // int(np.prod(self.shape))
        return tape.site(apply, place / "s", bias, normed, n)

    def __str__(self):
        first = "scale first" if self.scale_first else "scale last"
        return f"scale {self.shape}, norm {self.norm}, {first}{', bias' * self.bias}"


@dataclasses.dataclass(frozen=True)
class Lookup(Layer):
    """`x + table[tokens]`, looked up in several ways."""

    words: int
    width: int
    way: str

    def init(self, rng):
        table = normal(rng, self.words, self.width)
        return {"table": table.T if self.way == "transposed" else table}

    def run(self, params, x, data):
        table, tokens = params["table"], data.tokens
        match self.way:
            case "index":
                return x + table[tokens]
            case "take":
                return x + jnp.take(table, tokens, axis=0)
            case "transposed":
                return x + table.T[tokens]
            case "slice":
                pick = lambda i: lax.dynamic_index_in_dim(table, i, keepdims=False)
                for _ in range(tokens.ndim):
                    pick = jax.vmap(pick)
                return x + pick(tokens)
        return x + jax.nn.one_hot(tokens, self.words, dtype=x.dtype) @ table

    def by_hand(self, tape, place, x, data):
        hot = tape.data(np.eye(self.words)[data.tokens])
        apply = lambda w, b, hot: hot @ (w.T if self.way == "transposed" else w)
        found = tape.site(apply, place / "table", None, hot, data.tokens.size)
        return tape.pure(np.add, x, found)

    def __str__(self):
        return f"lookup {self.words} -> {self.width} by {self.way}"


@dataclasses.dataclass(frozen=True)
class Added(Layer):
    """A parameter added to, or put beside, sin(x): an identity neuron."""

    way: str  # "position", "everywhere", "first" (in time), "beside" (in width)
    shape: tuple[int, ...]

    def init(self, rng):
        return {"p": normal(rng, *self.shape)}

    def run(self, params, x, data):
        return self._join(jnp, params["p"], jnp.sin(x))

    def _join(self, xp, p, x):
        p = raised(p, x.ndim)
        if self.way in {"position", "everywhere"}:
            return x + p
        axis = -2 if self.way == "first" else -1
        shape = list(x.shape)
        shape[axis] = p.shape[axis]
        return xp.concatenate([xp.broadcast_to(p, shape), x], axis=axis)

    def by_hand(self, tape, place, x, data):
        p = tape.value(place / "p")
        return tape.pure(lambda x: self._join(np, p, np.sin(x)), x)

    def __str__(self):
        return f"parameter {self.shape} joined to sin(x): {self.way}"
