"""Many devices: the step of a sharded program is that of the program on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import lnb


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {
    "w": normal(0, 16, 32) / 4,
    "b": 0.1 * normal(1, 32),
    "v": normal(2, 32, 8) / 6,
}
X, Y = normal(3, 64, 16), normal(4, 64, 8)


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def gathering_loss(params, x, y):
    """The same, for weights that are spread over the devices that examples are spread over."""
    return loss_fn(jax.sharding.reshard(params, PartitionSpec()), x, y)


def make_step(optimizer, neurons, loss_fn):
    @jax.jit
    def step(params, state, x, y):
        loss, grads, features = lnb.backprop(loss_fn, neurons)(params, x, y)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state, loss

    return step


def train(params, x, y, steps=4, loss_fn=loss_fn, **options):
    neurons = lnb.find_neurons(loss_fn, PARAMS, X, Y)
    optimizer = lnb.lnb(0.05, neurons, **options)
    step, state = make_step(optimizer, neurons, loss_fn), optimizer.init(params)
    for _ in range(steps):
        params, state, _ = step(params, state, x, y)
    return params


def assert_same(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), actual, expected
    )


WEIGHTS = {  # how parameters are spread over the devices
    "data parallel": {"w": PartitionSpec(), "b": PartitionSpec(), "v": PartitionSpec()},
    "fully sharded": {"w": PartitionSpec("i"), "b": PartitionSpec("i"), "v": PartitionSpec("i")},
}


@pytest.mark.parametrize(
    "axis_type",
    [AxisType.Auto, AxisType.Explicit],
)
@pytest.mark.parametrize("options", [{}, {"norm": "neuron", "solver": lnb.CG()}], ids=["lnb", "cg"])
@pytest.mark.parametrize("how", WEIGHTS)
def test_a_mesh(how, options, axis_type):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(axis_type,))
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        params = {name: place(array, WEIGHTS[how][name]) for name, array in PARAMS.items()}
        batch = place(X, PartitionSpec("i")), place(Y, PartitionSpec("i"))
        explicit = axis_type is AxisType.Explicit and how == "fully sharded"
        loss = gathering_loss if explicit else loss_fn
        sharded = train(params, *batch, loss_fn=loss, **options)
    assert_same(sharded, train(PARAMS, X, Y, **options))
    for name, array in sharded.items():
        assert array.sharding.is_equivalent_to(params[name].sharding, array.ndim)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_whole_step_inside_shard_map(check_vma):
    """Each device takes gradients and features of its share; gradients are averaged."""
    mesh = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
    neurons = lnb.find_neurons(loss_fn, PARAMS, X[:8], Y[:8])
    optimizer = lnb.lnb(0.05, neurons)

    def step(params, state, x, y):
        loss, grads, features = lnb.backprop(loss_fn, neurons)(params, x, y)
        grads = jax.lax.pmean(grads, "i")
        features = jax.lax.all_gather(features, "i")
        features = jax.tree.map(lambda leaf: leaf[0], features)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state, jax.lax.pmean(loss, "i")

    whole, batch = PartitionSpec(), PartitionSpec("i")
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(whole, whole, batch, batch), out_specs=whole, check_vma=check_vma
    )
    params, state, before = PARAMS, optimizer.init(PARAMS), loss_fn(PARAMS, X, Y)
    for _ in range(5):
        params, state, _ = jax.jit(sharded)(params, state, X, Y)
    assert loss_fn(params, X, Y) < 0.9 * before
