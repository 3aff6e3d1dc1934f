"""`Neurons` as a value: what it says of itself, and where it can be put."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lnb


def params_and_batch():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "embed": normal(11, 6),
        "position": normal(5, 6),
        "first": {"w": normal(6, 16), "b": normal(16)},
        "scale": normal(16),
        "second": {"w": normal(16, 3)},
        "normed": normal(3, 3),
    }
    return params, jnp.asarray(rng.integers(11, size=(4, 5)))


def loss_fn(params, tokens):
    x = params["embed"][tokens] + params["position"][None]
    x = jnp.sin(x @ params["first"]["w"] + params["first"]["b"][None, None])
    x = jnp.sin(x * params["scale"][None, None]) @ params["second"]["w"]
    normed = params["normed"] / jnp.linalg.norm(params["normed"])
    return jnp.mean(jnp.sin(x @ normed))


def find(**options) -> lnb.Neurons:
    return lnb.find_neurons(loss_fn, *params_and_batch(), **options)


def test_table():
    """A line a neuron: name, kind, shape, bias, sites, how M is held, its share; then the rest."""
    neurons = find()
    table = str(neurons)
    assert table == repr(neurons)
    lines = table.splitlines()
    for neuron in neurons:
        (line,) = [line for line in lines if line.split()[:1] == [neuron.name]]
        assert neuron.kind in line.split(), line
        if neuron.kind != "identity":
            assert str(neuron.sites) in line.split(), line
            assert str(neuron.d_in) in line
            assert str(neuron.d_out) in line
            assert "%" in line
        if neuron.bias is not None:
            assert neuron.bias in line
    for path, reason in neurons.unclaimed:
        (line,) = [line for line in lines if path in line]
        assert reason in line
    widest = max(len(line) for line in lines)
    assert widest <= 120, "a table wider than a terminal"


def test_table_costs():
    """Each neuron's, in parts of backpropagation, and below them their sum."""
    *costs, total = [float(word.rstrip("%")) for word in str(find()).split() if "%" in word]
    assert len(costs) == len(find())
    assert total == pytest.approx(sum(costs), abs=0.05 * len(costs) + 0.1)
    assert min(costs) == 0 < max(costs)


def test_fields():
    found = {neuron.name: neuron for neuron in find()}
    assert set(found) == {"embed", "position", "first.w", "scale", "second.w"}
    first = found["first.w"]
    assert (first.weight, first.bias, first.kind) == ("first.w", "first.b", "dense")
    assert (first.d_in, first.d_out, first.sites) == (6, 16, 1)
    assert found["position"].kind == "identity"
    assert found["embed"].kind == "lookup"
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.name = "other"  # pyright: ignore[reportAttributeAccessIssue]


def test_unclaimed():
    ((path, reason),) = find().unclaimed
    assert path == "normed"
    assert reason


def test_value_semantics():
    """Equal and hashable: usable as a static argument, closed over, in a set."""
    neurons = find()
    assert neurons == find()
    assert hash(neurons) == hash(find())
    assert neurons != find(rows="all")
    assert len({neurons, find(), find(rows="all")}) == 2
    assert len(neurons) == len(list(neurons)) == 5
    with pytest.raises((AttributeError, TypeError)):
        neurons.unclaimed = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_static_argument():
    """No second compilation for an equal `Neurons`."""
    params, tokens = params_and_batch()
    traces = []

    def step(neurons, params, tokens):
        traces.append(neurons)
        return lnb.backprop(loss_fn, neurons)(params, tokens)[0]

    step = jax.jit(step, static_argnums=0)
    step(find(), params, tokens)
    step(find(), params, tokens)
    assert len(traces) == 1


def test_abstract_values():
    """Shapes are enough: nothing is computed."""
    params, tokens = params_and_batch()

    def shapes(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)

    abstract = lnb.find_neurons(loss_fn, shapes(params), shapes(tokens))
    assert abstract == lnb.find_neurons(loss_fn, params, tokens)
    assert abstract == lnb.find_neurons(loss_fn, shapes(params), tokens)


def test_a_costly_neuron():
    """More inputs than a batch of this size should be inverted for."""
    shape = jax.ShapeDtypeStruct

    def loss_fn(params, x):
        return jnp.mean(jnp.sin(jnp.sin(x @ params["tall"]) @ params["wide"]))

    params = {"tall": shape((2048, 8), jnp.float32), "wide": shape((8, 64), jnp.float32)}
    with pytest.warns(UserWarning, match=r"(?s)predicted to cost .* times .*'tall'"):
        lnb.find_neurons(loss_fn, params, shape((64, 2048), jnp.float32))


def test_labels():
    """A tree for `optax.partition`, shaped like the parameters."""
    params, _ = params_and_batch()
    neurons = find()
    labels = neurons.labels(params)
    assert jax.tree.structure(labels) == jax.tree.structure(params)
    solved = ("embed", "first.w", "first.b", "scale", "second.w")
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        assert label == ("lnb" if name in solved else "identity"), name


def test_counters_of_two_loops_meet():
    """What a loop has counted is no longer known behind it: the lengths may differ."""

    def loss_fn(params, x):
        def layer(i, carry):
            x, count = carry
            return jnp.tanh(x @ params["w"][i]), count + 1

        x, first = jax.lax.fori_loop(0, 3, layer, (x, 0))
        x, second = jax.lax.fori_loop(0, 2, layer, (x, 0))
        return jnp.mean(x) / (first + second)

    (neuron,) = lnb.find_neurons(loss_fn, {"w": jnp.ones((3, 4, 4))}, jnp.ones((6, 4)))
    assert neuron.sites == 2


def test_a_scale_whose_output_is_used_twice():
    """Each use multiplies it by more data: what the scale is fed ends before that."""

    def loss_fn(params, x, y, z):
        scaled = params["scale"][None] * x
        return jnp.sum(jnp.sin(scaled.reshape(-1) * y)) + jnp.sum(jnp.cos(scaled.T * z))

    params, x = {"scale": jnp.ones(2)}, jnp.arange(6.0).reshape(3, 2)
    args = x, jnp.arange(6.0), jnp.ones((2, 3))
    neurons = lnb.find_neurons(loss_fn, params, *args)
    features = lnb.forward_features(loss_fn, neurons)(params, *args)
    product = lnb.metric_product(neurons, features, params)
    assert jnp.allclose(product["scale"], jnp.mean(x**2, axis=0))
