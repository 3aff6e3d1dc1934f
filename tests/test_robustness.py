"""Bad numbers and bad arguments: no NaN, no exception, training goes on; or a clear error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optimizers import (
    EVERY,
    OPTIMIZERS,
    RATE,
    SOME,
    assert_equal,
    compiled,
    find,
    loss_fn,
    make_batch,
    make_params,
    normal,
)

import lnb
from lnb._guard import all_finite


def run(name, params, state, steps: int, batch):
    """Parameters, state and the last loss. All are finite after every step."""
    loss = jnp.zeros(())
    for _ in range(steps):
        params, state, loss = compiled(name).step(params, state, *batch)
        assert_finite((params, state, loss))
    return params, state, float(loss)


def start(name: str, scale: float = 1.0):
    return compiled(name).start(scale)


def assert_finite(tree):
    for path, leaf in jax.tree.leaves_with_path(tree):
        assert np.isfinite(leaf).all(), jax.tree_util.keystr(path)


def assert_goes_on(name, params, state):
    before = float(loss_fn(params, *make_batch()))
    _, _, after = run(name, params, state, 40, make_batch())
    assert after < 0.5 * before


def test_the_network_has_more_inputs_than_positions():
    first, second = find()
    assert first.d_in > first.n
    assert second.d_in < second.n


@pytest.mark.parametrize("norm", ["auto", "neuron", "network"])
def test_batches_of_one_example(norm):
    """One example has no variance: the first step must not take its rounding error for one."""
    params = {"w": normal(0, 20, 30) / 5, "b": jnp.zeros(30), "v": normal(1, 30, 3) / 5}
    x, y = normal(2, 500, 20), normal(3, 20, 3)

    def loss_fn(params, x):
        hidden = jax.nn.relu(x @ params["w"] + params["b"][None])
        return jnp.mean((hidden @ params["v"] - jnp.tanh(x @ y)) ** 2)

    with pytest.warns(UserWarning, match="single position"):
        neurons = lnb.find_neurons(loss_fn, params, x[:1])
    optimizer = lnb.lnb(0.01, neurons, norm=norm)

    @jax.jit
    def step(params, state, x):
        _, grads, features = lnb.backprop(loss_fn, neurons)(params, x)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state

    first, state = float(loss_fn(params, x)), optimizer.init(params)
    for i in range(200):
        params, state = step(params, state, x[i : i + 1])
        assert float(loss_fn(params, x)) < 1.5 * first
    assert float(loss_fn(params, x)) < 0.9 * first


# Features and gradients that say nothing


@EVERY
def test_fewer_positions_than_inputs(name):
    assert_goes_on(name, *start(name))


@EVERY
def test_dead_features(name):
    """All-zero inputs from the first step on: M of the first neuron is its bias alone."""
    x, *rest = make_batch()
    params, state, _ = run(name, *start(name), 5, (0 * x, *rest))
    assert_goes_on(name, params, state)


@EVERY
def test_features_that_die(name):
    x, *rest = make_batch()
    params, state, _ = run(name, *start(name), 3, make_batch())
    params, state, _ = run(name, params, state, 5, (0 * x, *rest))
    assert_goes_on(name, params, state)


def assert_decayed(name, actual, expected):
    """Nothing has changed in five steps but by weight decay, which is small in the algorithms."""
    decay = 0.0 if name.startswith("algorithm") else 0.1
    kept = jax.tree.map(lambda x: (1 - decay * RATE) ** 5 if x.ndim > 1 else 1.0, expected)
    expected = jax.tree.map(lambda factor, x: factor * x, kept, expected)
    change = optax.tree.norm(optax.tree.sub(actual, expected))
    assert float(change) < 1e-3 * float(optax.tree.norm(expected))


@EVERY
def test_dead_hidden_units(name):
    """No rectifier is on: the second neuron's M is zero, and so are all gradients."""
    params, state = start(name)
    params["first"]["b"] = params["first"]["b"] - 100
    assert_decayed(name, run(name, params, state, 5, make_batch())[0], params)


@EVERY
def test_zero_gradients(name):
    x, y, weight = make_batch()
    silent = (x, y, 0 * weight)
    params, state, _ = run(name, *start(name), 5, silent)
    assert_decayed(name, params, make_params())
    assert_goes_on(name, params, state)
    # They may also come later.
    params, state, _ = run(name, params, state, 3, make_batch())
    params, state, _ = run(name, params, state, 5, silent)
    assert_goes_on(name, params, state)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@EVERY
def test_scale_of_the_features(name, scale):
    batch, (params, state) = make_batch(scale=scale), start(name, scale)
    before = float(loss_fn(params, *batch))
    _, _, after = run(name, params, state, 40, batch)
    assert after < 0.9 * before


# Numbers that are not finite


@pytest.mark.parametrize("bad", ["gradient nan", "gradient inf", "feature nan", "feature inf"])
@EVERY
def test_what_is_not_finite_changes_nothing_and_is_counted(name, bad):
    x, y, weight = make_batch()
    params, state, _ = run(name, *start(name), 3, make_batch())
    number = float(bad.split()[1])
    batch = (x, y.at[2, 1].set(number)) if "gradient" in bad else (x.at[2, 1].set(number), y)
    new_params, new_state, loss = compiled(name).step(params, state, *batch, weight)
    assert not np.isfinite(loss)
    assert_equal(new_params, params)
    counted = lnb.diagnostics(new_state)["skipped_steps"]
    assert counted == lnb.diagnostics(state)["skipped_steps"] + 1
    assert_equal(new_state._replace(skipped=state.skipped), state)
    assert_goes_on(name, new_params, new_state)


@SOME
def test_features_alone_are_not_finite(name):
    """They may come from another sample than the gradients."""
    (params, state), (x, *rest) = start(name), make_batch()
    _, gradients, _ = backprop()
    features = lnb.forward_features(loss_fn, find())(params, x.at[2, 1].set(jnp.nan), *rest)
    updates, new_state = compiled(name).optimizer.update(
        gradients, state, params, features=features
    )
    assert_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert_equal(new_state._replace(skipped=state.skipped), state)
    assert new_state.skipped == 1


@pytest.mark.parametrize("rows", ["auto", "all"])
def test_squares_of_features_overflow(rows):
    """Features of 1e20 are finite in float32, their second moments are not."""
    params = {"w": normal(0, 9, 3)}
    x = 1e20 * jnp.eye(4, 9)

    def loss_fn(params, x):
        return jnp.sum(jnp.tanh(1e-20 * (x @ params["w"])))

    neurons = lnb.find_neurons(loss_fn, params, x, rows=rows)
    optimizer = lnb.lnb(RATE, neurons, solver=lnb.CG())
    _, gradients, features = lnb.backprop(loss_fn, neurons)(params, x)
    updates, state = optimizer.update(gradients, optimizer.init(params), params, features=features)
    assert_equal(updates, jax.tree.map(jnp.zeros_like, params))
    assert_finite(state)
    assert lnb.diagnostics(state)["skipped_steps"] == 1


# Every other kind of neuron: rows that no token looks up, channels and a branch without features


def make_mixture():
    params = {
        "embed": normal(0, 12, 4),
        "scale": jnp.ones(4),
        "offset": jnp.zeros(4),
        "conv": 0.3 * normal(1, 3, 4, 3),  # taps, inputs, outputs
        "left": {"w": normal(2, 3, 2), "b": jnp.zeros(2)},
        "right": {"w": normal(3, 3, 2), "b": jnp.zeros(2)},
    }
    tokens = jnp.asarray(np.random.default_rng(4).integers(5, size=(6, 8)))
    return params, tokens, normal(5, 6, 8, 2)


def mixture_loss(params, tokens, y, left, gain):
    x = gain * params["embed"][tokens]
    x = jnp.tanh(x * params["scale"][None, None] + params["offset"][None, None])
    x = lax.conv_general_dilated(
        gain * x, params["conv"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )
    x = gain * jax.nn.relu(x)

    def apply(layer):
        return x @ layer["w"] + layer["b"][None, None]

    outputs = lax.cond(left, lambda: apply(params["left"]), lambda: apply(params["right"]))
    return jnp.mean((outputs - y) ** 2)


@pytest.mark.parametrize(
    "name", ["cholesky-spectral", "cg-network", "woodbury-neuron", "krylov-network"]
)
def test_neurons_of_other_kinds_without_features(name):
    params, tokens, y = make_mixture()
    neurons = lnb.find_neurons(mixture_loss, params, tokens, y, True, 1.0)
    kinds = ["lookup", "scale", "conv", "dense", "dense"]
    assert [neuron.kind for neuron in neurons] == kinds
    optimizer = OPTIMIZERS[name](RATE, neurons)

    @jax.jit
    def step(params, state, left, gain):
        backprop = lnb.backprop(mixture_loss, neurons)
        loss, gradients, features = backprop(params, tokens, y, left, gain)
        updates, state = optimizer.update(gradients, state, params, features=features)
        return optax.apply_updates(params, updates), state, loss

    # The right branch is not taken at first, nor are there any features.
    turns = 3 * [(True, 0.0)] + 3 * [(True, 1.0)] + 3 * [(False, 0.0)] + 40 * [(False, 1.0)]
    state, losses = optimizer.init(params), []
    for left, gain in turns:
        params, state, loss = step(params, state, left, gain)
        assert_finite((params, state))
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[9]


# Bad arguments


MAKERS = {
    "lnb": lnb.lnb,
    "algorithm1": lnb.algorithm1,
    "algorithm2": lnb.algorithm2,
}


@pytest.mark.parametrize(
    "rate", [-0.1, float("nan"), np.float32(-1), -1, float("-inf"), float("inf")]
)
@pytest.mark.parametrize("name", MAKERS)
def test_learning_rate_that_is_no_rate(name, rate):
    with pytest.raises(ValueError, match=r"learning_rate=(-|nan|inf)"):
        MAKERS[name](rate, find())


@pytest.mark.parametrize("rate", [None, True, "0.03", {"a": 1.0}, np.ones(2)])
def test_learning_rate_of_another_type(rate):
    with pytest.raises(TypeError, match=r"learning_rate.*schedule"):
        lnb.lnb(rate, find())


def test_solver_without_parentheses():
    with pytest.raises(TypeError, match=r"Cholesky.*is no solver"):
        lnb.lnb(RATE, find(), solver=lnb.Cholesky)  # pyright: ignore


def test_features_that_are_none():
    params, batch = make_params(), make_batch()
    loss, grads, features = lnb.backprop(loss_fn, find())(params, *batch)
    optimizer = lnb.lnb(RATE, find())
    state = optimizer.init(params)
    for wrong in (grads, batch, loss):
        with pytest.raises(TypeError, match=r"third result of lnb\.backprop"):
            optimizer.update(grads, state, params, features=wrong)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), features)
    with pytest.raises(ValueError, match="2 batches"):
        optimizer.update(grads, state, params, features=stacked)


def test_unknown_norm():
    for make in (partial(lnb.lnb, RATE), lnb.scale_by_lnb):
        with pytest.raises(ValueError, match=r"(?s)frobenius.*network.*neuron.*spectral"):
            make(find(), norm="frobenius")


def backprop(neurons=None):
    neurons = find() if neurons is None else neurons
    return lnb.backprop(loss_fn, neurons)(make_params(), *make_batch())


@pytest.mark.parametrize("name", ["scale_by_lnb", *MAKERS])
def test_missing_features(name):
    """The error shows the call that would have worked."""
    make = lnb.scale_by_lnb if name == "scale_by_lnb" else partial(MAKERS[name], RATE)
    optimizer, params = make(find()), make_params()
    gradients = jax.grad(loss_fn)(params, *make_batch())
    with pytest.raises(ValueError, match=r"(?s)lnb\.backprop.*update\(.*features=features"):
        optimizer.update(gradients, optimizer.init(params), params)


def update_with(features, optimizer=None):
    optimizer, params = optimizer or lnb.lnb(RATE, find()), make_params()
    _, gradients, _ = backprop()
    return optimizer.update(gradients, optimizer.init(params), params, features=features)


def test_features_of_fewer_neurons():
    _, _, features = backprop(find(exclude="second"))
    with pytest.raises(ValueError, match=r"second\.w.*same `neurons`"):
        update_with(features)


def test_features_of_more_neurons():
    _, _, features = backprop()
    with pytest.raises(ValueError, match=r"second\.w.*same `neurons`"):
        update_with(features, lnb.lnb(RATE, find(exclude="second")))


def test_features_of_another_network():
    """Which neuron, which shapes, what to do."""
    params = make_params() | {"first": {"w": normal(0, 4, 5), "b": jnp.zeros(5)}}
    x, *rest = make_batch()
    neurons = lnb.find_neurons(loss_fn, params, x[:, :4], *rest)
    features = lnb.forward_features(loss_fn, neurons)(params, x[:, :4], *rest)
    with pytest.raises(ValueError, match=r"first\.w.*\b4\b.*\b9\b.*same `neurons`"):
        update_with(features)


def test_parameters_of_another_network():
    optimizer = lnb.lnb(RATE, find())
    with pytest.raises(ValueError, match=r"first\.w.*\(4, 5\).*\(9, 5\)"):
        optimizer.init(make_params() | {"first": {"w": normal(0, 4, 5), "b": jnp.zeros(5)}})
    with pytest.raises(ValueError, match=r"third.*find_neurons"):
        optimizer.init(make_params() | {"third": normal(0, 4, 5)})


def test_weight_decay_needs_the_parameters():
    optimizer = lnb.lnb(RATE, find(), weight_decay=0.1)
    _, gradients, features = backprop()
    with pytest.raises(ValueError, match="params"):
        optimizer.update(gradients, optimizer.init(make_params()), features=features)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1e30])
@pytest.mark.parametrize("where", ["gradient", "features"])
def test_all_arrays_are_checked(where, bad):
    arrays = {"gradient": jnp.ones(5000), "features": jnp.ones((3, 2))}
    assert all_finite(arrays["gradient"], arrays["features"])
    arrays[where] = arrays[where].ravel().at[-1].set(bad)
    assert not all_finite(arrays["gradient"], arrays["features"])
