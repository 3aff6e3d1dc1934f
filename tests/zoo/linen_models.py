"""Flax Linen modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from ._by_hand import attend, convolve, cross_entropy, same, standardize
from ._case import Case, Expected, case, fill, integers, normal, relaxed


def _dense(tape, x: Array, path: str) -> Array:
    return tape(lambda w, b: x @ w + b, f"{path}.kernel", f"{path}.bias")


def _norm(tape, x: Array, path: str) -> Array:
    return tape(lambda w, b: x * w + b, f"{path}.scale", f"{path}.bias")


def _conv(tape, x: Array, path: str, padding, **options) -> Array:
    """Convolution of [batch, *space, channels] by a kernel [*taps, channels, outputs]."""
    x = jnp.moveaxis(x, -1, 1)

    def site(w, b):
        w = jnp.moveaxis(w, (-1, -2), (0, 1))
        return jnp.moveaxis(convolve(x, w, padding, **options), 1, -1) + b

    return tape(site, f"{path}.kernel", f"{path}.bias")


def _attention(tape, x: Array, path: str, heads: int) -> Array:
    def project(name):
        return tape(
            lambda w, b: jnp.tensordot(x, w, 1) + b, f"{path}.{name}.kernel", f"{path}.{name}.bias"
        )

    mixed = attend(*(project(name) for name in ("query", "key", "value")))
    return tape(
        lambda w, b: jnp.tensordot(mixed, w, 2) + b, f"{path}.out.kernel", f"{path}.out.bias"
    )


def expect(kind: str, path: str, d_in: int, d_out: int, n: int) -> Expected:
    weight = "scale" if kind == "scale" else "kernel"
    return Expected(f"{path}.{weight}", f"{path}.bias", kind, d_in, d_out, n)


def expect_attention(path: str, width: int, n: int) -> list[Expected]:
    names = ("query", "key", "value", "out")
    return [expect("dense", f"{path}.{name}", width, width, n) for name in names]


def _initialise(module: nn.Module, *args):
    return fill(jax.eval_shape(module.init, jax.eval_shape(lambda: jax.random.key(0)), *args))


class _CNN(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), strides=(2, 1))(x)
        x = jnp.sin(nn.BatchNorm(use_running_average=not self.train)(x))
        x = nn.Conv(2, (2,) * 2, padding="VALID", kernel_dilation=(1, 2))(x)
        return nn.Dense(3)(jnp.sin(x).reshape(x.shape[0], -1))


def _cnn(train: bool) -> Case:
    module = _CNN(train)
    x, labels = normal(0, 3, 4, 4, 2), integers(1, 3, 3)
    params = relaxed(_initialise)(module, x)["params"]
    stats = {"BatchNorm_0": {"mean": normal(2, 3), "var": 1 + normal(3, 3) ** 2}}

    @relaxed
    def loss_fn(params, stats, x, labels):
        variables = {"params": params, "batch_stats": stats}
        logits, updates = module.apply(variables, x, mutable=["batch_stats"])
        loss = -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))
        return loss, updates["batch_stats"]

    def by_hand(tape, stats, x, labels):
        x = _conv(tape, x, "Conv_0", [same(4, 3, 2), same(4, 3)], stride=(2, 1))
        if train:
            x = standardize(x, (0, 1, 2))
        else:
            running = stats["BatchNorm_0"]
            x = (x - running["mean"]) / jnp.sqrt(running["var"] + 1e-5)
        x = jnp.sin(_norm(tape, x, "BatchNorm_0"))
        x = jnp.sin(_conv(tape, x, "Conv_1", [(0, 0), (0, 0)], dilation=(1, 2)))
        return cross_entropy(_dense(tape, x.reshape(3, -1), "Dense_0"), labels)

    expected = (
        expect("conv", "Conv_0", 18, 3, 3 * 8),
        expect("scale", "BatchNorm_0", 1, 3, 3 * 8),
        expect("conv", "Conv_1", 12, 2, 3 * 2),
        expect("dense", "Dense_0", 4, 3, 3),
    )
    return Case(loss_fn, params, (stats, x, labels), by_hand, expected, has_aux=True)


@case
def linen_cnn() -> Case:
    """Conv and BatchNorm with the batch's own statistics, its state returned as aux."""
    return _cnn(train=True)


@case
def linen_cnn_running_average() -> Case:
    """BatchNorm with running statistics."""
    return _cnn(train=False)


class _Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(6, 4)(tokens)
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        return nn.Dense(6)(x)


@case
def linen_transformer() -> Case:
    """Embed, LayerNorm, attention whose kernels have three axes, Dense."""
    module, tokens = _Transformer(), integers(0, 6, 2, 4)
    params = relaxed(_initialise)(module, tokens)["params"]

    @relaxed
    def loss_fn(params, tokens):
        logits = jnp.asarray(module.apply({"params": params}, tokens))
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    def by_hand(tape, tokens):
        x = tape(lambda w: w[tokens], "Embed_0.embedding")
        y = _norm(tape, standardize(x, eps=1e-6), "LayerNorm_0")
        x = x + _attention(tape, y, "MultiHeadDotProductAttention_0", heads=2)
        return jnp.mean(jax.nn.logsumexp(_dense(tape, x, "Dense_0"), -1))

    expected = (
        Expected("Embed_0.embedding", None, "lookup", 6, 4, 8),
        expect("scale", "LayerNorm_0", 1, 4, 8),
        *expect_attention("MultiHeadDotProductAttention_0", 4, 8),
        expect("dense", "Dense_0", 4, 6, 8),
    )
    return Case(loss_fn, params, (tokens,), by_hand, expected)


class _Residual(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.relu(nn.Dense(6, name="wide")(nn.LayerNorm(name="norm")(x)))
        return x + nn.Dense(4, name="narrow")(y), None


class _Stack(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(_Residual, prevent_cse=False) if self.remat else _Residual
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = scan(name="blocks")(x, None)
        return nn.remat(nn.Dense)(2, name="head")(x)


def _stack(remat: bool) -> Case:
    module, x = _Stack(remat), normal(0, 7, 4)
    params = relaxed(_initialise)(module, x)["params"]

    @relaxed
    def loss_fn(params, x):
        return jnp.mean(jnp.sin(jnp.asarray(module.apply({"params": params}, x))))

    def by_hand(tape, x):
        def layer(x, path, i, weight="kernel"):
            apply = (lambda w, b: x @ w[i] + b[i]) if weight == "kernel" else None
            apply = apply or (lambda w, b: x * w[i] + b[i])
            return tape(apply, f"blocks.{path}.{weight}", f"blocks.{path}.bias")

        for i in range(3):
            y = layer(standardize(x, eps=1e-6), "norm", i, "scale")
            x = x + layer(jax.nn.relu(layer(y, "wide", i)), "narrow", i)
        return jnp.mean(jnp.sin(_dense(tape, x, "head")))

    expected = (
        expect("scale", "blocks.norm", 1, 4, 7),
        expect("dense", "blocks.wide", 4, 6, 7),
        expect("dense", "blocks.narrow", 6, 4, 7),
        expect("dense", "head", 4, 2, 7),
    )
    return Case(loss_fn, params, (x,), by_hand, expected)


@case
def linen_scan() -> Case:
    """`nn.scan` over a stack of blocks; a layer of its own under `nn.remat`."""
    return _stack(remat=False)


@case
def linen_scan_remat() -> Case:
    """`nn.scan` over blocks that `nn.remat` recomputes."""
    return _stack(remat=True)
