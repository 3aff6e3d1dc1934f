"""Micro-batches: gradients add up, features are a sample."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lnb


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PARAMS = {"w": normal(0, 6, 12), "b": normal(1, 12), "v": normal(2, 12, 3)}
MICRO = [(normal(3 + i, 32, 6), normal(7 + i, 32, 3)) for i in range(4)]


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None])
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def assert_close(actual, expected):
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, actual, expected)


def test_multi_steps():
    """`optax.MultiSteps` steps with the mean gradient and the features of the last micro-batch."""
    neurons = lnb.find_neurons(loss_fn, PARAMS, *MICRO[0])
    backprop, inner = lnb.backprop(loss_fn, neurons), lnb.lnb(0.1, neurons)
    optimizer: Any = optax.MultiSteps(inner, 4).gradient_transformation()
    state, expected_state = optimizer.init(PARAMS), inner.init(PARAMS)
    params = expected = PARAMS
    for _ in range(3):
        grads, features = [], {}
        for batch in MICRO:
            _, gradient, features = backprop(expected, *batch)
            grads.append(gradient)
            with jax.numpy_dtype_promotion("standard"):  # optax relies on it
                updates, state = optimizer.update(gradient, state, params, features=features)
            params = optax.apply_updates(params, updates)
        updates, expected_state = inner.update(
            mean(grads), expected_state, expected, features=features
        )
        expected = optax.apply_updates(expected, updates)
    assert_close(params, expected)


def test_what_is_orthogonalized_does_not_depend_on_the_cut():
    """Four equal micro-batches take the step of the batch that they make up."""
    x, y = MICRO[0]
    whole = jnp.tile(x, (4, 1)), jnp.tile(y, (4, 1))
    steps = []
    for batch in (MICRO[0], whole):
        neurons = lnb.find_neurons(loss_fn, PARAMS, *batch)
        _, grads, features = lnb.backprop(loss_fn, neurons)(PARAMS, *batch)
        optimizer = lnb.lnb(0.1, neurons)
        state = optimizer.init(PARAMS)
        steps.append(optimizer.update(grads, state, PARAMS, features=features)[0])
    assert_close(*steps)


@pytest.mark.parametrize("jit", [False, True])
def test_features_cannot_be_added(jit):
    neurons = lnb.find_neurons(loss_fn, PARAMS, *MICRO[0])

    def accumulate():
        _, _, first = lnb.backprop(loss_fn, neurons)(PARAMS, *MICRO[0])
        _, _, second = lnb.backprop(loss_fn, neurons)(PARAMS, *MICRO[1])
        return jax.tree.map(jnp.add, first, second)

    with pytest.raises((TypeError, ValueError), match=r"features.*may not be added"):
        (jax.jit(accumulate) if jit else accumulate)()
