"""Equinox modules."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from ._by_hand import attend, convolve, cross_entropy, mse, same, standardize
from ._case import Case, Expected, build, case, identity, integers, normal, relaxed


def _linear(tape, x: Array, path: str, bias: bool = True) -> Array:
    paths = (f"{path}.weight", f"{path}.bias") if bias else (f"{path}.weight",)
    return tape(lambda w, b=0.0: x @ w.T + b, *paths)


def _scale(tape, x: Array, path: str) -> Array:
    return tape(lambda w, b: x * w + b, f"{path}.weight", f"{path}.bias")


def _dense(path: str, d_in: int, d_out: int, n: int, bias: bool = True, sites: int = 1) -> Expected:
    return Expected(
        f"{path}.weight", f"{path}.bias" if bias else None, "dense", d_in, d_out, n, sites
    )


def _norm(path: str, channels: int, n: int) -> Expected:
    return Expected(f"{path}.weight", f"{path}.bias", "scale", 1, channels, n)


@case
def equinox_mlp() -> Case:
    model = build(lambda key: eqx.nn.MLP(3, 2, 4, depth=2, key=key))

    def loss_fn(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    def by_hand(tape, x, y):
        for i in range(2):
            x = jax.nn.relu(_linear(tape, x, f"layers.{i}"))
        return mse(_linear(tape, x, "layers.2"), y)

    expected = (
        _dense("layers.0", 3, 4, 7),
        _dense("layers.1", 4, 4, 7),
        _dense("layers.2", 4, 2, 7),
    )
    return Case(loss_fn, model, (normal(0, 7, 3), normal(1, 7, 2)), by_hand, expected)


def _convolution(make, size: tuple[int, ...], outputs: tuple[int, ...], taps: int, **options):
    """A case of one convolution of a batch of three; `options` are those of `convolve`."""
    conv = build(lambda key: make(key=key))
    channels, groups = conv.in_channels, conv.groups

    def loss_fn(conv, x):
        return jnp.mean(jnp.sin(jax.vmap(conv)(x)))

    def by_hand(tape, x):
        paths = ("weight", "bias") if conv.use_bias else ("weight",)
        y = tape(lambda w, b=0.0: convolve(x, w, groups=groups, **options) + b, *paths)
        assert y.shape[2:] == outputs, y.shape
        return jnp.mean(jnp.sin(y))

    n = 3
    for length in outputs:
        n *= length
    bias = "bias" if conv.use_bias else None
    expected = (Expected("weight", bias, "conv", taps * channels // groups, conv.out_channels, n),)
    return Case(loss_fn, conv, (normal(1, 3, channels, *size),), by_hand, expected)


@case
def conv1d_stride_valid() -> Case:
    def make(key):
        return eqx.nn.Conv1d(2, 3, 3, stride=2, key=key)

    return _convolution(make, (8,), (3,), taps=3, padding=[(0, 0)], stride=(2,))


@case
def conv1d_dilation_same() -> Case:
    def make(key):
        return eqx.nn.Conv1d(2, 3, 3, dilation=2, padding="SAME", use_bias=False, key=key)

    return _convolution(make, (6,), (6,), taps=3, padding=[same(6, 3, 1, 2)], dilation=(2,))


@case
def conv2d_same_stride() -> Case:
    def make(key):
        return eqx.nn.Conv2d(2, 3, 3, stride=(2, 1), padding="SAME", key=key)

    padding = [same(5, 3, 2), same(4, 3)]
    return _convolution(make, (5, 4), (3, 4), taps=9, padding=padding, stride=(2, 1))


@case
def conv2d_explicit_dilation() -> Case:
    def make(key):
        padding = ((1, 2), (0, 1))
        return eqx.nn.Conv2d(2, 3, (2, 3), padding=padding, dilation=(1, 2), key=key)

    padding = [(1, 2), (0, 1)]
    return _convolution(make, (4, 5), (6, 2), taps=6, padding=padding, dilation=(1, 2))


@case
def conv2d_groups() -> Case:
    def make(key):
        return eqx.nn.Conv2d(4, 6, 2, groups=2, use_bias=False, key=key)

    return _convolution(make, (4, 3), (3, 2), taps=4, padding=[(0, 0), (0, 0)])


@case
def conv2d_groups_bias_stride() -> Case:
    def make(key):
        return eqx.nn.Conv2d(4, 2, 3, groups=2, stride=2, padding=1, key=key)

    padding = [(1, 1), (1, 1)]
    return _convolution(make, (5, 4), (3, 2), taps=9, padding=padding, stride=(2, 2))


@case
def conv2d_depthwise() -> Case:
    def make(key):
        return eqx.nn.Conv2d(3, 3, 3, groups=3, padding="SAME", key=key)

    return _convolution(make, (4, 3), (4, 3), taps=9, padding=[same(4, 3), same(3, 3)])


@case
def conv2d_pointwise() -> Case:
    def make(key):
        return eqx.nn.Conv2d(3, 4, 1, key=key)

    return _convolution(make, (3, 2), (3, 2), taps=1, padding=[(0, 0), (0, 0)])


@case
def conv3d_same_stride() -> Case:
    def make(key):
        return eqx.nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding="SAME", key=key)

    padding = [same(3, 2), same(4, 2, 2), same(2, 2)]
    return _convolution(make, (3, 4, 2), (3, 2, 2), taps=8, padding=padding, stride=(1, 2, 1))


@case
def conv_transpose1d() -> Case:
    def make(key):
        return eqx.nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1, key=key)

    return _convolution(make, (4,), (8,), taps=3, padding=[(1, 2)], spread=(2,))


@case
def conv_transpose2d() -> Case:
    def make(key):
        return eqx.nn.ConvTranspose2d(2, 3, 2, stride=2, key=key)

    return _convolution(make, (3, 2), (6, 4), taps=4, padding=[(1, 1), (1, 1)], spread=(2, 2))


@case
def conv_transpose2d_groups_dilation() -> Case:
    def make(key):
        return eqx.nn.ConvTranspose2d(
            4, 2, (3, 2), stride=(2, 1), dilation=(1, 2), groups=2, use_bias=False, key=key
        )

    padding = [(2, 2), (2, 2)]
    options = {"padding": padding, "spread": (2, 1), "dilation": (1, 2)}
    return _convolution(make, (3, 3), (7, 5), taps=6, **options)


@case
def conv2d_circular() -> Case:
    """Padding by other means than zeros happens before the convolution."""
    conv = build(lambda key: eqx.nn.Conv2d(2, 3, 3, padding=1, padding_mode="CIRCULAR", key=key))

    def loss_fn(conv, x):
        return jnp.mean(jnp.sin(jax.vmap(conv)(x)))

    def by_hand(tape, x):
        padded = jnp.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="wrap")
        none = [(0, 0), (0, 0)]
        return jnp.mean(jnp.sin(tape(lambda w, b: convolve(padded, w, none) + b, "weight", "bias")))

    expected = (Expected("weight", "bias", "conv", 18, 3, 3 * 12),)
    return Case(loss_fn, conv, (normal(0, 3, 2, 4, 3),), by_hand, expected)


@case
def conv2d_two_sizes() -> Case:
    """One filter over images of two sizes: sites add, each with its own output pixels."""
    conv = build(lambda key: eqx.nn.Conv2d(2, 3, 3, padding=1, stride=2, key=key))

    def loss_fn(conv, x, y):
        return jnp.mean(jnp.sin(jax.vmap(conv)(x))) + jnp.mean(jnp.cos(jax.vmap(conv)(y)))

    def by_hand(tape, x, y):
        def apply(x):
            padding = [(1, 1), (1, 1)]
            paths = ("weight", "bias")
            return tape(lambda w, b: convolve(x, w, padding, stride=(2, 2)) + b, *paths)

        return jnp.mean(jnp.sin(apply(x))) + jnp.mean(jnp.cos(apply(y)))

    expected = (Expected("weight", "bias", "conv", 18, 3, 3 * 4 + 2 * 9, sites=2),)
    args = (normal(0, 3, 2, 4, 4), normal(1, 2, 2, 5, 5))
    return Case(loss_fn, conv, args, by_hand, expected)


@case
def conv1d_ensemble() -> Case:
    """Two convolutions at once: `vmap` makes them groups of one, n is counted once."""

    def make(key):
        return eqx.filter_vmap(lambda key: eqx.nn.Conv1d(2, 3, 3, key=key))(jnp.stack([key, key]))

    convs = build(make)

    def loss_fn(convs, x):
        each = eqx.filter_vmap(lambda conv, x: jax.vmap(conv)(x))
        return jnp.mean(jnp.sin(each(convs, x)))

    def by_hand(tape, x):
        def apply(w, b):
            return jnp.stack([convolve(x[i], w[i], [(0, 0)]) + b[i] for i in range(2)])

        return jnp.mean(jnp.sin(tape(apply, "weight", "bias")))

    expected = (Expected("weight", "bias", "conv", 6, None, 3 * 4),)
    return Case(loss_fn, convs, (normal(0, 2, 3, 2, 6),), by_hand, expected)


def _attention(tape, x: Array, path: str, heads: int, bias: bool) -> Array:
    """Self-attention of `eqx.nn.MultiheadAttention` over [batch, tokens, width]."""
    projected = []
    for name in ("query_proj", "key_proj", "value_proj"):
        y = _linear(tape, x, f"{path}{name}", bias)
        projected.append(y.reshape(*y.shape[:-1], heads, -1))
    mixed = attend(*projected)
    mixed = mixed.reshape(*mixed.shape[:-2], -1)
    return _linear(tape, mixed, f"{path}output_proj", bias)


_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "output_proj")


@case
def equinox_attention() -> Case:
    def make(key):
        return eqx.nn.MultiheadAttention(
            2,
            4,
            use_query_bias=True,
            use_key_bias=True,
            use_value_bias=True,
            use_output_bias=True,
            key=key,
        )

    model = build(make)

    def loss_fn(model, x):
        return jnp.mean(jnp.sin(jax.vmap(model)(x, x, x)))

    def by_hand(tape, x):
        return jnp.mean(jnp.sin(_attention(tape, x, "", heads=2, bias=True)))

    expected = tuple(_dense(name, 4, 4, 10) for name in _PROJECTIONS)
    return Case(loss_fn, model, (normal(0, 2, 5, 4),), by_hand, expected)


@case
def equinox_cross_attention() -> Case:
    """Queries and keys of different lengths and widths: each projection has its own n."""

    def make(key):
        return eqx.nn.MultiheadAttention(2, 4, key_size=3, value_size=5, key=key)

    model = build(make)

    def loss_fn(model, x, keys, values):
        return jnp.mean(jnp.sin(jax.vmap(model)(x, keys, values)))

    def by_hand(tape, x, keys, values):
        q = _linear(tape, x, "query_proj", False).reshape(2, 5, 2, 2)
        k = _linear(tape, keys, "key_proj", False).reshape(2, 3, 2, 2)
        v = _linear(tape, values, "value_proj", False).reshape(2, 3, 2, 2)
        mixed = attend(q, k, v).reshape(2, 5, 4)
        return jnp.mean(jnp.sin(_linear(tape, mixed, "output_proj", False)))

    expected = (
        _dense("query_proj", 4, 4, 10, bias=False),
        _dense("key_proj", 3, 4, 6, bias=False),
        _dense("value_proj", 5, 4, 6, bias=False),
        _dense("output_proj", 4, 4, 10, bias=False),
    )
    args = (normal(0, 2, 5, 4), normal(1, 2, 3, 3), normal(2, 2, 3, 5))
    return Case(loss_fn, model, args, by_hand, expected)


@case
def equinox_embedding() -> Case:
    def make(key):
        return eqx.nn.Embedding(6, 3, key=key), eqx.nn.Linear(3, 2, key=key)

    model = build(make)

    def loss_fn(model, tokens):
        embedding, linear = model
        return jnp.mean(jnp.sin(jax.vmap(jax.vmap(lambda i: linear(embedding(i))))(tokens)))

    def by_hand(tape, tokens):
        x = tape(lambda w: w[tokens], "0.weight")
        return jnp.mean(jnp.sin(_linear(tape, x, "1")))

    expected = (Expected("0.weight", None, "lookup", 6, 3, 8), _dense("1", 3, 2, 8))
    return Case(loss_fn, model, (integers(0, 6, 2, 4),), by_hand, expected)


@case
def equinox_norms() -> Case:
    def make(key):
        return {
            "layer": eqx.nn.LayerNorm(4),
            "group": eqx.nn.GroupNorm(2, 4),
            "rms": eqx.nn.RMSNorm(4),
            "rms_bare": eqx.nn.RMSNorm(4, use_bias=False),
            "space": eqx.nn.LayerNorm((4, 5)),
        }

    model = build(make)

    def loss_fn(model, x):
        x = jax.vmap(model["group"])(x)
        x = jnp.sin(jax.vmap(model["space"])(x))
        x = x.swapaxes(1, 2)
        for name in ("layer", "rms", "rms_bare"):
            x = jnp.sin(jax.vmap(jax.vmap(model[name]))(x))
        return jnp.mean(x)

    def rms(x):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)

    def by_hand(tape, x):
        grouped = standardize(x.reshape(3, 2, 2, 5), (2, 3)).reshape(3, 4, 5)
        x = tape(lambda w, b: grouped * w[:, None] + b[:, None], "group.weight", "group.bias")
        x = jnp.sin(_scale(tape, standardize(x, (1, 2)), "space"))
        x = jnp.sin(_scale(tape, standardize(x.swapaxes(1, 2)), "layer"))
        x = jnp.sin(_scale(tape, rms(x), "rms"))
        return jnp.mean(jnp.sin(tape(lambda w: rms(x) * w, "rms_bare.weight")))

    expected = (
        _norm("group", 4, 15),
        _norm("space", 20, 3),
        _norm("layer", 4, 15),
        _norm("rms", 4, 15),
        Expected("rms_bare.weight", None, "scale", 1, 4, 15),
    )
    return Case(loss_fn, model, (normal(0, 3, 4, 5),), by_hand, expected)


@case
def equinox_gru() -> Case:
    cell = build(lambda key: eqx.nn.GRUCell(3, 4, key=key))

    def loss_fn(cell, x):
        def run(x):
            step = lambda h, x: (cell(x, h), None)
            return jax.lax.scan(step, jnp.zeros(4), x)[0]

        return jnp.mean(jnp.sin(jax.vmap(run)(x)))

    def by_hand(tape, x):
        h = jnp.zeros((2, 4))
        for t in range(5):
            inputs, hidden = x[:, t], h
            i = tape(lambda w, b: inputs @ w.T + b, "weight_ih", "bias")
            g = tape(lambda w: hidden @ w.T, "weight_hh")
            reset = jax.nn.sigmoid(i[:, :4] + g[:, :4])
            update = jax.nn.sigmoid(i[:, 4:8] + g[:, 4:8])
            new = jnp.tanh(i[:, 8:] + reset * (g[:, 8:] + tape["bias_n"]))
            h = new + update * (h - new)
        return jnp.mean(jnp.sin(h))

    expected = (
        Expected("weight_ih", "bias", "dense", 3, 12, 10),
        Expected("weight_hh", None, "dense", 4, 12, 10),
        identity("bias_n"),
    )
    return Case(loss_fn, cell, (normal(0, 2, 5, 3),), by_hand, expected)


@case
def equinox_lstm() -> Case:
    """The bias is added to the sum of two neurons: an identity neuron of its own."""
    cell = build(lambda key: eqx.nn.LSTMCell(3, 2, key=key))

    def loss_fn(cell, x):
        def run(x):
            step = lambda state, x: (cell(x, state), state[0])
            (h, _), history = jax.lax.scan(step, (jnp.zeros(2), jnp.zeros(2)), x)
            return h, history

        h, history = jax.vmap(run)(x)
        return jnp.mean(jnp.sin(h)), history

    def by_hand(tape, x):
        h, c = jnp.zeros((2, 2)), jnp.zeros((2, 2))
        for t in range(5):
            inputs, hidden = x[:, t], h
            gates = tape(lambda w: inputs @ w.T, "weight_ih") + tape(
                lambda w: hidden @ w.T, "weight_hh"
            )
            i, f, g, o = jnp.split(gates + tape["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return jnp.mean(jnp.sin(h))

    expected = (
        Expected("weight_ih", None, "dense", 3, 8, 10),
        Expected("weight_hh", None, "dense", 2, 8, 10),
        identity("bias"),
    )
    return Case(loss_fn, cell, (normal(0, 2, 5, 3),), by_hand, expected, has_aux=True)


@case
def equinox_shared_layer() -> Case:
    """`eqx.nn.Shared` ties a whole layer: one neuron with two sites."""

    def make(key):
        pair = (eqx.nn.Linear(4, 4, key=key), eqx.nn.Linear(4, 4, key=key))
        return eqx.nn.Shared(
            pair,
            where=lambda pair: (pair[1].weight, pair[1].bias),
            get=lambda pair: (pair[0].weight, pair[0].bias),
        )

    model = build(make)

    def loss_fn(model, x):
        first, second = model()
        return jnp.mean(jnp.sin(jax.vmap(lambda x: second(jnp.tanh(first(x))))(x)))

    def by_hand(tape, x):
        x = jnp.tanh(_linear(tape, x, "pytree.0"))
        return jnp.mean(jnp.sin(_linear(tape, x, "pytree.0")))

    expected = (_dense("pytree.0", 4, 4, 14, sites=2),)
    return Case(loss_fn, model, (normal(0, 7, 4),), by_hand, expected)


@case
def equinox_shared_embedding() -> Case:
    """`eqx.nn.Shared` ties input and output embedding: one neuron in two orientations."""

    def make(key):
        pair = (eqx.nn.Embedding(6, 4, key=key), eqx.nn.Linear(4, 6, key=key))
        return eqx.nn.Shared(
            pair, where=lambda pair: pair[1].weight, get=lambda pair: pair[0].weight
        )

    model = build(make)

    def loss_fn(model, tokens):
        embedding, linear = model()
        logits = jax.vmap(jax.vmap(lambda i: linear(jnp.tanh(embedding(i)))))(tokens)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    def by_hand(tape, tokens):
        x = jnp.tanh(tape(lambda w: w[tokens], "pytree.0.weight"))
        logits = tape(lambda w, b: x @ w.T + b, "pytree.0.weight", "pytree.1.bias")
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    expected = (Expected("pytree.0.weight", "pytree.1.bias", None, None, None, 16, sites=2),)
    return Case(loss_fn, model, (integers(0, 6, 2, 4),), by_hand, expected)


class _Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        self.norm1 = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(2, width, key=key)
        self.norm2 = eqx.nn.LayerNorm(width)
        self.mlp = eqx.nn.MLP(width, width, 6, depth=1, activation=jax.nn.gelu, key=key)

    def __call__(self, x):
        y = jax.vmap(self.norm1)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda x: self.mlp(self.norm2(x)))(x)


class _ViT(eqx.Module):
    patches: eqx.nn.Conv2d
    token: Array
    position: Array
    blocks: list[_Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        self.patches = eqx.nn.Conv2d(1, 4, 2, stride=2, key=key)
        self.token = jnp.zeros((1, 4))
        self.position = jnp.zeros((5, 4))
        self.blocks = [_Block(4, key) for _ in range(2)]
        self.norm = eqx.nn.LayerNorm(4)
        self.head = eqx.nn.Linear(4, 3, key=key)

    def __call__(self, image):
        x = self.patches(image).reshape(4, -1).T
        x = jnp.concatenate([self.token, x]) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0]))


@case
def equinox_vit() -> Case:
    model = build(_ViT)

    def loss_fn(model, images, labels):
        logits = jax.nn.log_softmax(jax.vmap(model)(images))
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=-1))

    def by_hand(tape, images, labels):
        patches = images.reshape(3, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(3, 4, 4)
        x = tape(
            lambda w, b: patches @ w.reshape(4, 4).T + b.ravel(), "patches.weight", "patches.bias"
        )
        x = jnp.concatenate([jnp.broadcast_to(tape["token"], (3, 1, 4)), x], 1) + tape["position"]
        for i in range(2):
            path = f"blocks.{i}"
            y = _scale(tape, standardize(x), f"{path}.norm1")
            x = x + _attention(tape, y, f"{path}.attention.", heads=2, bias=False)
            y = _scale(tape, standardize(x), f"{path}.norm2")
            y = jax.nn.gelu(_linear(tape, y, f"{path}.mlp.layers.0"))
            x = x + _linear(tape, y, f"{path}.mlp.layers.1")
        x = _scale(tape, standardize(x[:, 0]), "norm")
        return cross_entropy(_linear(tape, x, "head"), labels)

    expected = [Expected("patches.weight", "patches.bias", "conv", 4, 4, 12)]
    for i in range(2):
        path = f"blocks.{i}"
        expected += [_norm(f"{path}.norm1", 4, 15), _norm(f"{path}.norm2", 4, 15)]
        expected += [
            _dense(f"{path}.attention.{name}", 4, 4, 15, bias=False) for name in _PROJECTIONS
        ]
        expected += [_dense(f"{path}.mlp.layers.0", 4, 6, 15)]
        expected += [_dense(f"{path}.mlp.layers.1", 6, 4, 15)]
    expected += [_norm("norm", 4, 3), _dense("head", 4, 3, 3)]
    expected += [identity("token"), identity("position")]
    args = (normal(0, 3, 1, 4, 4), integers(1, 3, 3))
    return Case(relaxed(loss_fn), model, args, by_hand, tuple(expected))


class _UNet(eqx.Module):
    enter: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm
    down: eqx.nn.Conv2d
    middle: eqx.nn.Conv2d
    up: eqx.nn.ConvTranspose2d
    leave: eqx.nn.Conv2d
    pool: eqx.nn.MaxPool2d

    def __init__(self, key):
        self.enter = eqx.nn.Conv2d(1, 2, 3, padding="SAME", key=key)
        self.norm = eqx.nn.GroupNorm(1, 2)
        self.down = eqx.nn.Conv2d(2, 3, 2, stride=2, key=key)
        self.middle = eqx.nn.Conv2d(3, 3, 3, padding=1, key=key)
        self.up = eqx.nn.ConvTranspose2d(3, 2, 2, stride=2, key=key)
        self.leave = eqx.nn.Conv2d(4, 1, 1, key=key)
        self.pool = eqx.nn.MaxPool2d(2, 2)

    def __call__(self, image):
        skip = jax.nn.silu(self.norm(self.enter(image)))
        x = jax.nn.silu(self.down(skip))
        x = jnp.maximum(jax.nn.silu(self.middle(x)), jnp.mean(self.pool(skip)))
        return self.leave(jnp.concatenate([skip, self.up(x)]))


@case
def equinox_unet() -> Case:
    model = build(_UNet)

    def loss_fn(model, images, targets):
        return jnp.mean((jax.vmap(model)(images) - targets) ** 2)

    def by_hand(tape, images, targets):
        def conv(x, name, padding, **options):
            paths = (f"{name}.weight", f"{name}.bias")
            return tape(lambda w, b: convolve(x, w, [padding] * 2, **options) + b, *paths)

        silu = jax.nn.silu
        x = standardize(conv(images, "enter", (1, 1)), (1, 2, 3))
        spread = lambda p: p[:, None, None]
        skip = silu(tape(lambda w, b: x * spread(w) + spread(b), "norm.weight", "norm.bias"))
        y = silu(conv(skip, "down", (0, 0), stride=(2, 2)))
        pooled = jnp.max(skip.reshape(3, 2, 2, 2, 2, 2), (3, 5))
        y = silu(conv(y, "middle", (1, 1)))
        y = jnp.maximum(y, jnp.mean(pooled, (1, 2, 3), keepdims=True))
        y = conv(y, "up", (1, 1), spread=(2, 2))
        return mse(conv(jnp.concatenate([skip, y], 1), "leave", (0, 0)), targets)

    def conv(name, d_in, d_out, n):
        return Expected(f"{name}.weight", f"{name}.bias", "conv", d_in, d_out, n)

    expected = (
        conv("enter", 9, 2, 3 * 16),
        _norm("norm", 2, 3 * 16),
        conv("down", 8, 3, 3 * 4),
        conv("middle", 27, 3, 3 * 4),
        conv("up", 12, 2, 3 * 16),
        conv("leave", 4, 1, 3 * 16),
    )
    args = (normal(0, 3, 1, 4, 4), normal(1, 3, 1, 4, 4))
    return Case(relaxed(loss_fn), model, args, by_hand, expected)
