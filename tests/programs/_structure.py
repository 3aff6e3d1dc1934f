"""Layers around layers: calls, loops, branches, maps, one layer at several places."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._layer import Data, Layer, indent

CALLS: dict[str, Callable] = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "checkpoint, dots kept": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_saveable
    ),
}


@dataclasses.dataclass(frozen=True)
class Around(Layer):
    """What has one layer inside, with its parameters as they are."""

    inner: Layer

    def init(self, rng):
        return self.inner.init(rng)


@dataclasses.dataclass(frozen=True)
class Call(Around):
    how: str

    def run(self, params, x, data):
        return CALLS[self.how](self.inner.run)(params, x, data)

    def by_hand(self, tape, place, x, data):
        return self.inner.by_hand(tape, place, x, data)

    def __str__(self):
        return f"{self.how}:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Examples(Around):
    """One example at a time: by `vmap`, or by `lax.map`."""

    how: str  # "vmap" or "map"

    def run(self, params, x, data):
        if x.ndim == 2:
            return self.inner.run(params, x, data)

        def one(mapped):
            x, tokens, each = mapped
            return self.inner.run(params, x, data._replace(tokens=tokens, each=each))

        mapped = (x, data.tokens, data.each)
        return jax.vmap(one)(mapped) if self.how == "vmap" else lax.map(one, mapped)

    def by_hand(self, tape, place, x, data):
        with contextlib.nullcontext() if self.how == "vmap" else tape.loop():
            return self.inner.by_hand(tape, place, x, data)

    def __str__(self):
        return f"{self.how} over examples:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Times(Around):
    """One time at a time, by `vmap`: inside, time is 1."""

    def run(self, params, x, data):
        one = lambda x: self.inner.run(params, x[..., None, :], data)[..., 0, :]
        return jax.vmap(one, in_axes=x.ndim - 2, out_axes=x.ndim - 2)(x)

    def by_hand(self, tape, place, x, data):
        batch, time, width = x.value.shape
        flat = tape.pure(lambda x: x.reshape(batch * time, 1, width), x)
        each = np.repeat(data.each, time)
        y = self.inner.by_hand(tape, place, flat, data._replace(each=each))
        return tape.pure(lambda y: y.reshape(batch, time, -1), y)

    def __str__(self):
        return f"vmap over time:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Recurrent(Around):
    """`h = layer(h + x[t])` in a `lax.scan` over time; `gated` runs it only at some turns."""

    reverse: bool
    gated: bool

    def run(self, params, x, data):
        def step(h, each):
            x, turn = each
            layer = lambda h: self.inner.run(params, h[..., None, :], data)[..., 0, :]
            h = lax.cond(turn, layer, lambda h: h, h + x) if self.gated else layer(h + x)
            return h, h

        xs = jnp.moveaxis(x, -2, 0)
        turns = data.turns[: len(xs)]
        _, history = lax.scan(step, jnp.zeros_like(xs[0]), (xs, turns), reverse=self.reverse)
        return jnp.moveaxis(history, 0, -2)

    def by_hand(self, tape, place, x, data):
        time = x.value.shape[1]
        history, h = {}, tape.data(np.zeros_like(x.value[:, :1]))
        for t in sorted(range(time), reverse=self.reverse):
            h = tape.pure(lambda h, x, t=t: h + x[:, t : t + 1], h, x)
            if self.gated and not data.turns[t]:
                with tape.not_taken():
                    self.inner.by_hand(tape, place, h, data)
            else:
                with tape.loop():
                    h = self.inner.by_hand(tape, place, h, data)
            history[t] = h
        outputs = [history[t] for t in range(time)]
        return tape.pure(lambda *hs: np.concatenate(hs, axis=1), *outputs)

    def __str__(self):
        how = ", reverse" * self.reverse + ", at some turns only" * self.gated
        return f"h = layer(h + x[t]) in a scan over time{how}:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Stacked(Around):
    """Copies of a layer one after the other, with stacked weights: in a loop, or unrolled."""

    turns: int
    axis: int  # 0 or -1: along which the weights are stacked
    how: str  # "scan", "fori" or "unrolled"

    def init(self, rng):
        copies = [self.inner.init(rng) for _ in range(self.turns)]
        return jax.tree.map(lambda *leaves: np.stack(leaves, self.axis), *copies)

    def run(self, params, x, data):
        if self.how == "scan":
            stacked = jax.tree.map(lambda p: jnp.moveaxis(p, self.axis, 0), params)
            step = lambda x, own: (self.inner.run(own, x, data), None)
            return lax.scan(step, x, stacked)[0]
        pick = lambda i: jax.tree.map(lambda p: self._pick(p, i), params)
        step = lambda i, x: self.inner.run(pick(i), x, data)
        if self.how == "fori":
            return lax.fori_loop(0, self.turns, step, x)
        for i in range(self.turns):
            x = step(i, x)
        return x

    def _pick(self, p, i):
        if isinstance(i, int):
            return p[i] if self.axis == 0 else p[..., i]
        return lax.dynamic_index_in_dim(p, i, self.axis, keepdims=False)

    def by_hand(self, tape, place, x, data):
        for i in range(self.turns):
            with contextlib.nullcontext() if self.how == "unrolled" else tape.loop():
                x = self.inner.by_hand(tape, place.at(self.axis, i), x, data)
        return x

    def __str__(self):
        how = f"{self.turns} times, weights stacked along {self.axis}, {self.how}"
        return f"{how}:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Repeated(Around):
    """One layer at several places: "twice" in a row, in a "loop", or on "both" x and its mean."""

    how: str
    jit: bool

    def run(self, params, x, data):
        layer = lambda params, x: self.inner.run(params, x, data)
        layer = jax.jit(layer) if self.jit else layer
        match self.how:
            case "twice":
                return layer(params, layer(params, x))
            case "loop":
                return lax.fori_loop(0, 3, lambda _, x: layer(params, x), x)
        mean = jnp.broadcast_to(jnp.mean(x, axis=-1, keepdims=True), x.shape)
        return layer(params, x) + jnp.cos(layer(params, mean))

    def by_hand(self, tape, place, x, data):
        layer = lambda x: self.inner.by_hand(tape, place, x, data)
        if self.how != "both":
            for _ in range(2 if self.how == "twice" else 3):
                with contextlib.nullcontext() if self.how == "twice" else tape.loop():
                    x = layer(x)
            return x
        mean = lambda x: np.broadcast_to(x.mean(axis=-1, keepdims=True), x.shape)
        return tape.pure(lambda y, z: y + np.cos(z), layer(x), layer(tape.pure(mean, x)))

    def __str__(self):
        jit = ", each a call of one jit" * self.jit
        return f"the same layer, {self.how}{jit}:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Residual(Around):
    def run(self, params, x, data):
        return x + self.inner.run(params, x, data)

    def by_hand(self, tape, place, x, data):
        return tape.pure(np.add, x, self.inner.by_hand(tape, place, x, data))

    def __str__(self):
        return f"x plus:\n{indent(self.inner)}"


@dataclasses.dataclass(frozen=True)
class Branches(Layer):
    """`lax.cond` or `lax.switch` by one flag; or by one for each example, under `vmap`."""

    yes: Layer
    no: Layer
    how: str  # "cond", "switch" or "each"

    def init(self, rng):
        return {"yes": self.yes.init(rng), "no": self.no.init(rng)}

    def run(self, params, x, data: Data):
        def choose(flag, x, data):
            yes = lambda x: self.yes.run(params["yes"], x, data)
            no = lambda x: self.no.run(params["no"], x, data)
            if self.how == "switch":
                return lax.switch(flag.astype("int32"), [no, yes], x)
            return lax.cond(flag, yes, no, x)

        if self.how != "each":
            return choose(data.flag, x, data)
        if x.ndim == 2:
            return choose(data.each, x, data)
        one = lambda each, x, tokens: choose(each, x, data._replace(tokens=tokens, each=each))
        return jax.vmap(one)(data.each, x, data.tokens)

    def by_hand(self, tape, place, x, data):
        yes = lambda: self.yes.by_hand(tape, place / "yes", x, data)
        no = lambda: self.no.by_hand(tape, place / "no", x, data)
        if self.how == "each":
            # Both run, for all examples. JAX chooses a weight for each of them, from its value and
            # its value with the gradient stopped: that may, or may not, be seen through.
            with tape.open_to_claims():
                where = np.asarray(data.each)[:, None, None]
                return tape.pure(lambda y, z: np.where(where, y, z), yes(), no())
        taken, other = (yes, no) if data.flag else (no, yes)
        with tape.not_taken():
            other()
        return taken()

    def __str__(self):
        return f"{self.how}, if so:\n{indent(self.yes)}\nelse:\n{indent(self.no)}"
