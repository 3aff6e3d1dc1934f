"""One bad example, however large, costs a few steps and not hundreds."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lnb
from lnb import _average

LATER = 50
SIZES = (1e3, 1e5, 1e8, 1e10, 1e20)


def as_float32(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def layer(rng, *shape):
    fan_in = np.prod(shape[:-1])
    return {"w": rng.normal(size=shape) * np.sqrt(2 / fan_in), "b": np.zeros(shape[-1])}


def regression(rng, inputs):
    """Correlated, off-centre features; a function that a network of its kind can learn."""
    x = rng.normal(size=(4096, inputs)) @ rng.normal(size=(inputs, inputs)) / inputs**0.5 + 0.5
    y = np.tanh(x @ rng.normal(size=(inputs, 16)) / inputs**0.5) @ rng.normal(size=(16, 3)) / 4
    params = [layer(rng, *shape) for shape in ((inputs, 64), (64, 64), (64, 3))]

    def network(params, x):
        for p in params[:-1]:
            x = jax.nn.relu(x @ p["w"] + p["b"][None])
        return x @ params[-1]["w"] + params[-1]["b"][None]

    return network, params, x, y


def images(rng):
    """Neighbouring pixels alike; the means of products of neighbours are to be found."""
    x = rng.normal(size=(2048, 8, 8, 1))
    x = (x + np.roll(x, 1, 1) + np.roll(x, 1, 2)) / 3**0.5
    products = [x * np.roll(x, shift, axis) for shift, axis in ((1, 1), (1, 2), (2, 1))]
    y = np.stack([product.mean((1, 2, 3)) for product in products], axis=-1)
    params = [layer(rng, 3, 3, 1, 8), layer(rng, 3, 3, 8, 16), layer(rng, 64, 3)]

    def network(params, x):
        for p in params[:-1]:
            numbers = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, p["w"], (2, 2), "SAME", dimension_numbers=numbers)
            x = jax.nn.relu(x + p["b"][None, None, None])
        return x.reshape(len(x), -1) @ params[-1]["w"] + params[-1]["b"][None]

    return network, params, x, y


TASKS = {
    "20 inputs": lambda: regression(np.random.default_rng(0), 20),
    "256 inputs": lambda: regression(np.random.default_rng(0), 256),
    "images": lambda: images(np.random.default_rng(0)),
}


class Training(NamedTuple):
    """A network in training: `run(start, first, size, in_label)` and the test loss of its end."""

    start: Any
    run: Callable
    test_loss: Callable


def make_training(task):
    network, params, x, y = TASKS[task]()
    params, x, y = as_float32((params, x, y))

    def loss_fn(params, x, y):
        return 0.5 * jnp.mean(jnp.sum((network(params, x) - y) ** 2, axis=-1))

    examples = len(x) * 3 // 4
    batches = jnp.asarray(np.random.default_rng(1).integers(examples, size=(200, 128)))
    neurons = lnb.find_neurons(loss_fn, params, x[:128], y[:128])
    optimizer = lnb.lnb(0.01, neurons)
    middle = (3, *(size // 2 for size in x.shape[1:]))

    def step(carry, t, size, in_label):
        params, state = carry
        x_, y_ = x[batches[t]], y[batches[t]]
        x_ = jnp.where((size > 0) & ~in_label, x_.at[middle].set(size), x_)
        y_ = jnp.where((size > 0) & in_label, y_.at[3, 1].set(size), y_)
        backprop = lnb.backprop(loss_fn, neurons)
        _, grads, features = backprop(params, x_, y_)
        updates, state = optimizer.update(grads, state, params, features=features)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)

    def run(start, steps, size=0.0, in_label=False):
        """Trains for some steps, with an outlier in the first batch unless its size is 0."""
        for t in steps:
            start = step(start, t, jnp.float32(size if t == steps[0] else 0), in_label)
        return start

    test_loss = jax.jit(lambda trained: loss_fn(trained[0], x[examples:], y[examples:]))
    return Training((params, optimizer.init(params)), run, test_loss)


@cache
def clean(task):
    """A run without outliers, at the steps where others begin and end, and its test losses."""
    training = make_training(task)
    trained, losses = {0: training.start}, {}
    for before, after in pairwise([0, 30, LATER, 30 + LATER, 100, 100 + LATER]):
        trained[after] = training.run(trained[before], range(before, after))
    losses = {t: float(training.test_loss(state)) for t, state in trained.items()}
    return training, trained, losses


@pytest.mark.parametrize("at", [0, 30, 100])
@pytest.mark.parametrize("what", ["pixel", "label"])
@pytest.mark.parametrize("task", TASKS)
def test_one_outlier(task, what, at):
    """Fifty steps later, the test loss is as if there had been none."""
    training, trained, losses = clean(task)
    assert losses[at + LATER] < 0.9 * losses[at]  # the network does learn
    for size in SIZES:
        end = training.run(trained[at], range(at, at + LATER), size, what == "label")
        assert training.test_loss(end) < 1.1 * losses[at + LATER], f"{what} of {size:.0e}"


@pytest.mark.parametrize("task", TASKS)
def test_ordinary_training_is_left_alone(task, monkeypatch):
    """Without outliers, training is what it is without a limit."""
    _, _, losses = clean(task)
    monkeypatch.setattr(_average, "OUTLIER", float("inf"))
    _, _, without_limit = clean.__wrapped__(task)
    assert losses == pytest.approx(without_limit, rel=1e-3)
