"""Features are rows: how many are kept, what M they give, who shares them, when M is refreshed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lnb
from lnb._diagnostics import _find
from lnb._metric import moments
from lnb._optimizer import ScaleByLNBState
from lnb._plan import EXAMPLES, FEW


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {
    "query": normal(0, 6, 5),
    "key": normal(1, 6, 5),
    "blocks": 0.5 * normal(2, 3, 5, 5),
    "head": normal(3, 5, 2),
    "bias": jnp.zeros(2),
}
BATCH = normal(4, 4096, 6), normal(5, 4096, 2)


def loss_fn(params, x, y):
    """Two neurons fed by one array, a loop over rematerialised blocks, a head with a bias."""
    h = jnp.tanh(x @ params["query"]) * jnp.tanh(x @ params["key"])
    block = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    h, _ = lax.scan(block, h, params["blocks"])
    return jnp.mean((h @ params["head"] + params["bias"][None] - y) ** 2)


ALL = lnb.find_neurons(loss_fn, PARAMS, *BATCH, rows="all")
AUTO = lnb.find_neurons(loss_fn, PARAMS, *BATCH)


def close(actual, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def test_about_four_rows_an_input():
    assert {n.rows for n in ALL} == {4096}
    assert {n.rows for n in AUTO} == {FEW}
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    loss_fn = lambda params, x: jnp.mean(x @ params)
    for inputs, rows in [(200, 800), (1000, 4000), (4000, 4445), (9000, 10000)]:
        (neuron,) = lnb.find_neurons(loss_fn, shape(inputs, 8000), shape(40000, inputs))
        assert neuron.rows == rows


def test_thinned_features_are_those_of_some_examples():
    """In plain code, and in rematerialised loops over weights."""
    features: Any
    value, gradients, features = jax.jit(lnb.backprop(loss_fn, AUTO))(PARAMS, *BATCH)
    close((value, gradients), jax.value_and_grad(loss_fn)(PARAMS, *BATCH))
    x, y = BATCH
    few_features: Any = lnb.forward_features(loss_fn, ALL)(PARAMS, x[::8], y[::8])
    for name, few in few_features.items():
        assert features[name].count == 4096
        close(moments(features[name]), moments(few))


def test_a_convolution_keeps_images():
    params, x = {"w": normal(0, 4, 2, 3, 3)}, normal(1, 64, 2, 6, 6)

    def loss_fn(params, x):
        return jnp.mean(lax.conv_general_dilated(x, params["w"], (1, 1), "SAME") ** 2)

    neurons = lnb.find_neurons(loss_fn, params, x)
    features: Any = lnb.forward_features(loss_fn, neurons)(params, x)["w"]
    assert features.arrays[0].shape == (16, 2, 6, 6)  # with 576 positions, where 512 are enough
    whole = lnb.find_neurons(loss_fn, params, x, rows="all")
    few: Any = lnb.forward_features(loss_fn, whole)(params, x[::4])["w"]
    close(moments(features), moments(few))


def test_some_examples_are_always_kept():
    params = {"w": normal(0, 3, 2)}
    loss_fn = lambda params, x: jnp.mean(x @ params["w"])
    for examples, kept in [(3, 3), (8, 4), (EXAMPLES, 8), (5 * EXAMPLES, EXAMPLES)]:
        x = normal(1, examples, 1000, 3)
        neurons = lnb.find_neurons(loss_fn, params, x)
        features: Any = lnb.forward_features(loss_fn, neurons)(params, x)["w"]
        assert features.arrays[0].shape == (kept, 1000, 3)


def test_a_lookup_keeps_all_its_indices():
    params, tokens = {"embed": normal(0, 7, 3)}, jnp.arange(600).reshape(100, 6) % 5
    loss_fn = lambda params, tokens: jnp.mean(jnp.sin(params["embed"][tokens]))
    neurons = lnb.find_neurons(loss_fn, params, tokens)
    features: Any = lnb.forward_features(loss_fn, neurons)(params, tokens)["embed"]
    np.testing.assert_allclose(moments(features).second, [[0.2] * 5 + [0.0] * 2], rtol=1e-6)


def test_an_untaken_branch_has_no_positions():
    def loss_fn(params, x, take):
        h = lax.cond(take, lambda x: x @ params["w"] + params["b"][None], lambda x: x, x)
        return jnp.mean((h @ params["v"]) ** 2)

    params = {"w": normal(0, 4, 4), "b": jnp.zeros(4), "v": normal(1, 4, 2)}
    x = normal(2, 32, 4)
    neurons = lnb.find_neurons(loss_fn, params, x, True)
    run = jax.jit(lnb.backprop(loss_fn, neurons))
    counts = [int(run(params, x, jnp.asarray(t))[2]["w"].count) for t in (True, False)]
    assert counts == [32, 0]
    optimizer = lnb.lnb(0.1, neurons)
    state = optimizer.init(params)
    for taken in (False, False, True):
        _, grads, features = run(params, x, jnp.asarray(taken))
        _, state = optimizer.update(grads, state, params, features=features)
        (inner,) = _find(state, ScaleByLNBState)
        assert (inner.known["w"].running.second.mass > 0) == taken  # as soon as there are any


@pytest.mark.parametrize("every", [1, 4])
def test_m_is_refreshed_every_so_often(every):
    """At every step at first, then more rarely, and not all neurons at the same step."""
    optimizer = lnb.lnb(0.0, AUTO, solver=lnb.Cholesky(every=every))
    backprop = jax.jit(lnb.backprop(loss_fn, AUTO))
    update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
    refreshed: dict[str, list[int]] = {name: [] for name in ("query", "blocks", "head")}
    for step in range(24):
        x, y = normal(step, 4096, 6), BATCH[1]
        _, grads, features = backprop(PARAMS, x, y)
        before = _find(state, ScaleByLNBState)[0].known
        _, state = update(grads, state, PARAMS, features=features)
        after = _find(state, ScaleByLNBState)[0].known
        for name, steps in refreshed.items():
            if np.any(before[name].inverse != after[name].inverse):
                steps.append(step)
    for name, steps in refreshed.items():
        assert steps[: min(every, 4)] == list(range(min(every, 4))), name
        assert set(np.diff([s for s in steps if s >= 4 * every])) <= {every}, name
    late = [tuple(s for s in steps if s >= 16) for steps in refreshed.values()]
    assert len(set(late)) == (1 if every == 1 else 3)


def test_neurons_fed_alike_share_what_is_known():
    """And step as they would by themselves."""
    (boosted,) = _find(lnb.lnb(0.03, ALL).init(PARAMS), ScaleByLNBState)
    assert set(boosted.known) == {"query", "blocks", "head"}
    alone = tuple(dataclasses.replace(neuron, fed=10 * i) for i, neuron in enumerate(ALL))
    apart = dataclasses.replace(ALL, neurons=alone)
    _, gradients, features = lnb.backprop(loss_fn, ALL)(PARAMS, *BATCH)
    updates = []
    for neurons in (ALL, apart):
        optimizer = lnb.lnb(0.03, neurons)
        state = optimizer.init(PARAMS)
        updates.append(optimizer.update(gradients, state, PARAMS, features=features)[0])
    close(*updates)
    assert len(_find(optimizer.init(PARAMS), ScaleByLNBState)[0].known) == 4


def test_one_array_fed_in_two_ways_is_not_shared():
    """A square array, mixed along one axis and along the other: as large, but not the same M."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["right"] + (x.mT @ params["left"]).mT) ** 2)

    params = {"right": normal(0, 4, 4), "left": normal(1, 4, 4)}
    neurons = lnb.find_neurons(loss_fn, params, normal(2, 16, 4, 4))
    assert len({neuron.fed for neuron in neurons}) == 2


def test_slices_of_one_weight_share_what_is_known():
    params, x = {"qkv": normal(0, 4, 6)}, normal(1, 32, 4)

    def loss_fn(params, x):
        q, k, v = jnp.split(params["qkv"], 3, axis=1)
        return jnp.mean(jnp.sin(x @ q) * jnp.tanh(x @ k) * (x @ v))

    neurons = lnb.find_neurons(loss_fn, params, x)
    assert [n.name for n in neurons] == ["qkv[:, 0:2]", "qkv[:, 2:4]", "qkv[:, 4:6]"]
    (boosted,) = _find(lnb.lnb(0.03, neurons).init(params), ScaleByLNBState)
    assert list(boosted.known) == ["qkv[:, 0:2]"]


def test_stacked_features_are_refused():
    """As `vmap` or an all-gather would make them."""
    _, grads, features = lnb.backprop(loss_fn, ALL)(PARAMS, *BATCH)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), features)
    optimizer = lnb.lnb(0.1, ALL)
    with pytest.raises(ValueError, match=r"'query' are those of 2 batches"):
        optimizer.update(grads, optimizer.init(PARAMS), PARAMS, features=stacked)


@pytest.mark.parametrize("features", [{}, {"features": None}])
def test_a_step_needs_features(features):
    optimizer = lnb.lnb(0.03, ALL)
    with pytest.raises(ValueError, match=r"(?s)LNB needs the features.*state\.tx\.update"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS, **features)
