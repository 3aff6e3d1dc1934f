"""Plain functions of plain dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np

from ._by_hand import cross_entropy, mse, standardize
from ._case import Case, Expected, case, identity, integers, normal, relaxed


@case
def matmul_bias() -> Case:
    """`x @ W + b`, as anybody writes it."""
    params = {"W1": normal(0, 3, 4), "b1": normal(1, 4), "W2": normal(2, 4, 2), "b2": normal(3, 2)}

    @relaxed
    def loss_fn(params, x, y):
        hidden = jnp.tanh(x @ params["W1"] + params["b1"])
        return jnp.mean((hidden @ params["W2"] + params["b2"] - y) ** 2)

    def by_hand(tape, x, y):
        hidden = jnp.tanh(tape(lambda w, b: x @ w + b, "W1", "b1"))
        return mse(tape(lambda w, b: hidden @ w + b, "W2", "b2"), y)

    expected = (Expected("W1", "b1", "dense", 3, 4, 7), Expected("W2", "b2", "dense", 4, 2, 7))
    return Case(loss_fn, params, (normal(4, 7, 3), normal(5, 7, 2)), by_hand, expected)


@case
def scaled_outputs() -> Case:
    """Outputs times a number before the bias, as in muP and adapters; the second by division."""
    params = {"W1": normal(0, 3, 4), "b1": normal(1, 4), "W2": normal(2, 4, 2), "b2": normal(3, 2)}

    @relaxed
    def loss_fn(params, x, y):
        hidden = jnp.tanh((x @ params["W1"]) * -3.0 + params["b1"])
        return jnp.mean((hidden @ params["W2"] / 4 + params["b2"] - y) ** 2)

    def by_hand(tape, x, y):
        hidden = jnp.tanh(tape(lambda w, b: -3.0 * x @ w + b, "W1", "b1"))
        return mse(tape(lambda w, b: hidden @ w / 4 + b, "W2", "b2"), y)

    expected = (Expected("W1", "b1", "dense", 3, 4, 7), Expected("W2", "b2", "dense", 4, 2, 7))
    return Case(loss_fn, params, (normal(4, 7, 3), normal(5, 7, 2)), by_hand, expected)


@case
def matvec_vmap() -> Case:
    """`W @ x + b` for one example, under `vmap`."""
    params = {"W1": normal(0, 4, 3), "b1": normal(1, 4), "W2": normal(2, 2, 4)}

    def loss_fn(params, x, y):
        def predict(x):
            return params["W2"] @ jax.nn.relu(params["W1"] @ x + params["b1"])

        return jnp.mean((jax.vmap(predict)(x) - y) ** 2)

    def by_hand(tape, x, y):
        hidden = jax.nn.relu(tape(lambda w, b: x @ w.T + b, "W1", "b1"))
        return mse(tape(lambda w: hidden @ w.T, "W2"), y)

    expected = (Expected("W1", "b1", "dense", 3, 4, 7), Expected("W2", None, "dense", 4, 2, 7))
    return Case(loss_fn, params, (normal(4, 7, 3), normal(5, 7, 2)), by_hand, expected)


@case
def columns_as_examples() -> Case:
    """`W @ X` with the examples in the columns of X, the bias a column."""
    params = {"W": normal(0, 4, 3), "b": normal(1, 4, 1)}

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(params["W"] @ x + params["b"]) ** 2)

    def by_hand(tape, x):
        return jnp.mean(jnp.tanh(tape(lambda w, b: w @ x + b, "W", "b")) ** 2)

    return Case(
        loss_fn, params, (normal(2, 3, 7),), by_hand, (Expected("W", "b", "dense", 3, 4, 7),)
    )


@case
def einsum_axes() -> Case:
    """Contractions with their axes in every order: heads split, merged, and first."""
    params = {
        "heads": normal(0, 2, 5, 3),
        "heads_bias": normal(1, 2, 3),
        "merge": normal(2, 3, 4, 2),
        "out": normal(3, 6, 4),
    }

    def loss_fn(params, x):
        q = jnp.einsum("btd,hde->ehbt", x, params["heads"])
        q = jnp.sin(q + params["heads_bias"].T[:, :, None, None])
        y = jnp.einsum("ehbt,eoh->tob", q, params["merge"])
        return jnp.mean(jnp.cos(jnp.einsum("io,tob->ibt", params["out"], y)))

    def by_hand(tape, x):
        def heads(w, b):
            return sum(x[:, :, i, None, None] * w[:, i] for i in range(5)) + b

        q = jnp.sin(tape(heads, "heads", "heads_bias"))
        y = tape(lambda w: jnp.tensordot(q, w, ((2, 3), (2, 0))), "merge")
        return jnp.mean(jnp.cos(tape(lambda w: y @ w.T, "out")))

    expected = (
        Expected("heads", "heads_bias", "dense", 5, 6, 12),
        Expected("merge", None, "dense", 6, 4, 12),
        Expected("out", None, "dense", 4, 6, 12),
    )
    return Case(loss_fn, params, (normal(4, 3, 4, 5),), by_hand, expected)


@case
def cast_to_bfloat16() -> Case:
    """Parameters in float32, the model in bfloat16, the statistics in float32 all the same."""
    shapes = {"W1": (3, 4), "b1": (4,), "W2": (4, 2), "b2": (2,)}
    params = {name: normal(i, *s).astype(jnp.float32) for i, (name, s) in enumerate(shapes.items())}

    def loss_fn(params, x, y):
        half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        hidden = jnp.tanh(x @ half["W1"] + half["b1"][None])
        output = (hidden @ half["W2"] + half["b2"][None]).astype(jnp.float32)
        return jnp.mean((output - y) ** 2)

    def by_hand(tape, x, y):
        def layer(x, weight, bias):
            # A cast alone: XLA would leave out the rounding.
            rounded = jax.lax.reduce_precision(x.astype(jnp.float32), 8, 7)
            exact = tape(lambda w, b: rounded @ w + b, weight, bias)
            del exact  # on the tape for its Jacobian; the model's own value is rounded thrice
            w, b = tape[weight].astype(x.dtype), tape[bias].astype(x.dtype)
            return x @ w + b

        hidden = jnp.tanh(layer(x, "W1", "b1"))
        return mse(layer(hidden, "W2", "b2").astype(jnp.float32), y)

    args = (normal(4, 7, 3).astype(jnp.bfloat16), normal(5, 7, 2).astype(jnp.float32))
    expected = (Expected("W1", "b1", "dense", 3, 4, 7), Expected("W2", "b2", "dense", 4, 2, 7))
    return Case(loss_fn, params, args, by_hand, expected, exact=1e-5)


@case
def scaled_by_constants() -> Case:
    """Weights negated, scaled by a number, by an array of constants (a mask), biases likewise."""
    mask = np.tril(np.ones((4, 4)))
    params = {
        "W1": normal(0, 3, 4),
        "b1": normal(1, 4),
        "W2": normal(2, 4, 4),
        "W3": normal(3, 4, 2),
    }

    def loss_fn(params, x, y):
        hidden = jnp.tanh(x @ (params["W1"] / np.sqrt(3.0)) + (0.1 * params["b1"])[None])
        hidden = jnp.tanh(hidden @ (mask * params["W2"]))
        return jnp.mean((hidden @ (-2 * params["W3"]) - y) ** 2)

    def by_hand(tape, x, y):
        hidden = jnp.tanh(tape(lambda w, b: x @ w / np.sqrt(3.0) + b / 10, "W1", "b1"))
        masked = tape(lambda w: jnp.stack([hidden[:, i:] @ w[i:, i] for i in range(4)], 1), "W2")
        return mse(tape(lambda w: -2 * jnp.tanh(masked) @ w, "W3"), y)

    expected = (
        Expected("W1", "b1", "dense", 3, 4, 7),
        Expected("W2", None, "dense", 4, 4, 7),
        Expected("W3", None, "dense", 4, 2, 7),
    )
    return Case(loss_fn, params, (normal(4, 7, 3), normal(5, 7, 2)), by_hand, expected)


def _fused_qkv(bias: bool) -> Case:
    params = {"qkv": normal(0, 3, 12), "bias": normal(1, 12), "out": normal(2, 4, 3)}
    params = params if bias else {k: v for k, v in params.items() if k != "bias"}

    def loss_fn(params, x):
        weights = jnp.split(params["qkv"], 3, axis=1)
        q, k, v = (x @ w for w in weights)
        if bias:
            b = params["bias"]
            q, k, v = q + b[None, None, :4], k + b[None, None, 4:8], v + b[None, None, 8:]
        scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return jnp.mean(jnp.sin(jnp.einsum("bqk,bkd->bqd", scores, v) @ params["out"]))

    def by_hand(tape, x):
        paths = ("qkv", "bias") if bias else ("qkv",)
        qkv = tape(lambda w, b=0.0: x @ w + b, *paths)
        q, k, v = qkv[..., :4], qkv[..., 4:8], qkv[..., 8:]
        mixed = jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v
        return jnp.mean(jnp.sin(tape(lambda w: mixed @ w, "out")))

    expected = (
        Expected("qkv", "bias" if bias else None, "dense", 3, 12, 10, sites=3),
        Expected("out", None, "dense", 4, 3, 10),
    )
    return Case(loss_fn, params, (normal(3, 2, 5, 3),), by_hand, expected, sliced=("qkv",))


@case
def fused_qkv() -> Case:
    """One matrix sliced three ways and fed the same array: three neurons that share M."""
    return _fused_qkv(bias=False)


@case
def fused_qkv_bias() -> Case:
    """The same, the bias sliced along."""
    return _fused_qkv(bias=True)


@case
def fused_slices_of_rows() -> Case:
    """One matrix whose row blocks meet different features: a block-diagonal M, n counted once."""
    params = {"W": normal(0, 6, 4)}

    def loss_fn(params, x, z):
        return jnp.mean(jnp.sin(x @ params["W"][:4]) * jnp.cos(z @ params["W"][4:]))

    def by_hand(tape, x, z):
        zeros = jnp.zeros
        first = tape(lambda w: jnp.concatenate([x, zeros((7, 2))], 1) @ w, "W")
        second = tape(lambda w: jnp.concatenate([zeros((7, 4)), z], 1) @ w, "W")
        return jnp.mean(jnp.sin(first) * jnp.cos(second))

    expected = (Expected("W", None, "dense", None, None, 7, sites=None),)
    return Case(
        loss_fn,
        params,
        (normal(1, 7, 4), normal(2, 7, 2)),
        by_hand,
        expected,
        sliced=("W",),
    )


@case
def bias_views() -> Case:
    """Biases that are reshaped, broadcast, transposed, added first, or subtracted."""
    params = {f"W{i}": normal(i, 4, 4) for i in range(5)} | {
        "b0": normal(5, 2, 2),
        "b1": normal(6, 1, 4),
        "b2": normal(7, 4),
        "b3": normal(8, 4, 1),
        "b4": normal(9, 4),
    }

    def loss_fn(params, x):
        p = params
        x = jnp.sin(x @ p["W0"] + jnp.reshape(p["b0"], (1, 4)))
        x = jnp.sin(x @ p["W1"] + jnp.broadcast_to(p["b1"], x.shape))
        x = jnp.sin(p["b2"][None] + (x @ p["W2"]).reshape(7, 2, 2).reshape(7, 4))
        x = jnp.sin(((p["W3"] @ x.T) - p["b3"]).T)
        return jnp.mean(jnp.sin((x @ p["W4"])[None].swapaxes(1, 2) + p["b4"][None, :, None]))

    def by_hand(tape, x):
        x = jnp.sin(tape(lambda w, b: x @ w + b.ravel(), "W0", "b0"))
        x = jnp.sin(tape(lambda w, b: x @ w + b, "W1", "b1"))
        x = jnp.sin(tape(lambda w, b: x @ w + b, "W2", "b2"))
        x = jnp.sin(tape(lambda w, b: x @ w.T - b.T, "W3", "b3"))
        return jnp.mean(jnp.sin(tape(lambda w, b: x @ w + b, "W4", "b4")))

    expected = tuple(Expected(f"W{i}", f"b{i}", "dense", 4, 4, 7) for i in range(5))
    return Case(loss_fn, params, (normal(10, 7, 4),), by_hand, expected)


@case
def not_biases() -> Case:
    """What is added but is no bias: it varies over positions, meets two sites, or misses a unit."""
    params = {
        "W": normal(0, 3, 4),
        "position": normal(1, 5, 4),
        "U": normal(2, 4, 2),
        "V": normal(3, 4, 2),
        "shared": normal(4, 2),
        "head": normal(5, 2, 3),
        "partial": normal(6, 2),
        "shift": normal(7, 3),
    }

    def loss_fn(params, x):
        p = params
        h = jnp.tanh((x + p["shift"][None, None]) @ p["W"] + p["position"][None])
        h = jnp.tanh(h @ p["U"] + jnp.cos(h) @ p["V"] + p["shared"][None, None])
        out = h @ p["head"]
        head, rest = jnp.split(out, [2], axis=-1)
        return jnp.mean(jnp.sin(head + p["partial"][None, None])) + jnp.mean(jnp.sin(rest))

    def by_hand(tape, x):
        h = x + tape["shift"]
        h = jnp.tanh(tape(lambda w: h @ w, "W") + tape["position"])
        h = jnp.tanh(
            tape(lambda w: h @ w, "U") + tape(lambda w: jnp.cos(h) @ w, "V") + tape["shared"]
        )
        out = tape(lambda w: h @ w, "head")
        return jnp.mean(jnp.sin(out[..., :2] + tape["partial"])) + jnp.mean(jnp.sin(out[..., 2:]))

    expected = (
        Expected("W", None, "dense", 3, 4, 10),
        Expected("U", None, "dense", 4, 2, 10),
        Expected("V", None, "dense", 4, 2, 10),
        Expected("head", None, "dense", 2, 3, 10),
        *map(identity, ("position", "shared", "partial", "shift")),
    )
    return Case(loss_fn, params, (normal(8, 2, 5, 3),), by_hand, expected)


@case
def l2_penalty() -> Case:
    """A penalty and a logged norm never meet data: they change the gradient, not the neurons."""
    params = {"W": normal(0, 3, 4), "b": normal(1, 4), "only_penalised": normal(2, 3)}

    def loss_fn(params, x):
        penalty = sum(jnp.sum(p**2) for p in params.values())
        fit = jnp.mean(jnp.sin(x @ params["W"] + params["b"][None]))
        return fit + 0.1 * penalty, {"norm": jnp.sqrt(jnp.sum(params["W"] ** 2))}

    def by_hand(tape, x):
        penalty = sum(jnp.sum(tape[p] ** 2) for p in params)
        return jnp.mean(jnp.sin(tape(lambda w, b: x @ w + b, "W", "b"))) + 0.1 * penalty

    return Case(
        loss_fn,
        params,
        (normal(3, 7, 3),),
        by_hand,
        (Expected("W", "b", "dense", 3, 4, 7),),
        unclaimed=("only_penalised",),
        has_aux=True,
    )


def _indexed(unrolled: bool) -> Case:
    params = {"W": normal(0, 3, 4, 4), "b": normal(1, 3, 4)}

    def loss_fn(params, x):
        def layer(i, x):
            return jnp.tanh(x @ params["W"][i] + params["b"][i][None])

        if unrolled:
            for i in range(3):
                x = layer(i, x)
        else:
            x = jax.lax.fori_loop(0, 3, layer, x)
        return jnp.mean(jnp.sin(x))

    def by_hand(tape, x):
        for i in range(3):
            x = jnp.tanh(tape(lambda w, b: x @ w[i] + b[i], "W", "b"))
        return jnp.mean(jnp.sin(x))

    many = Expected("W", "b", "dense", None, None, 7, sites=None)
    one = Expected("W", "b", "dense", 4, 4, 7)
    expected = (many,) if unrolled else (one,)
    sliced = ("W",) if unrolled else ()
    return Case(loss_fn, params, (normal(2, 7, 4),), by_hand, expected, sliced=sliced)


@case
def indexed_in_a_loop() -> Case:
    """`W[i]` inside `fori_loop`: a `dynamic_slice` by an index that is no data."""
    return _indexed(unrolled=False)


@case
def indexed_unrolled() -> Case:
    """`W[i]` inside a Python loop."""
    return _indexed(unrolled=True)


@case
def siamese() -> Case:
    """One layer applied at two places, bias and all: sites add."""
    params = {"W": normal(0, 3, 4), "b": normal(1, 4)}

    def loss_fn(params, x, y):
        def embed(x):
            return jnp.tanh(x @ params["W"] + params["b"][None])

        return jnp.mean((embed(x) - embed(y)) ** 2)

    def by_hand(tape, x, y):
        a = tape(lambda w, b: x @ w + b, "W", "b")
        b = tape(lambda w, b: y @ w + b, "W", "b")
        return mse(jnp.tanh(a), jnp.tanh(b))

    expected = (Expected("W", "b", "dense", 3, 4, 12, sites=2),)
    return Case(loss_fn, params, (normal(2, 6, 3), normal(3, 6, 3)), by_hand, expected)


@case
def sites_of_different_size() -> Case:
    """The sum of two sites' counts, where each sees its own number of positions."""
    params = {"W": normal(0, 3, 3)}

    def loss_fn(params, x, y):
        once = jnp.sin(x @ params["W"])
        return jnp.mean(jnp.cos(once @ params["W"])) + jnp.mean(jnp.cos(y @ params["W"]))

    def by_hand(tape, x, y):
        once = jnp.sin(tape(lambda w: x @ w, "W"))
        twice = tape(lambda w: once @ w, "W")
        return jnp.mean(jnp.cos(twice)) + jnp.mean(jnp.cos(tape(lambda w: y @ w, "W")))

    expected = (Expected("W", None, "dense", 3, 3, 2 * 5 + 4, sites=3),)
    return Case(loss_fn, params, (normal(1, 5, 3), normal(2, 4, 3)), by_hand, expected)


@case
def tied_autoencoder() -> Case:
    """One matrix to encode and, transposed, to decode: two orientations, a bias on one of them."""
    params = {"W": normal(0, 4, 3), "encoded": normal(1, 3)}

    def loss_fn(params, x):
        hidden = jnp.tanh(x @ params["W"] + params["encoded"][None])
        return jnp.mean((hidden @ params["W"].T - x) ** 2)

    def by_hand(tape, x):
        hidden = jnp.tanh(tape(lambda w, b: x @ w + b, "W", "encoded"))
        return mse(tape(lambda w: hidden @ w.T, "W"), x)

    expected = (Expected("W", "encoded", None, None, None, 14, sites=2),)
    return Case(loss_fn, params, (normal(2, 7, 4),), by_hand, expected)


@case
def scales() -> Case:
    """Elementwise scales: per channel, with bias, a single number, over space, of a mask's kind."""
    params = {
        "channel": normal(0, 4),
        "channel_bias": normal(1, 4),
        "number": normal(2),
        "map": normal(3, 3, 4),
        "map_bias": normal(4, 3, 4),
        "slope": normal(5, 4),
    }

    def loss_fn(params, x):
        p = params
        x = jnp.sin(p["channel"][None, None] * x + p["channel_bias"][None, None])
        x = jnp.sin(x * p["number"])
        x = jnp.sin(x * p["map"] + p["map_bias"][None])
        return jnp.mean(jnp.where(x > 0, x, p["slope"][None, None] * x) ** 2)

    def by_hand(tape, x):
        x = jnp.sin(tape(lambda w, b: w * x + b, "channel", "channel_bias"))
        x = jnp.sin(tape(lambda w: w * x, "number"))
        x = jnp.sin(tape(lambda w, b: w * x + b, "map", "map_bias"))
        return jnp.mean(jnp.where(x > 0, x, tape(lambda w: w * x, "slope")) ** 2)

    expected = (
        Expected("channel", "channel_bias", "scale", 1, 4, 6),
        Expected("number", None, "scale", 1, 1, 24),
        Expected("map", "map_bias", "scale", 1, 12, 2),
        Expected("slope", None, "scale", 1, 4, 6),
    )
    return Case(relaxed(loss_fn), params, (normal(6, 2, 3, 4),), by_hand, expected)


@case
def scale_before_features() -> Case:
    """Norms that multiply the scale with 1 / std first and with x - mean afterwards."""
    params = {"scale": normal(0, 4), "bias": normal(1, 4), "last": normal(2, 4)}

    @relaxed
    def loss_fn(params, x):
        mean = jnp.mean(x, -1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
        x = jnp.sin((x - mean) * (inverse * params["scale"]) + params["bias"])
        inverse = jax.lax.rsqrt(jnp.mean(x**2, 0) + 1e-5)
        return jnp.mean(jnp.sin(x * (params["last"] * inverse)))

    def by_hand(tape, x):
        normed = standardize(x)
        x = jnp.sin(tape(lambda w, b: normed * w + b, "scale", "bias"))
        normed = x / jnp.sqrt(jnp.mean(x**2, 0) + 1e-5)
        return jnp.mean(jnp.sin(tape(lambda w: normed * w, "last")))

    expected = (
        Expected("scale", "bias", "scale", 1, 4, 7),
        Expected("last", None, "scale", 1, 4, 7),
    )
    return Case(loss_fn, params, (normal(3, 7, 4),), by_hand, expected)


@case
def lookups() -> Case:
    """Embeddings by indexing, `take`, `dynamic_slice` and one-hot products."""
    params = {
        "index": normal(0, 6, 4),
        "take": normal(1, 4, 6),
        "slice": normal(2, 6, 4),
        "one_hot": normal(3, 6, 4),
        "head": normal(4, 4, 6),
    }

    def loss_fn(params, tokens):
        p = params
        one = jax.vmap(lambda i: jax.lax.dynamic_index_in_dim(p["slice"], i, keepdims=False))
        h = jnp.sin(p["index"][tokens]) * jnp.cos(jnp.take(p["take"].T, tokens, axis=0))
        h = h * jax.vmap(one)(tokens) + jax.nn.one_hot(tokens, 6, dtype=h.dtype) @ p["one_hot"]
        return jnp.mean(jax.nn.logsumexp(h @ p["head"], axis=-1))

    def by_hand(tape, tokens):
        hot = (tokens[..., None] == jnp.arange(6)).astype(float)
        h = jnp.sin(tape(lambda w: hot @ w, "index"))
        h = h * jnp.cos(tape(lambda w: hot @ w.T, "take"))
        h = h * tape(lambda w: hot @ w, "slice") + tape(lambda w: hot @ w, "one_hot")
        return jnp.mean(jax.nn.logsumexp(tape(lambda w: h @ w, "head"), -1))

    expected = (
        Expected("index", None, "lookup", 6, 4, 10),
        Expected("take", None, "lookup", 6, 4, 10),
        Expected("slice", None, "lookup", 6, 4, 10),
        Expected("one_hot", None, "dense", 6, 4, 10),
        Expected("head", None, "dense", 4, 6, 10),
    )
    return Case(loss_fn, params, (integers(5, 6, 2, 5),), by_hand, expected)


@case
def class_token() -> Case:
    """A class token put in front, a position embedding added: identity neurons."""
    params = {
        "embed": normal(0, 3, 4),
        "embed_bias": normal(1, 4),
        "token": normal(2, 4),
        "position": normal(3, 6, 4),
        "head": normal(4, 4, 2),
    }

    def loss_fn(params, x, labels):
        def one(x):
            x = x @ params["embed"] + params["embed_bias"][None]
            x = jnp.concatenate([params["token"][None], x]) + params["position"]
            return jnp.mean(jnp.sin(x), axis=0) @ params["head"]

        logits = jax.vmap(one)(x)
        return -jnp.mean(jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, 2), axis=-1))

    def by_hand(tape, x, labels):
        x = tape(lambda w, b: x @ w + b, "embed", "embed_bias")
        token = jnp.broadcast_to(tape["token"], (3, 1, 4))
        x = jnp.concatenate([token, x], 1) + tape["position"]
        pooled = jnp.mean(jnp.sin(x), 1)
        return cross_entropy(tape(lambda w: pooled @ w, "head"), labels)

    expected = (
        Expected("embed", "embed_bias", "dense", 3, 4, 15),
        identity("token"),
        identity("position"),
        Expected("head", None, "dense", 4, 2, 3),
    )
    args = (normal(5, 3, 5, 3), integers(6, 2, 3))
    return Case(loss_fn, params, args, by_hand, expected)


@case
def nothing_linear() -> Case:
    """Weight norm, a product of two parameters, a mixed use, an unused and a complex parameter."""
    params = {
        "direction": normal(0, 3, 4),
        "length": normal(1, 4),
        "bias": normal(2, 4),
        "left": normal(3, 4, 2),
        "right": normal(4, 2, 3),
        "mixed": normal(5, 3, 3),
        "unused": normal(6, 2),
        "complex": jax.lax.complex(normal(7, 3, 2), normal(8, 3, 2)),
        "linear": normal(9, 2, 2),
    }

    def loss_fn(params, x):
        p = params
        unit = p["direction"] / jnp.linalg.norm(p["direction"], axis=0, keepdims=True)
        x = jnp.tanh(x @ (p["length"][None] * unit) + p["bias"][None])
        x = jnp.tanh(x @ (p["left"] @ p["right"]))
        x = jnp.tanh(x @ p["mixed"] + x @ jnp.tanh(p["mixed"]))
        x = x.astype(complex) @ p["complex"]
        x = jnp.sin(jnp.real(x)) * jnp.cos(jnp.imag(x))
        return jnp.mean(jnp.sin(x @ p["linear"]))

    def by_hand(tape, x):
        norm = jnp.sqrt(jnp.sum(tape["direction"] ** 2, 0))
        x = jnp.tanh(x @ (tape["length"] * tape["direction"] / norm) + tape["bias"])
        x = jnp.tanh(x @ (tape["left"] @ tape["right"]))
        x = jnp.tanh(x @ (tape["mixed"] + jnp.tanh(tape["mixed"])))
        x = x @ tape["complex"]
        x = jnp.sin(jnp.real(x)) * jnp.cos(jnp.imag(x))
        return jnp.mean(jnp.sin(tape(lambda w: x @ w, "linear")))

    expected = (Expected("linear", None, "dense", 2, 2, 7), identity("bias"))
    unclaimed = ("direction", "length", "left", "right", "mixed", "unused", "complex")
    return Case(loss_fn, params, (normal(10, 7, 3),), by_hand, expected, unclaimed)


@case
def complex_constants() -> Case:
    """Real parameters of a complex filter: whatever is claimed, value and gradients are JAX's."""
    params = {"real": normal(0, 4, 3), "imaginary": normal(1, 4, 3), "phase": normal(2, 4, 3)}

    def filters(real, imaginary, phase):
        turned = phase.astype(complex) * np.asarray(0.5j)
        return jax.lax.complex(real, imaginary) + turned

    def loss_fn(params, x):
        spectrum = jnp.fft.rfft(x, axis=0) * filters(**params)
        return jnp.mean(jnp.fft.irfft(spectrum, n=7, axis=0) ** 2)

    def by_hand(tape, x):
        spectrum = jnp.fft.rfft(x, axis=0) * filters(*(tape[name] for name in params))
        return jnp.mean(jnp.fft.irfft(spectrum, n=7, axis=0) ** 2)

    return Case(loss_fn, params, (normal(3, 7, 3),), by_hand, None)


@case
def closed_over_batch() -> Case:
    """The batch is no argument but a constant of the program, as in a notebook."""
    params = {"W1": normal(0, 3, 4), "b1": normal(1, 4), "W2": normal(2, 4, 2)}
    x = normal(3, 7, 3)

    def loss_fn(params):
        hidden = jnp.tanh(x @ params["W1"] + params["b1"][None])
        return jnp.mean(jnp.sin(hidden @ params["W2"]))

    def by_hand(tape):
        hidden = jnp.tanh(tape(lambda w, b: x @ w + b, "W1", "b1"))
        return jnp.mean(jnp.sin(tape(lambda w: hidden @ w, "W2")))

    expected = (Expected("W1", "b1", "dense", 3, 4, 7), Expected("W2", None, "dense", 4, 2, 7))
    return Case(loss_fn, params, (), by_hand, expected)


@case
def opaque_custom_vjp() -> Case:
    """A parameter whose only use is inside a `custom_vjp`: unclaimed, and its own rule kept."""
    params = {"hidden": normal(0, 3, 4), "W": normal(1, 4, 2), "b": normal(2, 2)}

    @jax.custom_vjp
    def layer(x, w):
        return jnp.tanh(x @ w)

    def forward(x, w):
        return layer(x, w), (x, w)

    def backward(residuals, cotangent):
        x, w = residuals  # a straight-through rule: not what differentiating the body would give
        return cotangent @ w.T, x.T @ cotangent

    layer.defvjp(forward, backward)

    def loss_fn(params, x):
        h = layer(x, params["hidden"])
        return jnp.mean(jnp.sin(h @ params["W"] + params["b"][None]))

    def by_hand(tape, x):
        h = jnp.tanh(x @ tape["hidden"])
        return jnp.mean(jnp.sin(tape(lambda w, b: h @ w + b, "W", "b")))

    expected = (Expected("W", "b", "dense", 4, 2, 7),)
    return Case(loss_fn, params, (normal(3, 7, 3),), by_hand, expected, unclaimed=("hidden",))
