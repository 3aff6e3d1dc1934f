"""Programs with structure of their own: loops, branches, shards, experts, derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from ._by_hand import attend, cross_entropy, mse
from ._case import Case, Expected, case, identity, integers, normal

_VOCABULARY, _WIDTH, _HIDDEN, _LAYERS = 7, 4, 6, 2


def _blocks() -> dict[str, Array]:
    d, f, layers = _WIDTH, _HIDDEN, _LAYERS
    shapes = {
        "norm": (layers, d),
        "qkv": (layers, d, 3 * d),
        "out": (layers, d, d),
        "wide": (layers, d, f),
        "wide_bias": (layers, f),
        "narrow": (layers, f, d),
        "narrow_bias": (layers, d),
    }
    return {name: 0.5 * normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def _rms(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def _dropout(key: Array, x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, jnp.zeros_like(x))


def _block(p: dict[str, Array], x: Array, key: Array) -> Array:
    y = _rms(x) * p["norm"][None, None]
    q, k, v = jnp.split(y @ p["qkv"], 3, axis=-1)
    heads = (*x.shape[:2], 2, _WIDTH // 2)
    q, k, v = (z.reshape(heads).swapaxes(1, 2) for z in (q, k, v))
    scores = q @ k.swapaxes(2, 3) / np.sqrt(_WIDTH / 2)
    past = jnp.tril(jnp.ones(scores.shape, bool))
    mixed = (jax.nn.softmax(scores, where=past) @ v).swapaxes(1, 2)
    x = x + _dropout(key, mixed.reshape(x.shape) @ p["out"])

    @jax.jit
    def mlp(x):
        hidden = jax.nn.gelu(x @ p["wide"] + p["wide_bias"][None, None])
        return hidden @ p["narrow"] + p["narrow_bias"][None, None]

    return x + mlp(x)


def _block_by_hand(tape, i: int, x: Array, key: Array) -> Array:
    def at(name):
        return f"blocks.{name}"

    y = tape(lambda w: _rms(x) * w[i], at("norm"))
    qkv = tape(lambda w: y @ w[i], at("qkv"))
    mixed = attend(*jnp.split(qkv.reshape(*x.shape[:2], 6, -1), 3, axis=2), causal=True)
    mixed = mixed.reshape(x.shape)
    x = x + _dropout(key, tape(lambda w: mixed @ w[i], at("out")))
    hidden = jax.nn.gelu(tape(lambda w, b: x @ w[i] + b[i], at("wide"), at("wide_bias")))
    return x + tape(lambda w, b: hidden @ w[i] + b[i], at("narrow"), at("narrow_bias"))


def _expected_blocks(n: int) -> list[Expected]:
    d, f = _WIDTH, _HIDDEN
    return [
        Expected("blocks.norm", None, "scale", 1, d, n),
        Expected("blocks.qkv", None, "dense", d, 3 * d, n),
        Expected("blocks.out", None, "dense", d, d, n),
        Expected("blocks.wide", "blocks.wide_bias", "dense", d, f, n),
        Expected("blocks.narrow", "blocks.narrow_bias", "dense", f, d, n),
    ]


def _language_model(tied: bool, remat: bool) -> Case:
    params = {
        "embed": normal(10, _VOCABULARY, _WIDTH),
        "position": normal(11, 5, _WIDTH),
        "blocks": _blocks(),
    }
    if not tied:
        params["head"] = normal(12, _WIDTH, _VOCABULARY)

    def loss_fn(params, key, tokens):
        block = jax.checkpoint(_block) if remat else _block
        x = params["embed"][tokens[:, :-1]] + params["position"][None]
        keys = jax.random.split(key, _LAYERS)
        x, _ = jax.lax.scan(
            lambda x, each: (block(each[0], x, each[1]), None), x, (params["blocks"], keys)
        )
        logits = x @ (params["embed"].T if tied else params["head"])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(picked)

    def by_hand(tape, key, tokens):
        inputs = tokens[:, :-1]
        x = tape(lambda w: w[inputs], "embed") + tape["position"]
        for i, each in enumerate(jax.random.split(key, _LAYERS)):
            x = _block_by_hand(tape, i, x, each)
        logits = tape(lambda w: x @ w.T, "embed") if tied else tape(lambda w: x @ w, "head")
        return cross_entropy(logits, tokens[:, 1:])

    expected = [*_expected_blocks(10), identity("position")]
    if tied:
        expected += [Expected("embed", None, None, None, None, 20, sites=2)]
    else:
        expected += [Expected("embed", None, "lookup", _VOCABULARY, _WIDTH, 10)]
        expected += [Expected("head", None, "dense", _WIDTH, _VOCABULARY, 10)]
    args = (jax.random.key(0), integers(13, _VOCABULARY, 2, 6))
    return Case(loss_fn, params, args, by_hand, tuple(expected))


@case
def scanned_transformer() -> Case:
    """One scan over stacked blocks: `jax.checkpoint`, nested `jit`, dropout, causal attention."""
    return _language_model(tied=False, remat=True)


@case
def tied_language_model() -> Case:
    """Tied input and output embedding: two orientations of one weight."""
    return _language_model(tied=True, remat=False)


@case
def recurrent_shared_over_time() -> Case:
    """Weights constant over a scan: every step is another position."""
    params = {"input": normal(0, 3, 4), "recurrent": normal(1, 4, 4), "bias": normal(2, 4)}

    def loss_fn(params, x):
        driven = x @ params["input"]

        def step(h, driven):
            h = jnp.tanh(driven + h @ params["recurrent"] + params["bias"][None])
            return h, h

        _, history = jax.lax.scan(step, jnp.zeros((2, 4)), driven, reverse=True)
        return jnp.mean(jnp.sin(history))

    def by_hand(tape, x):
        driven = tape(lambda w: x @ w, "input")
        h, total = jnp.zeros((2, 4)), jnp.zeros(())
        for t in reversed(range(5)):
            h = jnp.tanh(driven[t] + tape(lambda w: h @ w, "recurrent") + tape["bias"])
            total += jnp.sum(jnp.sin(h))
        return total / (5 * 2 * 4)

    expected = (
        Expected("input", None, "dense", 3, 4, 10),
        Expected("recurrent", None, "dense", 4, 4, 10),
        identity("bias"),
    )
    return Case(loss_fn, params, (normal(3, 5, 2, 3),), by_hand, expected)


@case
def recurrent_with_bias() -> Case:
    """A whole layer shared over time in a scan inside a scan."""
    params = {"W": normal(0, 4, 4), "b": normal(1, 4)}

    def loss_fn(params, x):
        def step(h, x):
            return jnp.sin((h + x) @ params["W"] + params["b"][None]), None

        def outer(h, x):
            return jax.lax.scan(step, h, x)[0], None

        h, _ = jax.lax.scan(outer, jnp.zeros((2, 4)), x)
        return jnp.mean(h**2)

    def by_hand(tape, x):
        h = jnp.zeros((2, 4))
        for inner in x:
            for inputs in inner:
                h = jnp.sin(tape(lambda w, b: (h + inputs) @ w + b, "W", "b"))
        return jnp.mean(h**2)

    expected = (Expected("W", "b", "dense", 4, 4, 3 * 5 * 2),)
    return Case(loss_fn, params, (normal(2, 3, 5, 2, 4),), by_hand, expected)


@case
def weights_in_the_carry() -> Case:
    """Parameters carried through a scan: whatever is claimed, value and gradients are JAX's."""
    params = {"W": normal(0, 3, 3), "b": normal(1, 3)}

    def loss_fn(params, x):
        def step(carry, x):
            params, h = carry
            return (params, jnp.tanh((h + x) @ params["W"] + params["b"][None])), None

        (_, h), _ = jax.lax.scan(step, (params, jnp.zeros((2, 3))), x)
        return jnp.mean(h)

    def by_hand(tape, x):
        h = jnp.zeros((2, 3))
        for inputs in x:
            h = jnp.tanh((h + inputs) @ tape["W"] + tape["b"])
        return jnp.mean(h)

    return Case(loss_fn, params, (normal(2, 4, 2, 3),), by_hand, None)


def _ensemble(shared_input: bool) -> Case:
    params = {
        "W1": normal(0, 5, 3, 4),
        "b1": normal(1, 5, 4),
        "W2": normal(2, 5, 4, 2),
        "b2": normal(3, 5, 2),
    }

    def loss_fn(params, x, y):
        def member(p, x):
            hidden = jnp.tanh(x @ p["W1"] + p["b1"][None])
            return jnp.mean((hidden @ p["W2"] + p["b2"][None] - y) ** 2)

        axes = (0, None) if shared_input else (0, 0)
        return jnp.mean(jax.vmap(member, axes)(params, x))

    def by_hand(tape, x, y):
        x = jnp.broadcast_to(x, (5, 7, 3))
        h = jnp.tanh(tape(lambda w, b: x @ w + b[:, None], "W1", "b1"))
        return mse(tape(lambda w, b: h @ w + b[:, None], "W2", "b2"), y)

    # Fed the same array, the members of the first layer are so many more outputs of one matrix.
    first = (None, None) if shared_input else (3, 4)
    expected = (
        Expected("W1", "b1", "dense", *first, n=7),
        Expected("W2", "b2", "dense", 4, 2, 7),
    )
    x = normal(4, 7, 3) if shared_input else normal(4, 5, 7, 3)
    return Case(loss_fn, params, (x, normal(5, 7, 2)), by_hand, expected)


@case
def ensemble() -> Case:
    """Five models, each with data of its own: a batch axis of the weights, n counted once."""
    return _ensemble(shared_input=False)


@case
def ensemble_shared_input() -> Case:
    """Five models at once, on the same data."""
    return _ensemble(shared_input=True)


@case
def mixture_of_experts() -> Case:
    """Tokens dispatched to experts: a batch axis of the weights and of the features."""
    params = {
        "router": normal(0, 3, 4),
        "W1": normal(1, 4, 3, 5),
        "b1": normal(2, 4, 5),
        "W2": normal(3, 4, 5, 3),
    }

    def loss_fn(params, x):
        logits = x @ params["router"]
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits.T), 6)  # each expert takes six tokens
        dispatch = jax.nn.one_hot(chosen, x.shape[0], dtype=x.dtype)
        seen = jnp.einsum("ect,td->ecd", dispatch, x)
        hidden = jnp.einsum("ecd,edh->ech", seen, params["W1"]) + params["b1"][:, None]
        out = jnp.einsum("ech,eho->eco", jnp.tanh(hidden), params["W2"])
        combined = jnp.einsum("ect,eco->to", dispatch * gates[..., None], out)
        return jnp.mean(jnp.sin(x + combined))

    def by_hand(tape, x):
        logits = tape(lambda w: x @ w, "router")
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits.T), 6)
        seen = x[chosen]
        hidden = tape(lambda w, b: seen @ w + b[:, None], "W1", "b1")
        out = tape(lambda w: jnp.tanh(hidden) @ w, "W2")
        combined = jnp.zeros_like(x).at[chosen].add(gates[..., None] * out)
        return jnp.mean(jnp.sin(x + combined))

    expected = (
        Expected("router", None, "dense", 3, 4, 9),
        Expected("W1", "b1", "dense", 3, 5, 6),
        Expected("W2", None, "dense", 5, 3, 6),
    )
    return Case(loss_fn, params, (normal(4, 9, 3),), by_hand, expected)


@case
def experts_by_index() -> Case:
    """Each token takes two experts out of a table, in every layer of a scan, with biases."""
    params = {"W": normal(0, 2, 4, 3, 3), "b": normal(1, 2, 4, 3), "first": normal(2, 4, 3, 3)}

    def loss_fn(params, x, chosen, tokens):
        def layer(x, weights):
            outs = jnp.einsum("btd,btkdo->btko", x, weights["W"][chosen])
            return x + jnp.mean(jnp.tanh(outs + weights["b"][chosen]), axis=2), None

        x = x + jax.vmap(jax.vmap(lambda x, i: x @ params["first"][i]))(x, tokens)
        x, _ = jax.lax.scan(layer, x, {name: params[name] for name in "Wb"})
        return jnp.mean(jnp.sin(x))

    def by_hand(tape, x, chosen, tokens):
        x = x + tape(lambda w: jnp.einsum("btd,btdo->bto", x, w[tokens]), "first")
        layers = []
        for i in range(2):
            select = lambda w, x=x, i=i: jnp.einsum("btd,btkdo->btko", x, w[i, chosen])
            outs = select(tape["W"]) + tape["b"][i, chosen]
            layers.append(select)
            x = x + jnp.mean(jnp.tanh(outs), axis=2)
        tape(lambda w: jnp.stack([select(w) for select in layers]), "W")
        tape(lambda b: b[:, chosen], "b")
        return jnp.mean(jnp.sin(x))

    args = normal(3, 5, 2, 3), integers(4, 4, 5, 2, 2), integers(5, 4, 5, 2)
    expected = (
        Expected("first", None, "dense", 3, 3, 10),
        Expected("W", None, "dense", 3, 3, 20),
        Expected("b", None, "lookup", 4, 3, 20),
    )
    return Case(loss_fn, params, args, by_hand, expected)


@case
def experts_before_layers() -> Case:
    """A table whose layers stand behind its experts, and are scanned over all the same."""
    params = {"W": normal(0, 4, 2, 3, 3)}

    def loss_fn(params, x, chosen):
        layer = lambda x, w: (x + jnp.tanh(jnp.einsum("bd,bdo->bo", x, w[chosen])), None)
        x, _ = jax.lax.scan(layer, x, params["W"].swapaxes(0, 1))
        return jnp.mean(jnp.sin(x))

    def by_hand(tape, x, chosen):
        layers = []
        for i in range(2):
            select = lambda w, x=x, i=i: jnp.einsum("bd,bdo->bo", x, w[chosen, i])
            layers.append(select)
            x = x + jnp.tanh(select(tape["W"]))
        tape(lambda w: jnp.stack([select(w) for select in layers]), "W")
        return jnp.mean(jnp.sin(x))

    expected = (Expected("W", None, "dense", 3, 3, 5),)
    return Case(loss_fn, params, (normal(3, 5, 3), integers(4, 4, 5)), by_hand, expected)


@case
def experts_in_order() -> Case:
    """`lax.ragged_dot`: tokens sorted by their experts; the last two have none."""
    params = {"W": normal(0, 4, 3, 5), "V": normal(1, 4, 5, 2)}

    def loss_fn(params, x, sizes):
        hidden = jnp.tanh(jax.lax.ragged_dot(x, params["W"], sizes))
        return jnp.mean(jnp.sin(jax.lax.ragged_dot(hidden, params["V"], sizes)))

    def by_hand(tape, x, sizes):
        before, place = jnp.cumsum(sizes) - sizes, jnp.arange(9)
        own = [(place >= before[e]) & (place < before[e] + sizes[e]) for e in range(4)]
        apply = lambda x, w: sum(mask[:, None] * (x @ w[e]) for e, mask in enumerate(own))
        hidden = jnp.tanh(tape(lambda w: apply(x, w), "W"))
        return jnp.mean(jnp.sin(tape(lambda w: apply(hidden, w), "V")))

    expected = (Expected("W", None, "dense", 3, 5, 9), Expected("V", None, "dense", 5, 2, 9))
    return Case(loss_fn, params, (normal(2, 9, 3), jnp.asarray([2, 0, 4, 1])), by_hand, expected)


def _adapters(merged: bool) -> Case:
    params = {"A": normal(0, 4, 2), "B": normal(1, 2, 5)}

    def loss_fn(params, frozen, x):
        if merged:
            return jnp.mean(jnp.sin(x @ (frozen + params["A"] @ params["B"])))
        return jnp.mean(jnp.sin(x @ frozen + 0.5 * ((x @ params["A"]) @ params["B"])))

    def by_hand(tape, frozen, x):
        if merged:
            return jnp.mean(jnp.sin(x @ (frozen + tape["A"] @ tape["B"])))
        low = tape(lambda w: x @ w, "A")
        return jnp.mean(jnp.sin(x @ frozen + 0.5 * tape(lambda w: low @ w, "B")))

    args = (normal(2, 4, 5), normal(3, 7, 4))
    expected = (Expected("A", None, "dense", 4, 2, 7), Expected("B", None, "dense", 2, 5, 7))
    if merged:
        return Case(loss_fn, params, args, by_hand, (), unclaimed=("A", "B"))
    return Case(loss_fn, params, args, by_hand, expected)


@case
def low_rank_adapters() -> Case:
    """The adapters beside a frozen weight that is no parameter."""
    return _adapters(merged=False)


@case
def low_rank_adapters_merged() -> Case:
    """The adapters multiplied into the weight: a product of two parameters."""
    return _adapters(merged=True)


def _branches(taken: bool, switch: bool) -> Case:
    params = {
        "first": normal(0, 3, 4),
        "first_bias": normal(1, 4),
        "yes": normal(2, 4, 2),
        "yes_bias": normal(3, 2),
        "no": normal(4, 4, 2),
        "both": normal(5, 2, 2),
    }

    def loss_fn(params, flag, x):
        h = jnp.tanh(x @ params["first"] + params["first_bias"][None])

        def yes(h):
            return jnp.sin(h @ params["yes"] + params["yes_bias"][None]) @ params["both"]

        def no(h):
            return jnp.cos(h @ params["no"]) @ params["both"] @ params["both"]

        if switch:
            out = jax.lax.switch(flag.astype(int), [no, yes], h)
        else:
            out = jax.lax.cond(flag, yes, no, h)
        return jnp.mean(jnp.sin(out))

    def by_hand(tape, flag, x):
        h = jnp.tanh(tape(lambda w, b: x @ w + b, "first", "first_bias"))
        if taken:
            out = jnp.sin(tape(lambda w, b: h @ w + b, "yes", "yes_bias"))
            out = tape(lambda w: out @ w, "both")
        else:
            out = jnp.cos(tape(lambda w: h @ w, "no"))
            out = tape(lambda w: out @ w, "both")
            out = tape(lambda w: out @ w, "both")
        return jnp.mean(jnp.sin(out))

    expected = (
        Expected("first", "first_bias", "dense", 3, 4, 7),
        Expected("yes", "yes_bias", "dense", 4, 2, 7 * taken),
        Expected("no", None, "dense", 4, 2, 7 * (not taken)),
        Expected("both", None, "dense", 2, 2, 7 if taken else 14, sites=None),
    )
    return Case(loss_fn, params, (jnp.asarray(taken), normal(6, 7, 3)), by_hand, expected)


@case
def cond_taken() -> Case:
    """A network inside `lax.cond`: a branch that is not taken counts no positions."""
    return _branches(taken=True, switch=False)


@case
def cond_not_taken() -> Case:
    return _branches(taken=False, switch=False)


@case
def switch_taken() -> Case:
    return _branches(taken=True, switch=True)


@case
def sharded_loss() -> Case:
    """A loss inside `shard_map` over one axis of a mesh: n counts the positions of all devices."""
    params = {
        "W1": normal(0, 3, 4),
        "b1": normal(1, 4),
        "W2": normal(2, 4, 2),
        "scale": normal(3, 2),
    }
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "unused"))
    rows, replicated = PartitionSpec("data"), PartitionSpec()

    def loss_fn(params, x, y):
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(replicated, rows, rows), out_specs=replicated
        )
        def mean_loss(params, x, y):
            hidden = jnp.tanh(x @ params["W1"] + params["b1"][None])
            output = (hidden @ params["W2"]) * params["scale"][None]
            return jax.lax.pmean(jnp.mean((output - y) ** 2), "data")

        return mean_loss(params, x, y)

    def by_hand(tape, x, y):
        hidden = jnp.tanh(tape(lambda w, b: x @ w + b, "W1", "b1"))
        output = tape(lambda w: hidden @ w, "W2")
        return mse(tape(lambda w: output * w, "scale"), y)

    expected = (
        Expected("W1", "b1", "dense", 3, 4, 8),
        Expected("W2", None, "dense", 4, 2, 8),
        Expected("scale", None, "scale", 1, 2, 8),
    )
    return Case(loss_fn, params, (normal(4, 8, 3), normal(5, 8, 2)), by_hand, expected)


def _network_parameters() -> dict[str, Array]:
    shapes = {"W1": (2, 4), "b1": (4,), "W2": (4, 4), "b2": (4,), "W3": (4, 1), "b3": (1,)}
    return {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def _network(p: dict[str, Array], x: Array) -> Array:
    """A scalar function of one point; the derivative of a sine is easily written by hand."""
    x = jnp.sin(x @ p["W1"] + p["b1"])
    x = jnp.sin(x @ p["W2"] + p["b2"])
    return (x @ p["W3"] + p["b3"])[0]


@case
def physics_gradient() -> Case:
    """The gradient with respect to the input inside the loss: weights appear transposed too."""
    params = _network_parameters()

    def loss_fn(params, x):
        value, slope = jax.vmap(jax.value_and_grad(_network, 1), (None, 0))(params, x)
        return jnp.mean((slope[:, 0] + value * slope[:, 1]) ** 2)

    def by_hand(tape, x):
        z1 = tape(lambda w, b: x @ w + b, "W1", "b1")
        z2 = tape(lambda w, b: jnp.sin(z1) @ w + b, "W2", "b2")
        value = tape(lambda w, b: jnp.sin(z2) @ w + b, "W3", "b3")[:, 0]
        back = tape(lambda w: jnp.cos(z2) * w[:, 0], "W3")
        back = jnp.cos(z1) * tape(lambda w: back @ w.T, "W2")
        slope = tape(lambda w: back @ w.T, "W1")
        return jnp.mean((slope[:, 0] + value * slope[:, 1]) ** 2)

    expected = tuple(Expected(f"W{i}", f"b{i}", None, None, None, 14, sites=2) for i in (1, 2, 3))
    return Case(loss_fn, params, (normal(10, 7, 2),), by_hand, expected)


@case
def physics_directional() -> Case:
    """A directional derivative inside the loss: the same orientation twice, the bias once."""
    params = _network_parameters()

    def loss_fn(params, x, direction):
        def along(x, direction):
            return jax.jvp(lambda x: _network(params, x), (x,), (direction,))

        value, slope = jax.vmap(along)(x, direction)
        return jnp.mean((slope + value) ** 2)

    def by_hand(tape, x, direction):
        z1 = tape(lambda w, b: x @ w + b, "W1", "b1")
        t1 = jnp.cos(z1) * tape(lambda w: direction @ w, "W1")
        z2 = tape(lambda w, b: jnp.sin(z1) @ w + b, "W2", "b2")
        t2 = jnp.cos(z2) * tape(lambda w: t1 @ w, "W2")
        value = tape(lambda w, b: jnp.sin(z2) @ w + b, "W3", "b3")
        return jnp.mean((tape(lambda w: t2 @ w, "W3") + value) ** 2)

    expected = tuple(
        Expected(f"W{i}", f"b{i}", "dense", d_in, d_out, 14, sites=2)
        for i, d_in, d_out in ((1, 2, 4), (2, 4, 4), (3, 4, 1))
    )
    args = (normal(10, 7, 2), normal(11, 7, 2))
    return Case(loss_fn, params, args, by_hand, expected)


@case
def physics_constant_direction() -> Case:
    """The derivative along one axis: the first weight meets a constant before it meets data."""
    params = _network_parameters()

    def loss_fn(params, x):
        def along(x):
            axis = jnp.asarray([1.0, 0.0])
            return jax.jvp(lambda x: _network(params, x), (x,), (axis,))

        value, slope = jax.vmap(along)(x)
        return jnp.mean((slope + value) ** 2)

    def by_hand(tape, x):
        z1 = tape(lambda w, b: x @ w + b, "W1", "b1")
        t1 = tape(lambda w: jnp.cos(z1) * w[0], "W1")
        z2 = tape(lambda w, b: jnp.sin(z1) @ w + b, "W2", "b2")
        t2 = jnp.cos(z2) * tape(lambda w: t1 @ w, "W2")
        value = tape(lambda w, b: jnp.sin(z2) @ w + b, "W3", "b3")
        return jnp.mean((tape(lambda w: t2 @ w, "W3") + value) ** 2)

    expected = (
        Expected("W1", "b1", None, None, None, 14, sites=2),
        Expected("W2", "b2", "dense", 4, 4, 14, sites=2),
        Expected("W3", "b3", "dense", 4, 1, 14, sites=2),
    )
    return Case(loss_fn, params, (normal(10, 7, 2),), by_hand, expected)


@case
def physics_laplacian() -> Case:
    """Second derivatives in the loss, with tanh: claimed or not, value and gradients are JAX's."""
    params = {"W1": normal(0, 2, 4), "b1": normal(1, 4), "W2": normal(2, 4, 1)}

    def network(p, x):
        return (jnp.tanh(x @ p["W1"] + p["b1"]) @ p["W2"])[0]

    def loss_fn(params, x):
        hessian = jax.vmap(jax.hessian(network, 1), (None, 0))(params, x)
        return jnp.mean((jnp.trace(hessian, axis1=1, axis2=2) + jnp.sum(x, axis=1)) ** 2)

    def by_hand(tape, x):
        hidden = jnp.tanh(x @ tape["W1"] + tape["b1"])
        curvature = -2 * hidden * (1 - hidden**2)
        squares = jnp.sum(tape["W1"] ** 2, 0)
        laplacian = (curvature * squares) @ tape["W2"][:, 0]
        return jnp.mean((laplacian + jnp.sum(x, 1)) ** 2)

    return Case(loss_fn, params, (normal(10, 7, 2),), by_hand, None)
