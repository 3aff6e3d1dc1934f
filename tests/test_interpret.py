"""The program that `backprop` emits: no work done twice, nothing of the original lost."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lnb

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("hidden"),
}


def normal(seed: int, *shape: int) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])
    return jnp.asarray(values, jnp.float32)


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile()


def flops(function, *args) -> float:
    costs = compiled(function, *args).cost_analysis()
    assert costs is not None
    return costs["flops"]


def temporaries(function, *args) -> int:
    memory = compiled(function, *args).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def numbers(tree):
    """The leaves that can be computed with: all but the features' seal."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.number)]


def assert_trees_close(actual, expected, tolerance=1e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(numbers(actual), numbers(expected), strict=True):
        scale = float(jnp.max(jnp.abs(right), initial=1e-3))
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * scale)


def mlp_params(*widths: int) -> list[dict[str, jax.Array]]:
    pairs = itertools.pairwise(widths)
    return [{"w": normal(i, *pair), "b": normal(9 + i, pair[1])} for i, pair in enumerate(pairs)]


def mlp_loss(params, x, y):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x @ params[-1]["w"] + params[-1]["b"][None] - y) ** 2)


@pytest.mark.parametrize("rows", ["auto", "all"])
def test_features_cost_nothing(rows):
    """They are there already: no forward work is done twice."""
    widths, n = (12, 160, 16, 96), 1024
    params, args = mlp_params(*widths), (normal(1, n, widths[0]), normal(2, n, widths[-1]))
    neurons = lnb.find_neurons(mlp_loss, params, *args, rows=rows)
    ours = flops(lnb.backprop(mlp_loss, neurons), params, *args)
    assert ours <= 1.01 * flops(jax.value_and_grad(mlp_loss), params, *args)
    forward = flops(lnb.forward_features(mlp_loss, neurons), params, *args)
    assert forward <= 1.01 * flops(mlp_loss, params, *args)


def stacked(policy: str | None, has_aux: bool):
    """Eight residual blocks in one scan, rematerialised unless the policy is None."""
    layers, d, hidden, n = 8, 16, 32, 2048
    params = {
        "wide": normal(0, layers, d, hidden),
        "bias": normal(1, layers, hidden),
        "narrow": normal(2, layers, hidden, d),
        "head": normal(3, d, 4),
    }

    def block(x, p):
        h = jnp.tanh(x @ p["wide"] + p["bias"][None])
        h = checkpoint_name(h, "hidden")
        return x + jnp.sin(h) @ p["narrow"], None

    if policy is not None:
        block = jax.checkpoint(block, policy=POLICIES[policy], prevent_cse=False)

    def loss_fn(params, x):
        stack = {name: params[name] for name in ("wide", "bias", "narrow")}
        x, _ = jax.lax.scan(block, x, stack)
        loss = jnp.mean(jnp.sin(x @ params["head"]))
        return (loss, {"largest": jnp.max(x)}) if has_aux else loss

    return loss_fn, params, normal(4, n, d)


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_remat_under_scan(policy: str, has_aux: bool):
    """Temporaries stay flat; what each policy saves is saved, and no more."""
    loss_fn, params, x = stacked(policy, has_aux)
    neurons = lnb.find_neurons(loss_fn, params, x, has_aux=has_aux)
    backprop = lnb.backprop(loss_fn, neurons)
    ours = temporaries(backprop, params, x)
    theirs = temporaries(jax.value_and_grad(loss_fn, has_aux=has_aux), params, x)
    features = jax.eval_shape(backprop, params, x)[-1]
    assert 0.9 * theirs <= ours <= 1.1 * theirs + 2 * size(features)


def test_remat_under_scan_saves_memory():
    """The settings above are told apart by the memory they take."""
    sizes = [
        temporaries(jax.value_and_grad(loss_fn), params, x)
        for loss_fn, params, x in (stacked(policy, False) for policy in (*POLICIES, None))
    ]
    nothing, everything, named, none = sizes
    assert nothing < 0.75 * named < 0.75 * everything <= none


def test_rows_stay_few_over_time():
    """Weights shared over a scan: sixteen examples of each iteration are kept."""
    steps, n, d = 64, 64, 16
    params = {"w": normal(0, d, d), "b": normal(1, d)}

    def loss_fn(params, x):
        @jax.checkpoint
        def step(h, x):
            return jnp.tanh((h + x) @ params["w"] + params["b"][None]), None

        h, _ = jax.lax.scan(step, jnp.zeros((n, d)), x)
        return jnp.mean(h)

    x = normal(2, steps, n, d)
    neurons = lnb.find_neurons(loss_fn, params, x)
    assert neurons["w"].rows == 16 * steps
    backprop = lnb.backprop(loss_fn, neurons)
    rows = 16 * steps * d * x.dtype.itemsize
    assert size(jax.eval_shape(backprop, params, x)[-1]) < 1.1 * rows
    extra = temporaries(backprop, params, x) - temporaries(jax.value_and_grad(loss_fn), params, x)
    assert extra < 4 * rows


def test_keeps_custom_jvp():
    """A rule that is not the derivative of its body, between two neurons."""

    @jax.custom_jvp
    def activation(x):
        return jnp.round(x)

    @activation.defjvp
    def _(primals, tangents):
        return activation(*primals), 3 * tangents[0]

    def loss_fn(params, x):
        return jnp.mean(jnp.sin(activation(x @ params["w"]) @ params["v"]))

    params = {"w": 3 * normal(0, 4, 5), "v": normal(1, 5, 2)}
    x = normal(2, 7, 4)
    neurons = lnb.find_neurons(loss_fn, params, x)
    assert {neuron.name for neuron in neurons} == {"w", "v"}
    value, gradients, _ = jax.jit(lnb.backprop(loss_fn, neurons))(params, x)
    assert float(jnp.max(jnp.abs(gradients["w"]))) > 0
    assert_trees_close((value, gradients), jax.value_and_grad(loss_fn)(params, x))


def test_keeps_custom_vjp():
    """A gradient reversal between two neurons, one around a parameter, neither seen through."""

    @jax.custom_vjp
    def reverse(x):
        return jnp.sin(x)

    reverse.defvjp(lambda x: (reverse(x), None), lambda _, g: (-g,))

    @jax.custom_vjp
    def opaque(x, w):
        return x @ w

    opaque.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, 2 * r[0].T @ g))

    def loss_fn(params, x):
        x = opaque(reverse(x @ params["w"]), params["hidden"])
        return jnp.mean(jnp.sin(x @ params["v"]))

    params = {"w": normal(0, 4, 5), "hidden": normal(1, 5, 3), "v": normal(2, 3, 2)}
    x = normal(3, 7, 4)
    neurons = lnb.find_neurons(loss_fn, params, x)
    assert {neuron.name for neuron in neurons} == {"w", "v"}
    ((path, reason),) = neurons.unclaimed
    assert path == "hidden"
    assert "custom_vjp" in reason
    value, gradients, _ = jax.jit(lnb.backprop(loss_fn, neurons))(params, x)
    assert_trees_close((value, gradients), jax.value_and_grad(loss_fn)(params, x))
    jaxpr = str(jax.make_jaxpr(lnb.forward_features(loss_fn, neurons))(params, x))
    assert "custom_vjp_call" in jaxpr


def data_mesh() -> Mesh:
    assert jax.device_count() >= 8
    return Mesh(np.array(jax.devices()[:8]), ("data",))


def everything(loss_fn, neurons):
    """Value, gradients, and M times the gradients."""

    def run(params, *args):
        value, gradients, features = lnb.backprop(loss_fn, neurons)(params, *args)
        return value, gradients, lnb.metric_product(neurons, features, gradients)

    return jax.jit(run)


@pytest.mark.parametrize("rows", ["auto", "all"])
def test_data_parallel_shard_map(rows: str):
    """A mean over eight devices inside `shard_map` is the mean over the whole batch."""
    params, args = mlp_params(6, 10, 3), (normal(1, 16, 6), normal(2, 16, 3))
    batch, whole = PartitionSpec("data"), PartitionSpec()

    @functools.partial(
        jax.shard_map, mesh=data_mesh(), in_specs=(whole, batch, batch), out_specs=whole
    )
    def sharded_loss(params, x, y):
        return jax.lax.pmean(mlp_loss(params, x, y), "data")

    whole_neurons = lnb.find_neurons(mlp_loss, params, *args, rows=rows)
    neurons = lnb.find_neurons(sharded_loss, params, *args, rows=rows)
    assert [n.name for n in neurons] == [n.name for n in whole_neurons]
    expected = everything(mlp_loss, whole_neurons)(params, *args)
    assert_trees_close(everything(sharded_loss, neurons)(params, *args), expected)


@pytest.mark.parametrize("rows", ["auto", "all"])
def test_sharded_batch(rows: str):
    """A batch spread over eight devices by its sharding alone."""
    params, args = mlp_params(6, 10, 3), (normal(1, 16, 6), normal(2, 16, 3))
    neurons = lnb.find_neurons(mlp_loss, params, *args, rows=rows)
    run = everything(mlp_loss, neurons)
    spread = jax.device_put(args, NamedSharding(data_mesh(), PartitionSpec("data")))
    replicated = jax.device_put(params, NamedSharding(data_mesh(), PartitionSpec()))
    assert_trees_close(run(replicated, *spread), run(params, *args))


def test_keeps_shardings():
    """Gradients are laid out as `value_and_grad` lays them out; constraints inside stay."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))

    def sharding(*axes):
        return NamedSharding(mesh, PartitionSpec(*axes))

    def loss_fn(params, x):
        hidden = jax.nn.relu(x @ params["w"] + params["b"][None])
        hidden = jax.lax.with_sharding_constraint(hidden, sharding("data", "model"))
        return jnp.mean(jnp.sin(hidden @ params["v"]))

    params = {"w": normal(0, 6, 8), "b": normal(1, 8), "v": normal(2, 8, 4)}
    layout = {"w": sharding(None, "model"), "b": sharding("model"), "v": sharding("model", None)}
    params, x = jax.device_put(params, layout), jax.device_put(normal(3, 16, 6), sharding("data"))
    neurons = lnb.find_neurons(loss_fn, params, x, rows="all")
    assert [neuron.bias for neuron in neurons if neuron.name == "w"] == ["b"]

    backprop = lnb.backprop(loss_fn, neurons)
    ours, theirs = jax.jit(backprop), jax.jit(jax.value_and_grad(loss_fn))
    value, gradients, _ = ours(params, x)
    assert_trees_close((value, gradients), theirs(params, x))
    for name, gradient in theirs(params, x)[1].items():
        assert gradients[name].sharding.is_equivalent_to(gradient.sharding, gradient.ndim)
    jaxpr = str(jax.make_jaxpr(lnb.forward_features(loss_fn, neurons))(params, x))
    assert "sharding_constraint" in jaxpr


def test_bit_identical():
    """Emitting features does not change the numbers of the model."""
    params, args = mlp_params(6, 10, 3), (normal(1, 16, 6), normal(2, 16, 3))
    neurons = lnb.find_neurons(mlp_loss, params, *args)
    value, gradients, _ = jax.jit(lnb.backprop(mlp_loss, neurons))(params, *args)
    expected = jax.jit(jax.value_and_grad(mlp_loss))(params, *args)
    jax.tree.map(np.testing.assert_array_equal, (value, gradients), expected)


def test_features_carry_no_gradient():
    """`stop_gradient` on what is emitted: a loss of features is flat."""
    params, args = mlp_params(4, 5, 2), (normal(1, 7, 4), normal(2, 7, 2))
    neurons = lnb.find_neurons(mlp_loss, params, *args)

    def total(params):
        features = lnb.forward_features(mlp_loss, neurons)(params, *args)
        return sum(jnp.sum(leaf) for leaf in numbers(features))

    assert all(not jnp.any(leaf) for leaf in jax.tree.leaves(jax.grad(total)(params)))


@pytest.mark.parametrize("rows", ["auto", "all"])
def test_last_smaller_batch(rows: str):
    """Neurons found with one batch size serve another; n follows the batch at hand."""
    params = mlp_params(4, 5, 2)
    full = (normal(1, 9, 4), normal(2, 9, 2))
    last = (full[0][:5], full[1][:5])
    neurons = lnb.find_neurons(mlp_loss, params, *full, rows=rows)
    own = lnb.find_neurons(mlp_loss, params, *last, rows=rows)
    expected = everything(mlp_loss, own)(params, *last)
    assert_trees_close(everything(mlp_loss, neurons)(params, *last), expected)


def test_keyword_arguments():
    params, (x, y) = mlp_params(4, 5, 2), (normal(1, 7, 4), normal(2, 7, 2))
    neurons = lnb.find_neurons(mlp_loss, params, x, y=y)
    assert neurons == lnb.find_neurons(mlp_loss, params, x, y)
    value, gradients, features = lnb.backprop(mlp_loss, neurons)(params, x, y=y)
    assert_trees_close((value, gradients), jax.value_and_grad(mlp_loss)(params, x, y=y))
    assert_trees_close(lnb.forward_features(mlp_loss, neurons)(params, x, y=y), features)


def test_static_arguments():
    """What `jax.value_and_grad` hands through untouched: flags, names, functions."""

    def loss_fn(params, apply, x, train=False, activation="tanh"):
        hidden = getattr(jnp, activation)(apply(x, params["w"]))
        return jnp.mean(hidden @ params["v"]) if train else jnp.mean(hidden)

    params, x = {"w": normal(0, 4, 5), "v": normal(1, 5, 2)}, normal(2, 7, 4)
    options = {"train": True, "activation": "sin"}
    neurons = lnb.find_neurons(loss_fn, params, jnp.matmul, x, **options)
    assert {neuron.name for neuron in neurons} == {"w", "v"}
    value, gradients, _ = lnb.backprop(loss_fn, neurons)(params, jnp.matmul, x, **options)
    expected = jax.value_and_grad(loss_fn)(params, jnp.matmul, x, **options)
    assert_trees_close((value, gradients), expected)


def test_numpy_arrays():
    """Parameters and batch that are no JAX arrays yet."""
    params, args = mlp_params(4, 5, 2), (normal(1, 7, 4), normal(2, 7, 2))
    neurons = lnb.find_neurons(mlp_loss, params, *args)
    plain_params, plain_args = jax.tree.map(np.asarray, (params, args))
    assert lnb.find_neurons(mlp_loss, plain_params, *plain_args) == neurons
    backprop = lnb.backprop(mlp_loss, neurons)
    assert_trees_close(backprop(plain_params, *plain_args), backprop(params, *args))


def test_inside_other_transformations():
    """A step inside `lax.scan`, and under `vmap` over seeds."""
    params, (x, y) = mlp_params(4, 5, 2), (normal(1, 3, 7, 4), normal(2, 3, 7, 2))
    neurons = lnb.find_neurons(mlp_loss, params, x[0], y[0], rows="all")
    backprop = lnb.backprop(mlp_loss, neurons)
    _, scanned = jax.lax.scan(lambda p, batch: (p, backprop(p, *batch)), params, (x, y))
    assert_trees_close(jax.vmap(backprop, (None, 0, 0))(params, x, y), scanned)
    one_by_one = [backprop(params, *batch) for batch in zip(x, y, strict=True)]
    assert_trees_close(scanned, jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one))
