"""Neurons take turns: grams are computed, and factorised, only for those whose turn it is."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lnb
from lnb._backprop import Due, find_nodes
from lnb._metric import Gram, Postponed
from lnb._optimizer import ScaleByLNBState
from lnb._packed import WHOLE, is_packed, unpack

EVERY = 4


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS = {
    "query": normal(0, 6, 5),
    "key": normal(1, 6, 5),
    "blocks": 0.5 * normal(2, 3, 5, 5),
    "head": normal(3, 5, 2),
    "bias": jnp.zeros(2),
}
BATCH = normal(4, 64, 6), normal(5, 64, 2)


def loss_fn(params, x, y):
    """Two neurons fed by one array, a loop over rematerialised blocks, a head with a bias."""
    h = jnp.tanh(x @ params["query"]) * jnp.tanh(x @ params["key"])
    block = jax.checkpoint(lambda h, w: (h + jnp.tanh(h @ w), None))
    h, _ = lax.scan(block, h, params["blocks"])
    return jnp.mean((h @ params["head"] + params["bias"][None] - y) ** 2)


NEURONS = lnb.find_neurons(loss_fn, PARAMS, *BATCH, metric="gram", statistics_share=math.inf)
THINNED = lnb.find_neurons(loss_fn, PARAMS, *BATCH, metric="gram", statistics_share=0.01)


def with_flags(state: Any, flags: dict[str, bool]) -> Any:
    """An optimizer's state in which it is these neurons' turn."""
    is_due = lambda node: isinstance(node, Due)
    replace = lambda node: (
        Due({k: jnp.asarray(v) for k, v in flags.items()}) if is_due(node) else node
    )
    return jax.tree.map(replace, state, is_leaf=is_due)


def not_packed(gram: Any) -> Any:
    return gram._replace(second=gram.matrix)


def make_optimizer(every: int = EVERY):
    return lnb.lnb(0.03, NEURONS, solver=lnb.Cholesky(every=every))


def train(every: int, steps: int, turns: bool):
    """Losses, and of each step how many positions each neuron's features come from."""
    optimizer = make_optimizer(every)

    @jax.jit
    def step(params, state):
        backprop = lnb.backprop(loss_fn, NEURONS, opt_state=state if turns else None)
        loss, gradients, features = backprop(params, *BATCH)
        updates, state = optimizer.update(gradients, state, params, features=features)
        counts = {name: f.count for name, f in features.items()}
        return optax.apply_updates(params, updates), state, loss, counts

    params, state, losses, counts = PARAMS, optimizer.init(PARAMS), [], []
    for _ in range(steps):
        params, state, loss, count = step(params, state)
        losses.append(float(loss))
        counts.append({name: int(n) for name, n in count.items()})
    return losses, counts


def test_features_of_those_whose_turn_it_is():
    state = make_optimizer().init(PARAMS)
    flags = {"query": False, "key": False, "blocks": True, "head": False}
    value, gradients, full = lnb.backprop(loss_fn, NEURONS)(PARAMS, *BATCH)
    state = with_flags(state, flags)
    value_, gradients_, features = lnb.backprop(loss_fn, NEURONS, opt_state=state)(PARAMS, *BATCH)
    assert value == value_
    jax.tree.map(np.testing.assert_array_equal, gradients, gradients_)
    for name, flag in flags.items():
        blank = jax.tree.map(jnp.zeros_like, full[name])
        expected = full[name] if flag else blank
        jax.tree.map(np.testing.assert_array_equal, not_packed(features[name]), expected)


def test_features_of_every_so_many_examples():
    """What the moments come from where they would cost too much; gradients are of all examples."""
    strides = {neuron.name: neuron.stride for neuron in THINNED}
    assert strides == {"query": 2, "key": 2, "blocks": 4, "head": 8}
    state = lnb.lnb(0.03, THINNED).init(PARAMS)
    value, gradients, features = lnb.backprop(loss_fn, THINNED, opt_state=state)(PARAMS, *BATCH)
    whole = jax.value_and_grad(loss_fn)(PARAMS, *BATCH)
    jax.tree.map(np.testing.assert_allclose, (value, gradients), whole)
    for name, stride in strides.items():
        x, y = BATCH
        few = lnb.features(loss_fn, NEURONS)(PARAMS, x[::stride], y[::stride])[name]
        # Each stands for so many.
        close = lambda a, b: np.testing.assert_allclose(a, stride * b, rtol=1e-5)
        jax.tree.map(close, not_packed(features[name]), few)


@pytest.mark.parametrize("share", [math.inf, 0.01])
def test_features_little_larger_than_their_gram(share):
    """They wait for the solver, which takes the gram at the neuron's turn; thinned out by then."""
    inputs = WHOLE + 1
    params = {"weight": normal(6, inputs, 3), "bias": jnp.zeros(3)}

    def wide_loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["weight"] + params["bias"][None]))

    x = normal(7, 2 * inputs, inputs)
    neurons = lnb.find_neurons(wide_loss, params, x, statistics_share=share)
    (neuron,) = neurons
    assert (neuron.metric, neuron.stride) == ("gram", 1 if share > 1 else 4)
    optimizer = lnb.lnb(0.03, neurons)
    state = optimizer.init(params)
    backprop = lnb.backprop(wide_loss, neurons, opt_state=state)
    _, gradients, features = backprop(params, x)
    assert isinstance(features["weight"], Postponed)
    _, after = optimizer.update(gradients, state, params, features=features)
    few = x[:: neuron.stride]
    (boosted,) = find_nodes(after, ScaleByLNBState)
    mean, second = boosted.solver["weight"].running.average.value
    np.testing.assert_allclose(unpack(second)[0], few.T @ few / len(few), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(mean[0], few.mean(0), rtol=1e-3, atol=1e-5)
    # Whoever wants M before that gets the same.
    again = lnb.metric_product(neurons, features, gradients)
    held = Gram((few.T @ few)[None], few.sum(0)[None], jnp.float32(len(few)))
    expected = lnb.metric_product(neurons, {"weight": held}, gradients)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    jax.tree.map(close, again, expected)
    # Features that count nothing, and those of a batch that is not finite, are left out.
    later = with_flags(after, {"weight": False})
    _, gradients, features = lnb.backprop(wide_loss, neurons, opt_state=later)(params, 2 * x)
    assert features["weight"].count == 0
    now, huge = with_flags(after, {"weight": True}), x.at[0, 0].set(1e20)
    for state, batch in ((later, 2 * x), (now, huge)):
        _, gradients, features = lnb.backprop(wide_loss, neurons, opt_state=state)(params, batch)
        _, new = optimizer.update(gradients, state, params, features=features)
        assert lnb.diagnostics(new)["skipped_steps"] == 0  # their gradient is finite
        (new,) = find_nodes(new, ScaleByLNBState)
        jax.tree.map(np.testing.assert_array_equal, new.solver, boosted.solver)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_features_that_are_not_kept_do_not_wait(wrap):
    """What is rematerialised is not to be kept for the sake of a gram."""
    params, x = {"weight": normal(6, WHOLE + 1, 3)}, normal(7, WHOLE + 1, WHOLE + 1)
    layer = wrap(lambda weight, x: jnp.tanh(x @ weight))
    loss = lambda params, x: jnp.sum(layer(params["weight"], x))
    neurons = lnb.find_neurons(loss, params, x)
    state = lnb.lnb(0.03, neurons).init(params)
    _, _, features = lnb.backprop(loss, neurons, opt_state=state)(params, x)
    assert isinstance(features["weight"], Postponed if wrap is jax.jit else Gram)
    vector = {"weight": normal(8, WHOLE + 1, 3)}
    product = lnb.metric_product(neurons, features, vector)["weight"]
    few = x[:: neurons["weight"].stride]
    expected = few.T @ (few @ vector["weight"]) / len(few)
    np.testing.assert_allclose(product, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("share", [math.inf, 0.001])
def test_images_smaller_than_their_gram(share):
    """They wait thinned out."""
    params, x = {"kernel": normal(6, 3, 3, 32, 4)}, normal(7, 8, 6, 6, 32)

    def conv_loss(params, x):
        y = lax.conv_general_dilated(
            x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(jnp.tanh(y))

    neurons = lnb.find_neurons(conv_loss, params, x, statistics_share=share)
    (neuron,) = neurons
    assert (neuron.metric, neuron.stride) == ("gram", 1 if share > 1 else 2)
    state = lnb.lnb(0.03, neurons).init(params)
    _, _, features = lnb.backprop(conv_loss, neurons, opt_state=state)(params, x)
    waiting: Any = features["kernel"]
    assert isinstance(waiting, Postponed)
    assert waiting.features[0][0].shape == (8 // neuron.stride, 6, 6, 32)
    vector = {"kernel": normal(8, 3, 3, 32, 4)}
    actual = lnb.metric_product(neurons, features, vector)["kernel"]
    few = lnb.features(conv_loss, neurons)(params, x[:: neuron.stride])
    expected = lnb.metric_product(neurons, few, vector)["kernel"]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


def test_packed_moments():
    inputs = WHOLE + 1
    params, x = {"weight": normal(6, inputs, 3)}, normal(7, 5, inputs)
    loss = lambda params, x: jnp.sum(jnp.tanh(x @ params["weight"]))
    neurons = lnb.find_neurons(loss, params, x, metric="gram", statistics_share=math.inf)
    state = lnb.lnb(0.03, neurons).init(params)
    gram: Any = lnb.backprop(loss, neurons, opt_state=state)(params, x)[2]["weight"]
    assert is_packed(gram.second)
    np.testing.assert_allclose(gram.matrix[0], x.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("examples", [5, 400])
def test_a_compiled_layer_used_twice(examples):
    """Both calls share one inner program, but not what they are fed."""
    layer = jax.jit(lambda weight, h: jnp.tanh(h @ weight))
    params = {"first": normal(8, 20, 20), "second": normal(9, 20, 20)}
    x = normal(10, examples, 20)

    def twice(params, x):
        return jnp.sum(layer(params["second"], layer(params["first"], x)) ** 2)

    neurons = lnb.find_neurons(twice, params, x, metric="gram", statistics_share=math.inf)
    assert [neuron.gram for neuron in neurons] == ["first", "second"]
    state = lnb.lnb(0.03, neurons).init(params)
    _, _, features = lnb.backprop(twice, neurons, opt_state=state)(params, x)
    fed = {"first": x, "second": layer(params["first"], x)}
    for name, rows in fed.items():
        gram: Any = features[name]
        np.testing.assert_allclose(gram.matrix[0], rows.T @ rows, rtol=1e-4, atol=1e-4)


def test_a_turn_at_every_step_is_all_features():
    whole, _ = train(1, 8, turns=False)
    turns, counts = train(1, 8, turns=True)
    np.testing.assert_allclose(whole, turns, rtol=1e-4)
    assert all(n == 64 for count in counts for n in count.values())


def test_turns_are_frequent_at_first_and_then_spread():
    losses, counts = train(EVERY, 40, turns=True)
    assert losses[-1] < 0.9 * losses[0]
    assert all(n == 64 for count in counts[:EVERY] for n in count.values())
    late = counts[EVERY * (EVERY - 1) :]
    for name in ("query", "key", "blocks", "head"):
        steps = [i for i, count in enumerate(late) if count[name]]
        assert set(np.diff(steps)) == {EVERY}
        assert {late[i][name] for i in steps} == {64}
    # Those fed by one array have their turn together, the others at other steps.
    assert all(count["query"] == count["key"] for count in counts)
    assert max(sum(n > 0 for n in count.values()) for count in late) == 2


def test_turns_cost_little():
    whole, _ = train(1, 40, turns=False)
    turns, _ = train(EVERY, 40, turns=True)
    assert turns[-1] < 1.01 * whole[-1]


def products(function, *args) -> int:
    """How many products the program holds, those of branches included."""
    return str(jax.make_jaxpr(function)(*args)).count("dot_general[")


def test_one_gram_for_all_that_one_array_feeds():
    plain = products(jax.value_and_grad(loss_fn), PARAMS, *BATCH)
    boosted = products(lnb.backprop(loss_fn, NEURONS), PARAMS, *BATCH)
    assert boosted - plain == len(NEURONS) - 1
    state = make_optimizer().init(PARAMS)
    turns = products(lnb.backprop(loss_fn, NEURONS, opt_state=state), PARAMS, *BATCH)
    assert turns == boosted


def test_steps_without_features():
    optimizer = make_optimizer()
    _, gradients, features = lnb.backprop(loss_fn, NEURONS)(PARAMS, *BATCH)
    _, state = optimizer.update(gradients, optimizer.init(PARAMS), PARAMS, features=features)
    once, _ = optimizer.update(gradients, state, PARAMS, features=features)
    again, after = optimizer.update(gradients, state, PARAMS, features=None)
    before, after = lnb.diagnostics(state), lnb.diagnostics(after)
    # The metric of the same batch once more is the same metric.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), once, again)
    assert after["skipped_steps"] == before["skipped_steps"] == 0


@pytest.mark.parametrize("solver", [lnb.CG(), lnb.Krylov()], ids=["CG", "Krylov"])
def test_solvers_without_memory_get_all_examples(solver):
    """They know of one batch only: its M is not to be thinned out."""
    state = lnb.lnb(0.03, THINNED, solver=solver).init(PARAMS)
    _, _, features = lnb.backprop(loss_fn, THINNED, opt_state=state)(PARAMS, *BATCH)
    assert {int(f.count) for f in features.values()} == {64}


def test_steps_without_features_need_a_memory():
    optimizer = lnb.lnb(0.03, NEURONS, solver=lnb.CG())
    _, gradients, _ = lnb.backprop(loss_fn, NEURONS)(PARAMS, *BATCH)
    with pytest.raises(ValueError, match="LNB needs the features"):
        optimizer.update(gradients, optimizer.init(PARAMS), PARAMS, features=None)


def test_state_of_another_optimizer():
    state = optax.adam(0.1).init(PARAMS)
    with pytest.raises(ValueError, match=r"opt_state=opt_state"):
        lnb.backprop(loss_fn, NEURONS, opt_state=state)(PARAMS, *BATCH)


def test_neurons_fed_alike_share_their_state():
    state = make_optimizer().init(PARAMS)
    (boosted,) = find_nodes(state, ScaleByLNBState)
    assert set(boosted.solver) == {"query", "blocks", "head"}
    assert set(boosted.due.flags) == {"query", "key", "blocks", "head"}
    # And step as they would with states of their own.
    alone = tuple(dataclasses.replace(neuron, gram=neuron.name) for neuron in NEURONS)
    apart = dataclasses.replace(NEURONS, neurons=alone)
    _, gradients, features = lnb.backprop(loss_fn, NEURONS)(PARAMS, *BATCH)
    updates = []
    for neurons in (NEURONS, apart):
        optimizer = lnb.lnb(0.03, neurons)
        state = optimizer.init(PARAMS)
        updates.append(optimizer.update(gradients, state, PARAMS, features=features)[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *updates)
    assert len(find_nodes(optimizer.init(PARAMS), ScaleByLNBState)[0].solver) == 4


def test_one_array_fed_in_two_ways_has_two_states():
    """A square array, mixed along one axis and along the other: as large, but not the same M."""

    def loss_fn(params, x):
        return jnp.mean((x @ params["right"] + (x.mT @ params["left"]).mT) ** 2)

    params = {"right": normal(0, 4, 4), "left": normal(1, 4, 4)}
    neurons = lnb.find_neurons(loss_fn, params, normal(2, 16, 4, 4), metric="gram")
    assert {neuron.name: neuron.gram for neuron in neurons} == {"right": "right", "left": "left"}
