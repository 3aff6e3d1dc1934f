"""Every optimizer, and a small network to train: what the suites for all optimizers share."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lnb

RATE = 0.1
SOLVERS = {
    "cholesky": lnb.Cholesky(),
    "cg": lnb.CG(),
    "woodbury": lnb.Woodbury(every=3),
    "krylov": lnb.Krylov(partial(jax.scipy.sparse.linalg.cg, maxiter=5)),
}
OPTIMIZERS: dict[str, Callable] = {"defaults": lnb.lnb}  # as the README recommends
OPTIMIZERS |= {
    f"{solver}-{norm}": partial(lnb.lnb, solver=SOLVERS[solver], norm=norm)
    for solver in SOLVERS
    for norm in ("network", "neuron", "spectral")
}
OPTIMIZERS |= {"algorithm1": lnb.algorithm1, "algorithm2": lnb.algorithm2}

EVERY = pytest.mark.parametrize("name", OPTIMIZERS)
EVERY_SOLVER = pytest.mark.parametrize(
    "name", ["defaults", *(f"{solver}-network" for solver in SOLVERS)]
)
SOME = pytest.mark.parametrize("name", ["defaults", "algorithm2"])


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# The network has a neuron with more inputs than positions, whose features are held; one with a
# gram, fed by rectifiers that may all be off; and a parameter of no neuron.


def make_params(scale: float = 1.0) -> Any:
    """For inputs that are `scale` times as large."""
    return {
        "first": {"w": normal(0, 9, 5) / (3 * scale), "b": 0.5 * jnp.ones(5)},
        "second": {"w": 0.5 * normal(1, 5, 2)},
        "temperature": jnp.zeros(()),
    }


def make_batch(size: int = 8, scale: float = 1.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, targets, and how much each sample counts."""
    return scale * normal(2, 16, 9)[:size], normal(3, 16, 2)[:size], jnp.ones(size)


def loss_fn(params, x, y, weight):
    hidden = jax.nn.relu(x @ params["first"]["w"] + params["first"]["b"][None])
    outputs = hidden @ params["second"]["w"] * jnp.exp(params["temperature"])
    return 0.5 * jnp.mean(weight * jnp.sum((outputs - y) ** 2, axis=1))


@cache
def find(**options) -> lnb.Neurons:
    return lnb.find_neurons(loss_fn, make_params(), *make_batch(), **options)


def make_step(optimizer, neurons: lnb.Neurons | None = None, **extra) -> Callable:
    """`(params, state, *batch) -> (params, state, loss)`."""
    neurons = find() if neurons is None else neurons

    def step(params, state, x, y, weight):
        backprop = lnb.backprop(loss_fn, neurons)
        loss, gradients, features = backprop(params, x, y, weight)
        updates, state = optimizer.update(gradients, state, params, features=features, **extra)
        return optax.apply_updates(params, updates), state, loss

    return step


class Compiled(NamedTuple):
    optimizer: Any
    step: Callable
    traces: list  # one entry for each time that the step was traced

    def start(self, scale: float = 1.0) -> tuple[Any, Any]:
        params = make_params(scale)
        return params, self.optimizer.init(params)

    def run(self, params, state, steps: int) -> tuple[Any, Any, list[float]]:
        losses = []
        for _ in range(steps):
            params, state, loss = self.step(params, state, *make_batch())
            losses.append(float(loss))
        return params, state, losses


def compile_step(optimizer, **extra) -> Compiled:
    traces, step = [], make_step(optimizer, **extra)

    def counted(*args):
        traces.append(args)
        return step(*args)

    return Compiled(optimizer, jax.jit(counted), traces)


@cache
def compiled(name: str) -> Compiled:
    """Compiled once for all tests."""
    return compile_step(OPTIMIZERS[name](RATE, find()))


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def assert_close(actual, expected, rtol=1e-5, atol=1e-6):
    """Equal trees, but for rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), actual, expected)
