"""LNB with one thing changed: what is changed, and what is not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lnb
from lnb_experiments.ablations import ABLATIONS, adam_rest, before

RATE = 0.02


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


PARAMS: Any = {
    "layers": [{"w": normal(0, 3, 4), "b": normal(1, 4)}],
    "embedding": normal(2, 5, 3),
    "positions": normal(3, 2, 3),
}
TOKENS = jnp.array([[0, 3], [1, 4], [2, 2]])


def loss_fn(params, tokens):
    x = jnp.sin(params["embedding"][tokens] + params["positions"][None])
    layer = params["layers"][0]
    return jnp.mean((x @ layer["w"] + layer["b"][None, None] - 0.5) ** 2)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Adam promotes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def first_updates(make) -> tuple[Any, Any]:
    neurons = lnb.find_neurons(loss_fn, PARAMS, TOKENS)
    optimizer = make(RATE, neurons)
    _, grads, features = lnb.backprop(loss_fn, neurons)(PARAMS, TOKENS)
    updates, _ = optimizer.update(grads, optimizer.init(PARAMS), PARAMS, features=features)
    return updates, grads


@pytest.mark.parametrize("biases", [True, False])
def test_adam_has_what_is_no_matrix(biases):
    """Its first step has the size of its rate, against the gradient's sign."""
    updates, grads = first_updates(lambda *args: adam_rest(*args, ratio=0.25, biases=biases))
    ours, _ = first_updates(before)
    adams = jax.tree.map(lambda g: -0.25 * RATE * np.sign(g), grads)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-7)
    close(updates["layers"][0]["w"], ours["layers"][0]["w"])
    close(updates["layers"][0]["b"], (adams if biases else ours)["layers"][0]["b"])
    close(updates["embedding"], adams["embedding"])  # each row was looked up
    close(updates["positions"], adams["positions"])


@pytest.mark.parametrize("name", [n for n in ABLATIONS if n.startswith(("decay", "damping"))])
def test_settings_change_the_weights_first_step(name):
    updates, _ = first_updates(ABLATIONS[name])
    ours, _ = first_updates(before)
    difference = lambda at: float(jnp.abs(at(updates) - at(ours)).max())
    assert difference(lambda tree: tree["layers"][0]["w"]) > 1e-6
    if name.startswith("decay"):  # `before`, biases decay too, a little
        undecayed = ours["layers"][0]["b"] + RATE * 1e-4 * PARAMS["layers"][0]["b"]
        np.testing.assert_allclose(updates["layers"][0]["b"], undecayed, atol=1e-8)
