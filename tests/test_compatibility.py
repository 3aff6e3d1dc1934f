"""One suite for every optimizer: `lnb` with each solver and norm, and the paper's two algorithms.

What can go wrong with each is tested with each, without compiling where tracing tells. What depends
on the solver's state alone is tested with each solver, what depends on neither with one of them.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from optimizers import (
    EVERY,
    EVERY_SOLVER,
    OPTIMIZERS,
    RATE,
    SOME,
    assert_close,
    assert_equal,
    compile_step,
    compiled,
    find,
    loss_fn,
    make_batch,
    make_params,
    make_step,
)

import lnb


def types(tree) -> Any:
    """Structure, shapes, dtypes and weak types."""
    avals = jax.eval_shape(lambda: tree) if not is_abstract(tree) else tree
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), avals)


def is_abstract(tree) -> bool:
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))


def assert_steady(optimizer, params=None, batch=None, **extra):
    """Traces a step: parameters and state come out with the types that they had."""
    params = make_params() if params is None else params
    batch = make_batch() if batch is None else batch
    state = jax.eval_shape(optimizer.init, params)
    new_params, new_state, _ = jax.eval_shape(make_step(optimizer, **extra), params, state, *batch)
    assert types(new_params) == types(params)
    assert types(new_state) == types(state)


def test_the_network():
    assert [neuron.name for neuron in find()] == ["first.w", "second.w"]
    assert [path for path, _ in find().unclaimed] == ["temperature"]


# Training


@EVERY
def test_training_lowers_the_loss_without_recompilation(name):
    program = compiled(name)
    params, state, (before,) = program.run(*program.start(), 1)
    traces = len(program.traces)
    _, new_state, losses = program.run(params, state, 40)
    assert losses[-1] < 0.5 * before
    assert len(program.traces) == traces
    assert types(new_state) == types(state) == types(program.start()[1])


@EVERY
def test_smaller_last_batch_keeps_all_types(name):
    assert_steady(compiled(name).optimizer, batch=make_batch(5))


@pytest.mark.parametrize("name", ["cholesky-network", "woodbury-network"])
def test_smaller_last_batch_is_one_more_trace(name):
    program = compiled(name)
    params, state, _ = program.run(*program.start(), 2)
    before = len(program.traces)
    for _ in range(2):
        params, state, loss = program.step(params, state, *make_batch(5))
        assert np.isfinite(loss)
    assert len(program.traces) == before + 1
    program.run(params, state, 1)
    assert len(program.traces) == before + 1


@EVERY
def test_init_on_abstract_values(name):
    optimizer, params = compiled(name).optimizer, make_params()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    assert types(jax.eval_shape(optimizer.init, shapes)) == types(optimizer.init(params))


@EVERY
def test_types_inside_scan(name):
    optimizer, params = compiled(name).optimizer, make_params()
    step = make_step(optimizer)

    def body(carry, batch):
        params, state, loss = step(*carry, *batch)
        return (params, state), loss

    batches = jax.tree.map(lambda x: jnp.stack([x] * 3), make_batch())
    state = jax.eval_shape(optimizer.init, params)
    _, losses = jax.eval_shape(partial(lax.scan, body), (params, state), batches)
    assert losses.shape == (3,)


@SOME
def test_scan_is_a_loop(name):
    program = compiled(name)
    params, state = program.start()

    @jax.jit
    def scan(params, state):
        def body(carry, _):
            return make_step(program.optimizer)(*carry, *make_batch())[:2], None

        return lax.scan(body, (params, state), length=4)[0]

    assert_close(scan(params, state)[0], program.run(params, state, 4)[0], rtol=1e-3, atol=1e-4)


@EVERY
def test_unknown_extra_arguments_are_swallowed(name):
    extra = {"value": jnp.zeros(()), "key": jax.random.key(0), "value_fn": loss_fn, "epoch": 3}
    assert_steady(compiled(name).optimizer, **extra)


def cast(tree, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), tree)


@EVERY
def test_types_with_bfloat16_parameters(name):
    params, batch = cast((make_params(), make_batch()), jnp.bfloat16)
    optimizer = compiled(name).optimizer
    assert_steady(optimizer, params, batch)
    # All that is remembered is float32 at least.
    state = jax.eval_shape(optimizer.init, params)
    assert not any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(state))


@SOME
def test_training_with_bfloat16_parameters(name):
    program, params = compiled(name), cast(make_params(), jnp.bfloat16)
    batch = cast(make_batch(), jnp.bfloat16)
    state, losses = program.optimizer.init(params), []
    step = jax.jit(make_step(program.optimizer))
    for _ in range(30):
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


# Checkpoints


@EVERY
def test_state_survives_a_round_trip_through_its_leaves(name):
    program = compiled(name)
    params, state, _ = program.run(*program.start(), 2)
    leaves, structure = jax.tree.flatten((params, state))
    restored = jax.tree.unflatten(structure, [np.array(leaf) for leaf in leaves])
    again, _, _ = program.run(restored[0], restored[1], 2)
    assert_equal(again, program.run(params, state, 2)[0])


@EVERY_SOLVER
def test_state_survives_a_checkpoint(name, tmp_path):
    program = compiled(name)
    params, state, _ = program.run(*program.start(), 2)
    abstract = jax.eval_shape(lambda: (make_params(), program.optimizer.init(make_params())))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", (params, state))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", abstract)
    assert_equal(restored, (params, state))
    again, _, _ = program.run(restored[0], restored[1], 2)
    assert_equal(again, program.run(params, state, 2)[0])


# Inside other transformations


def in_chain(make, **options):
    return optax.chain(optax.clip(0.01), make(RATE, find(), **options))


def in_partition(make, **options):
    parts: dict[Any, Any] = {"lnb": make(RATE, find(), **options), "identity": optax.sgd(RATE)}
    return optax.partition(parts, find().labels)


def without(make, path: str, **options):
    """Inside a mask that leaves out one parameter, or one neuron."""
    mask = jax.tree_util.tree_map_with_path(
        lambda p, _: not jax.tree_util.keystr(p, simple=True, separator=".").startswith(path),
        make_params(),
    )
    return optax.masked(make(RATE, find(), **options), mask)


def with_hyperparams(make, **options):
    numbers = {"learning_rate": RATE, "damping": 0.3, "min_norm": 0.02, "weight_decay": 0.01}
    return optax.inject_hyperparams(make)(neurons=find(), **(numbers | options))


WRAPPERS = {
    "chain": in_chain,
    "partition": in_partition,
    "masked neuron": partial(without, path="first"),
    "masked bias": partial(without, path="first.b"),
    "inject_hyperparams": with_hyperparams,
    "apply_if_finite": lambda make: optax.apply_if_finite(make(RATE, find()), 3),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@EVERY
def test_types_inside(name, wrapper):
    assert_steady(WRAPPERS[wrapper](OPTIMIZERS[name]))


@EVERY
def test_types_inside_multi_steps(name):
    with jax.numpy_dtype_promotion("standard"):  # it adds integers to floats
        assert_steady(optax.MultiSteps(compiled(name).optimizer, 2))


class Backprop(NamedTuple):
    loss: jax.Array
    gradients: Any
    features: Any


@cache
def backprop(**options) -> Backprop:
    step = jax.jit(lnb.backprop(loss_fn, find(**options)))
    return Backprop(*step(make_params(), *make_batch()))


def updates_of(optimizer, gradients=None, features=None):
    """One step from the start."""
    gradients = backprop().gradients if gradients is None else gradients
    features = backprop().features if features is None else features

    @jax.jit
    def update(gradients, features, params):
        state = optimizer.init(params)
        return optimizer.update(gradients, state, params, features=features)[0]

    return update(gradients, features, make_params())


@SOME
def test_chain_passes_what_it_clips(name):
    clipped = jax.tree.map(lambda g: jnp.clip(g, -0.01, 0.01), backprop().gradients)
    bare = OPTIMIZERS[name](RATE, find())
    expected = updates_of(bare, clipped)
    assert_close(updates_of(in_chain(OPTIMIZERS[name])), expected)
    assert not np.allclose(expected["second"]["w"], updates_of(bare)["second"]["w"])


def test_partition_gives_each_part_to_its_optimizer():
    make = partial(OPTIMIZERS["cholesky-spectral"], weight_decay=0.0)
    updates = updates_of(in_partition(make))
    expected = updates_of(make(RATE, find()))
    expected["temperature"] = -RATE * backprop().gradients["temperature"]
    assert_close(updates, expected, rtol=1e-4, atol=1e-5)


def test_masked_neuron_is_skipped():
    make = partial(OPTIMIZERS["cholesky-spectral"], weight_decay=0.0)
    updates = updates_of(without(make, "first"))
    expected = updates_of(make(RATE, find())) | {"first": backprop().gradients["first"]}
    assert_close(updates, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("solver", [lnb.Cholesky(), lnb.Krylov()])
def test_masked_bias_gives_the_metric_without_bias(solver):
    c = 1e3  # more than any norm
    _, gradients, features = backprop()

    def make(_, __):
        return lnb.algorithm1(c, find(), solver=solver, damping=0.1, min_norm=c)

    updates = updates_of(without(make, "first.b"), gradients, features)
    assert_equal(updates["first"]["b"], gradients["first"]["b"])
    x = np.asarray(make_batch()[0])
    matrix = x.T @ x / len(x) + 0.1 * np.eye(9)
    expected = -np.linalg.solve(matrix, gradients["first"]["w"])
    np.testing.assert_allclose(updates["first"]["w"], expected, rtol=1e-3, atol=1e-4)
    with_bias = updates_of(make(None, None), gradients, features)
    assert np.abs(with_bias["first"]["w"] - expected).max() > 0.01


@SOME
def test_injected_hyperparameters_are_obeyed(name):
    program = compile_step(with_hyperparams(OPTIMIZERS[name]))
    params, state = program.start()
    numbers = {"learning_rate": 0.05, "damping": 0.7, "min_norm": 5.0, "weight_decay": 0.2}
    hyperparams = {key: jnp.asarray(value, jnp.float32) for key, value in numbers.items()}
    state = state._replace(hyperparams=state.hyperparams | hyperparams)
    new_params, _, _ = program.step(params, state, *make_batch())
    rate = numbers.pop("learning_rate")
    expected = updates_of(OPTIMIZERS[name](rate, find(), **numbers))
    assert_close(new_params, optax.apply_updates(params, expected))


def test_a_rate_can_be_injected_as_a_schedule():
    schedule = optax.linear_schedule(0.1, 0.0, 2)
    injected = optax.inject_hyperparams(lnb.lnb)(schedule, find(), weight_decay=0.0)
    program = compile_step(injected)
    params, state, _ = program.run(*program.start(), 2)
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 0.05)
    assert_equal(program.run(params, state, 1)[0], params)  # at rate 0


def test_apply_if_finite_sees_it_first():
    bare = compiled("algorithm2")
    program = compile_step(optax.apply_if_finite(bare.optimizer, 3))
    (params, state), (x, y, weight) = program.start(), make_batch()
    expected, _, _ = bare.run(*bare.start(), 1)
    assert_close(program.step(params, state, x, y, weight)[0], expected)
    new_params, new_state, _ = program.step(params, state, x, y * jnp.nan, weight)
    assert_equal(new_params, params)
    assert new_state.total_notfinite == 1


# Accumulation


@jax.numpy_dtype_promotion("standard")
def test_multi_steps_accumulates_gradients():
    """The features are those of the last call."""
    bare = compiled("algorithm2")
    multi = compile_step(optax.MultiSteps(bare.optimizer, 2))
    expected, bare_state, _ = bare.run(*bare.start(), 2)
    first, state, _ = multi.run(*multi.start(), 1)
    assert_equal(first, make_params())
    actual, state, _ = multi.run(first, state, 3)
    assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert_close(lnb.diagnostics(state), lnb.diagnostics(bare_state), rtol=1e-3, atol=1e-4)


# Memory and devices


@EVERY
def test_no_two_parts_of_a_state_share_their_memory(name):
    """Else they could not be donated."""
    state = compiled(name).optimizer.init(make_params())
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_parameters_and_state_can_be_donated():
    program = compiled("cholesky-network")
    expected, _, _ = program.run(*program.start(), 2)
    step = jax.jit(make_step(program.optimizer), donate_argnums=(0, 1))
    donated = program.start()
    for _ in range(2):
        before, (*donated, _) = donated, step(*donated, *make_batch())
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert_close(donated[0], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["cholesky-spectral", "algorithm2"])
def test_data_parallel_training_is_the_same(name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    neurons, params, batch = find(), make_params(), make_batch(16)
    optimizer = OPTIMIZERS[name](RATE, neurons)
    step = jax.jit(make_step(optimizer, neurons))

    def run(params, batch):
        state = optimizer.init(params)
        for _ in range(3):
            params, state, loss = step(params, state, *batch)
        return params, loss

    sharded = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    replicated = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    actual, loss = run(replicated, sharded)
    assert len(loss.sharding.device_set) == 8
    assert_close(actual, run(params, batch)[0], rtol=1e-3, atol=1e-4)


# Libraries


def relaxed(function):
    """For layers that promote ranks."""

    def wrapped(*args):
        with jax.numpy_rank_promotion("allow"):
            return function(*args)

    return wrapped


def make_data() -> tuple[jax.Array, jax.Array]:
    x, y, _ = make_batch()
    return x, y


def assert_learns(step: Callable, *state, steps: int = 20):
    """Runs `(*state, x, y) -> (*state, loss)`."""
    losses = []
    for _ in range(steps):
        *state, loss = step(*state, *make_data())
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


def assert_tree_learns(loss_fn: Callable, params):
    """With parameters that are a plain pytree."""
    neurons = lnb.find_neurons(loss_fn, params, *make_data())
    optimizer = lnb.lnb(RATE, neurons)

    @jax.jit
    def step(params, state, x, y):
        loss, gradients, features = lnb.backprop(loss_fn, neurons)(params, x, y)
        updates, state = optimizer.update(gradients, state, params, features=features)
        return optax.apply_updates(params, updates), state, loss

    assert_learns(step, params, optimizer.init(params))


def squared_error(outputs, y):
    return 0.5 * jnp.mean(jnp.sum((outputs - y) ** 2, axis=1))


@pytest.mark.parametrize("whole", [False, True])
def test_equinox(whole):
    """`update` takes the model's arrays, or the whole model, functions and all."""
    model = eqx.nn.MLP(9, 2, 12, 1, activation=jnp.tanh, key=jax.random.key(0))

    def loss_fn(model, x, y):
        return squared_error(jax.vmap(model)(x), y)

    neurons = lnb.find_neurons(loss_fn, model, *make_data())
    assert [neuron.bias for neuron in neurons] == ["layers.0.bias", "layers.1.bias"]
    optimizer = lnb.lnb(RATE, neurons)
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, x, y):
        loss, gradients, features = lnb.backprop(loss_fn, neurons)(model, x, y)
        params = model if whole else eqx.filter(model, eqx.is_inexact_array)
        updates, state = optimizer.update(gradients, state, params, features=features)
        return eqx.apply_updates(model, updates), state, loss

    assert_learns(step, model, state)


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(9, 12, rngs=rngs)
        self.second = nnx.Linear(12, 2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def test_nnx_split():
    model = NNXModel(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    @relaxed
    def loss_fn(params, x, y):
        return squared_error(nnx.merge(graph, params, rest)(x), y)

    assert_tree_learns(loss_fn, params)


def test_nnx_optimizer():
    model = NNXModel(nnx.Rngs(0))
    graph = nnx.graphdef(model)

    @relaxed
    def loss_fn(params, x, y):
        return squared_error(nnx.merge(graph, params)(x), y)

    neurons = lnb.find_neurons(loss_fn, nnx.state(model, nnx.Param), *make_data())
    optimizer = nnx.Optimizer(model, lnb.lnb(RATE, neurons), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        params = nnx.state(model, nnx.Param)
        loss, gradients, features = lnb.backprop(loss_fn, neurons)(params, x, y)
        optimizer.update(model, gradients, features=features)
        return loss

    assert_learns(lambda x, y: (step(model, optimizer, x, y),))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(jnp.tanh(nn.Dense(12)(x)))


def test_linen_train_state():
    """`TrainState.apply_gradients` cannot pass features; its three lines, written out, can."""
    model = LinenModel()
    params = relaxed(model.init)(jax.random.key(0), make_data()[0])["params"]

    @relaxed
    def loss_fn(params, x, y):
        return squared_error(model.apply({"params": params}, x), y)

    neurons = lnb.find_neurons(loss_fn, params, *make_data())
    optimizer = lnb.lnb(RATE, neurons)
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    @jax.jit
    def step(state, x, y):
        loss, gradients, features = lnb.backprop(loss_fn, neurons)(state.params, x, y)
        updates, opt_state = state.tx.update(
            gradients, state.opt_state, state.params, features=features
        )
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, loss

    assert_learns(step, train_state)


def test_haiku():
    @relaxed
    def model(x):
        return hk.nets.MLP([12, 2], activation=jnp.tanh)(x)

    transformed = hk.without_apply_rng(hk.transform(model))
    params = transformed.init(jax.random.key(0), make_data()[0])

    def loss_fn(params, x, y):
        return squared_error(transformed.apply(params, x), y)

    assert_tree_learns(loss_fn, params)


def test_a_last_batch_of_one_example():
    """On the network of the README, whose features are thinned out."""

    def readme_loss(params, x, y):
        hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
        logits = hidden @ params["w2"] + params["b2"][None]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "w1": jax.random.normal(keys[0], (20, 64)) / 20**0.5,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, 10)) / 8.0,
        "b2": jnp.zeros(10),
    }
    x = jax.random.normal(keys[2], (256, 20))
    y = jax.random.randint(keys[3], (256,), 0, 10)
    neurons = lnb.find_neurons(readme_loss, params, x, y)
    optimizer = lnb.lnb(0.03, neurons)

    @jax.jit
    def step(params, state, x, y):
        backprop = lnb.backprop(readme_loss, neurons)
        loss, grads, features = backprop(params, x, y)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state, loss

    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for size in (256, 1, 256, 3):
            before = params
            params, state, loss = step(params, state, x[:size], y[:size])
            assert jnp.isfinite(loss)
            assert all(map(jnp.any, jax.tree.leaves(jax.tree.map(jnp.not_equal, params, before))))


def test_diagnostics_show_a_rate_that_is_too_high():
    """Changes of a few percent are usual; a rate of 10 changes weights by more than all of them."""

    def largest(rate):
        program = compile_step(lnb.lnb(rate, find()))
        _, state, _ = program.run(*program.start(), 1)
        changes = lnb.diagnostics(state)["changes"]
        assert set(changes) == {"first.w", "first.b", "second.w", "temperature"}
        return max(float(changes[name]) for name in ("first.w", "second.w"))

    assert 1e-4 < largest(0.01) < 0.1
    assert largest(10.0) > 1
