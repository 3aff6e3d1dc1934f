"""Flax NNX modules, as `nnx.split` takes them apart."""

import jax
import jax.numpy as jnp
from flax import nnx

from ._by_hand import cross_entropy, same, standardize
from ._case import Case, Expected, case, fill, integers, normal, relaxed
from .linen_models import _attention, _conv, _dense, _norm, expect, expect_attention


def _split(make):
    """Graph definition, random parameters and other state of a module never initialised."""
    graph, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    return graph, fill(params), fill(rest, seed=1)


class _CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 3, (3, 3), param_dtype=float, rngs=rngs)
        self.norm = nnx.BatchNorm(3, param_dtype=float, rngs=rngs)
        self.dense = nnx.Linear(12 * 3, 3, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        x = jnp.sin(self.norm(self.conv(x)))
        return self.dense(x.reshape(x.shape[0], -1))


@case
def nnx_cnn() -> Case:
    """Conv, BatchNorm with its state, Linear."""
    graph, params, rest = relaxed(_split)(lambda: _CNN(nnx.Rngs(0)))

    @relaxed
    def loss_fn(params, rest, x, labels):
        model = nnx.merge(graph, params, rest, copy=True)
        logits = jax.nn.log_softmax(model(x))
        loss = -jnp.mean(jnp.take_along_axis(logits, labels[:, None], -1))
        return loss, nnx.state(model, nnx.BatchStat)

    def by_hand(tape, rest, x, labels):
        x = _conv(tape, x, "conv", [same(4, 3), same(3, 3)])
        x = jnp.sin(_norm(tape, standardize(x, (0, 1, 2)), "norm"))
        return cross_entropy(_dense(tape, x.reshape(3, -1), "dense"), labels)

    expected = (
        expect("conv", "conv", 18, 3, 36),
        expect("scale", "norm", 1, 3, 36),
        expect("dense", "dense", 36, 3, 3),
    )
    args = (rest, normal(2, 3, 4, 3, 2), integers(3, 3, 3))
    return Case(loss_fn, params, args, by_hand, expected, has_aux=True)


class _Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(6, 4, param_dtype=float, rngs=rngs)
        self.norm = nnx.LayerNorm(4, param_dtype=float, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 4, decode=False, param_dtype=float, rngs=rngs)
        self.head = nnx.Linear(4, 6, param_dtype=float, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + nnx.remat(lambda self, x: self.attention(self.norm(x)))(self, x)
        return self.head(x)


@case
def nnx_transformer() -> Case:
    """Embed, LayerNorm, attention under `nnx.remat` (its softmax is in float32), Linear."""
    graph, params, rest = relaxed(_split)(lambda: _Transformer(nnx.Rngs(0)))

    @relaxed
    def loss_fn(params, tokens):
        logits = nnx.merge(graph, params, rest)(tokens)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    def by_hand(tape, tokens):
        x = tape(lambda w: w[tokens], "embed.embedding")
        y = _norm(tape, standardize(x, eps=1e-6), "norm")
        x = x + _attention(tape, y, "attention", heads=2)
        return jnp.mean(jax.nn.logsumexp(_dense(tape, x, "head"), -1))

    expected = (
        Expected("embed.embedding", None, "lookup", 6, 4, 8),
        expect("scale", "norm", 1, 4, 8),
        *expect_attention("attention", 4, 8),
        expect("dense", "head", 4, 6, 8),
    )
    return Case(loss_fn, params, (integers(0, 6, 2, 4),), by_hand, expected, exact=1e-6)


class _Block(nnx.Module):
    def __init__(self, rngs):
        self.wide = nnx.Linear(4, 6, param_dtype=float, rngs=rngs)
        self.narrow = nnx.Linear(6, 4, param_dtype=float, rngs=rngs)

    def __call__(self, x):
        return x + self.narrow(jnp.sin(self.wide(x)))


class _Stack(nnx.Module):
    def __init__(self, rngs):
        keys = nnx.split_rngs(splits=3)
        self.blocks = keys(nnx.vmap(_Block))(rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return run(x, self.blocks)


@case
def nnx_scan() -> Case:
    """`nnx.scan` over a stack of blocks made by `nnx.vmap`."""
    graph, params, rest = relaxed(_split)(lambda: _Stack(nnx.Rngs(0)))

    @relaxed
    def loss_fn(params, x):
        return jnp.mean(jnp.sin(nnx.merge(graph, params, rest)(x)))

    def by_hand(tape, x):
        def layer(x, name, i):
            path = f"blocks.{name}"
            return tape(lambda w, b: x @ w[i] + b[i], f"{path}.kernel", f"{path}.bias")

        for i in range(3):
            x = x + layer(jnp.sin(layer(x, "wide", i)), "narrow", i)
        return jnp.mean(jnp.sin(x))

    expected = (
        expect("dense", "blocks.wide", 4, 6, 7),
        expect("dense", "blocks.narrow", 6, 4, 7),
    )
    return Case(loss_fn, params, (normal(0, 7, 4),), by_hand, expected)
