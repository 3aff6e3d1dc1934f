"""Disjoint slices of one weight."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ._layer import Layer, normal, positions, raised


@dataclasses.dataclass(frozen=True)
class Sliced(Layer):
    """Disjoint slices of one weight, each a neuron of its own, fed by x, sin(x), or its mean.

    `axis` 0 cuts the inputs, 1 the outputs; `cut` is how: "slice", "split" or "strided".
    """

    width: int
    outputs: int
    axis: int
    cut: str
    fed: tuple[str, str]
    bias: bool

    def init(self, rng):
        shape = [self.width, self.outputs]
        shape[self.axis] *= 2
        params = {"w": normal(rng, *shape, inputs=self.width)}
        return params | ({"b": normal(rng, *self._bias_shape)} if self.bias else {})

    @property
    def _bias_shape(self) -> tuple[int, ...]:
        return (2 * self.outputs,) if self.axis else (self.outputs,)

    def _slices(self, array, axis):
        half = array.shape[axis] // 2
        if self.cut == "split":
            xp = np if isinstance(array, np.ndarray) else jnp
            return xp.split(array, 2, axis)
        ends = (slice(half), slice(half, None))
        every_other = (slice(0, None, 2), slice(1, None, 2))
        chosen = every_other if self.cut == "strided" else ends
        return [array[(slice(None),) * axis + (one,)] for one in chosen]

    def run(self, params, x, data):
        one, other = self._slices(params["w"], self.axis)
        y, z = self._feature(jnp, 0, x) @ one, self._feature(jnp, 1, x) @ other
        if self.bias:
            b = raised(params["b"], x.ndim)
            b, c = self._slices(b, x.ndim - 1) if self.axis else (b, None)
            y, z = y + b, z if c is None else z + c
        return jnp.sin(y) * jnp.cos(z)

    def _feature(self, xp, which, x):
        match self.fed[which]:
            case "sin":
                return xp.sin(x)
            case "mean":
                return xp.mean(x, axis=-2, keepdims=True)
        return x

    def by_hand(self, tape, place, x, data):
        def make(which):
            def apply(w, b, x):
                y = x @ self._slices(w, self.axis)[which]
                b = self._slices(b, 0)[which] if b is not None and self.axis else b
                return y if b is None else y + b

            fed = tape.pure(lambda x: self._feature(np, which, x), x)
            bias = place / "b" if self.bias and (self.axis or not which) else None
            return tape.site(apply, place / "w", bias, fed, positions(fed), part=which)

        return tape.pure(lambda y, z: np.sin(y) * np.cos(z), make(0), make(1))

    def __str__(self):
        bias = ", bias" if self.bias else ""
        fed = " and ".join(self.fed)
        axis = "outputs" if self.axis else "inputs"
        return f"dense {self.width} -> {self.outputs}, {axis} by {self.cut}, fed {fed}{bias}"


@dataclasses.dataclass(frozen=True)
class Attention(Layer):
    """One head; q, k and v are slices of one weight, or of the output of all of it."""

    width: int
    head: int
    sliced: str  # "weight" or "output"
    bias: bool

    def init(self, rng):
        params = {"w": normal(rng, self.width, 3 * self.head, inputs=self.width)}
        return params | ({"b": normal(rng, 3 * self.head)} if self.bias else {})

    def run(self, params, x, data):
        b = raised(params["b"], x.ndim) if self.bias else None
        if self.sliced == "weight":
            qkv = [x @ w for w in jnp.split(params["w"], 3, axis=1)]
            if b is not None:
                qkv = [y + c for y, c in zip(qkv, jnp.split(b, 3, axis=-1), strict=True)]
        else:
            y = x @ params["w"]
            qkv = jnp.split(y if b is None else y + b, 3, axis=-1)
        q, k, v = qkv
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    def by_hand(self, tape, place, x, data):
        def mix(q, k, v):
            scores = q @ k.swapaxes(-1, -2)
            weights = np.exp(scores - np.real(scores).max(axis=-1, keepdims=True))
            return weights / weights.sum(axis=-1, keepdims=True) @ v

        def make(which):
            def apply(w, b, x):
                y = x @ w + (0 if b is None else b)
                return y if which is None else np.split(y, 3, axis=-1)[which]

            bias = place / "b" if self.bias else None
            return tape.site(apply, place / "w", bias, x, positions(x), part=which)

        if self.sliced == "weight":
            return tape.pure(mix, *map(make, range(3)))
        return tape.pure(lambda y: mix(*np.split(y, 3, axis=-1)), make(None))

    def __str__(self):
        bias = ", bias" if self.bias else ""
        return f"attention {self.width} -> {self.head}, q k v sliced from the {self.sliced}{bias}"


@dataclasses.dataclass(frozen=True)
class Chosen(Layer):
    """`x @ w[i]`, with i from the data: a lookup of a whole matrix, or an expert each example."""

    width: int
    outputs: int
    each: bool

    def init(self, rng):
        return {"w": normal(rng, 2, self.width, self.outputs, inputs=self.width)}

    def run(self, params, x, data):
        index = (data.each if self.each else data.flag).astype(jnp.int32)
        return x @ params["w"][index]

    def by_hand(self, tape, place, x, data):
        def lookup(w, b, hot):
            return np.tensordot(hot, w, 1)

        def expert(w, b, features):
            return np.einsum("be,btd,edo->bto", hot, features, w)

        index = np.asarray(data.each if self.each else data.flag).astype(int)
        hot = np.eye(2)[index]
        # Matrices that are taken once and used twice, also by a derivative, are a lookup's outputs.
        if self.each and not tape.derivatives:
            return tape.site(expert, place / "w", None, x, x.value[..., 0].size)
        found = tape.site(lookup, place / "w", None, tape.data(hot), index.size)
        return tape.pure(lambda x, found: x @ found, x, found)

    def __str__(self):
        return f"dense {self.width} -> {self.outputs}, chosen for {'each' if self.each else 'all'}"
