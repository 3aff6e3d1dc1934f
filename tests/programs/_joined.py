"""One weight at two sites, two weights at one; and a weight that is not used linearly."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from ._layer import Layer, normal, positions, raised


@dataclasses.dataclass(frozen=True)
class Tied(Layer):
    """`tanh(x @ w + b) @ w.T + c`: two orientations of one weight.

    A neuron has one bias, the first; the other is added as any parameter is.
    """

    width: int
    hidden: int
    biases: str  # some of "b", "c"

    def init(self, rng):
        params = {"w": normal(rng, self.width, self.hidden, inputs=self.width)}
        sizes = {"b": self.hidden, "c": self.width}
        return params | {name: normal(rng, sizes[name]) for name in self.biases}

    def run(self, params, x, data):
        def biased(name, y):
            return y + raised(params[name], y.ndim) if name in params else y

        hidden = jnp.tanh(biased("b", x @ params["w"]))
        return biased("c", hidden @ params["w"].T)

    def by_hand(self, tape, place, x, data):
        def there(w, b, x):
            return x @ w + (0 if b is None else b)

        def back(w, b, x):
            return there(w.T, b, x)

        w, n = place / "w", positions(x)
        first, second = (place / name if name in self.biases else None for name in "bc")
        hidden = tape.pure(np.tanh, tape.site(there, w, first, x, n))
        if first is None:
            return tape.site(back, w, second, hidden, n)
        y = tape.site(back, w, None, hidden, n)
        c = 0.0 if second is None else tape.value(second)
        return tape.pure(lambda y: y + c, y)

    def __str__(self):
        b, c = (f" + {name}" if name in self.biases else "" for name in "bc")
        return f"tied {self.width} -> {self.hidden} -> {self.width}: tanh(x @ w{b}) @ w.T{c}"


@dataclasses.dataclass(frozen=True)
class TiedLookup(Layer):
    """`tanh(x + table[tokens]) @ table.T`: a lookup, and the same table as a weight."""

    words: int
    width: int

    def init(self, rng):
        return {"table": normal(rng, self.words, self.width)}

    def run(self, params, x, data):
        return jnp.tanh(x + params["table"][data.tokens]) @ params["table"].T

    def by_hand(self, tape, place, x, data):
        def lookup(w, b, hot):
            return hot @ w

        def back(w, b, x):
            return x @ w.T

        hot = tape.data(np.eye(self.words)[data.tokens])
        found = tape.site(lookup, place / "table", None, hot, data.tokens.size)
        hidden = tape.pure(lambda x, found: np.tanh(x + found), x, found)
        return tape.site(back, place / "table", None, hidden, positions(x))

    def __str__(self):
        return f"tied lookup {self.words} of {self.width}: tanh(x + table[tokens]) @ table.T"


@dataclasses.dataclass(frozen=True)
class TwoSites(Layer):
    """What is added to the sum of two sites, or to both, is the bias of neither."""

    width: int
    outputs: int
    bias: str | None  # "sum" or "both"

    def init(self, rng):
        params = {name: normal(rng, self.width, self.outputs, inputs=self.width) for name in "uv"}
        return params | ({"b": normal(rng, self.outputs)} if self.bias else {})

    def run(self, params, x, data):
        b = raised(params["b"], x.ndim) if self.bias else 0.0
        return self._join(jnp, x @ params["u"], jnp.sin(x) @ params["v"], b)

    def _join(self, xp, y, z, b):
        if self.bias == "both":
            return xp.sin(y + b) * xp.cos(z + b)
        return y + z + b if self.bias else y + z

    def by_hand(self, tape, place, x, data):
        def apply(w, b, x):
            return x @ w

        y = tape.site(apply, place / "u", None, x, positions(x))
        z = tape.site(apply, place / "v", None, tape.pure(np.sin, x), positions(x))
        b = tape.value(place / "b") if self.bias else 0.0
        return tape.pure(lambda y, z: self._join(np, y, z, b), y, z)

    def __str__(self):
        bias = f", b added to {self.bias}" if self.bias else ""
        return f"two sites {self.width} -> {self.outputs}: x @ u, sin(x) @ v{bias}"


@dataclasses.dataclass(frozen=True)
class TwoWeights(Layer):
    """A weight made of two parameters: their sum, or one beside the other.

    The design leaves open whether such parameters are claimed.
    """

    width: int
    outputs: int
    joined: str  # "added" or "concatenated"

    def init(self, rng):
        return {name: normal(rng, self.width, self.outputs, inputs=self.width) for name in "uv"}

    def run(self, params, x, data):
        if self.joined == "added":
            return x @ (params["u"] + params["v"])
        return x @ jnp.concatenate([params["u"], params["v"]], axis=1)

    def by_hand(self, tape, place, x, data):
        def apply(w, b, x):
            return x @ w

        with tape.open_to_claims():
            y, z = (tape.site(apply, place / name, None, x, positions(x)) for name in "uv")
        if self.joined == "added":
            return tape.pure(np.add, y, z)
        return tape.pure(lambda y, z: np.concatenate([y, z], axis=-1), y, z)

    def __str__(self):
        return f"two weights {self.joined}, {self.width} -> {self.outputs}"


@dataclasses.dataclass(frozen=True)
class WeightNorm(Layer):
    """A weight divided by its norm: nothing linear, so nothing is claimed."""

    width: int
    outputs: int

    def init(self, rng):
        return {"w": normal(rng, self.width, self.outputs)}

    def run(self, params, x, data):
        w = params["w"]
        return x @ (w / jnp.sqrt(jnp.sum(w * w, axis=0, keepdims=True)))

    def by_hand(self, tape, place, x, data):
        w = tape.value(place / "w")
        return tape.pure(lambda x: x @ (w / np.sqrt(np.sum(w * w, axis=0))), x)

    def __str__(self):
        return f"weight norm {self.width} -> {self.outputs}"
