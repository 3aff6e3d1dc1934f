"""The paper's two algorithms line by line, and what else an optimizer is made of."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lnb

pytestmark = pytest.mark.usefixtures("x64")

RATE, DECAY, DAMPING, SHRINKAGE = 0.3, 0.01, 0.1, 0.1
STEPS = 6
NAMES = ("first.w", "second.w")
KRYLOV = lnb.Krylov(partial(jax.scipy.sparse.linalg.cg, tol=1e-13))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# A network with one hidden layer, in JAX and in NumPy: matrices [d, o], with a bias as last row.


def make_params(bias: bool):
    params = {"first": {"w": normal(0, 4, 5)}, "second": {"w": normal(1, 5, 3)}}
    if bias:
        params["first"]["b"], params["second"]["b"] = normal(2, 5), normal(3, 3)
    return jax.tree.map(jnp.asarray, params)


def make_batches() -> list:
    x, y = normal(4, STEPS, 20, 4) + 1, normal(5, STEPS, 20, 3)
    return list(zip(x, y, strict=True))


def loss_fn(params, x, y):
    def apply(layer, x):
        x = x @ layer["w"]
        return x + layer["b"][None] if "b" in layer else x

    outputs = apply(params["second"], jnp.tanh(apply(params["first"], x)))
    return 0.5 * jnp.mean(jnp.sum((outputs - y) ** 2, axis=1))


def with_ones(x: np.ndarray, bias: bool) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))]) if bias else x


def backpropagation(thetas, x, y, bias: bool) -> tuple[list, list]:
    """The gradients and the features of both neurons."""
    first, second = thetas
    hidden = np.tanh(with_ones(x, bias) @ first)
    error = (with_ones(hidden, bias) @ second - y) / len(x)
    back = (error @ second[: hidden.shape[1]].T) * (1 - hidden**2)
    gradients = [with_ones(x, bias).T @ back, with_ones(hidden, bias).T @ error]
    return gradients, [x, hidden]


def to_matrices(params) -> list[np.ndarray]:
    layers = [params["first"], params["second"]]
    return [np.vstack([v["w"], v["b"]]) if "b" in v else np.asarray(v["w"]) for v in layers]


class Ema:
    """A debiased exponential moving average."""

    def __init__(self, decay: float):
        self.decay, self.steps, self.sum = decay, 0, 0.0

    def __call__(self, value):
        self.steps += 1
        self.sum = self.decay * self.sum + (1 - self.decay) * value
        return self.sum / (1 - self.decay**self.steps)

    def ahead(self, value):
        """What the next average would be, were the next value this one."""
        following = self.decay * self.sum + (1 - self.decay) * value
        return following / (1 - self.decay ** (self.steps + 1))


def metric(x: np.ndarray, bias: bool, damping: float) -> np.ndarray:
    """M, with damping on all but the bias."""
    rows = with_ones(x, bias)
    return rows.T @ rows / len(x) + damping * np.diag([1.0] * x.shape[1] + [0.0] * bias)


def preconditioner(mean, square, bias: bool, damping: float = 0.0) -> np.ndarray:
    """P: without a bias diagonal, with one W W^T of the paper, Sigma being diagonal."""
    variance = np.maximum(0, square - mean**2)
    variance = (1 - SHRINKAGE) * variance + SHRINKAGE * variance.mean()
    if not bias:
        return np.diag(1 / (variance + mean**2 + damping))
    root = np.diag(1 / np.sqrt(variance + damping))
    w = np.block([[root, np.zeros((len(mean), 1))], [-mean[None] @ root, np.ones((1, 1))]])
    return w @ w.T


def conjugate_gradients(m, g, p, start) -> np.ndarray:
    """Two steps of the textbook."""
    h, residual = start, g - m @ start
    preconditioned = p @ residual
    search = preconditioned
    for _ in range(2):
        image = m @ search
        before = (residual * preconditioned).sum()
        h = h + before / (search * image).sum() * search
        residual = residual - before / (search * image).sum() * image
        preconditioned = p @ residual
        search = preconditioned + (residual * preconditioned).sum() / before * search
    return h


def best_multiple(m, g, start) -> np.ndarray:
    return start * (start * g).sum() / (start * (m @ start)).sum() if np.any(start) else start


class ByHand(NamedTuple):
    """Parameters after every step, and what `lnb.diagnostics` should say after the last."""

    history: list
    diagnostics: dict


def step_by_hand(thetas, gradients, directions, rate, decay, min_norm) -> tuple[list, dict]:
    """The last three lines of both algorithms."""
    thetas = [(1 - rate * decay) * theta for theta in thetas]
    products = [(h * g).sum() for h, g in zip(directions, gradients, strict=True)]
    z = max(min_norm**2, sum(products))
    thetas = [t - rate / np.sqrt(z) * h for t, h in zip(thetas, directions, strict=True)]
    return thetas, {
        "norm": np.sqrt(sum(products)),
        "capped": sum(products) < min_norm**2,
        "neuron_norms": dict(zip(NAMES, np.sqrt(products), strict=True)),
        "skipped_steps": 0,
    }


def algorithm2_by_hand(
    bias: bool, min_norm=1e-2, rates=(RATE,) * STEPS, steps=STEPS, careful=False
) -> ByHand:
    """The paper's Algorithm 2, with the numbers of its author's code.

    A careful one scales the start of conjugate gradients, and adds the damping to P.
    """
    thetas, history, diagnostics = to_matrices(make_params(bias)), [], {}
    gradient_emas = [Ema(0.9), Ema(0.9)]
    mean_emas, square_emas = [Ema(0.9), Ema(0.9)], [Ema(0.999), Ema(0.999)]
    directions = [np.zeros_like(theta) for theta in thetas]
    for (x, y), rate in zip(make_batches()[:steps], rates, strict=False):
        gradients, features = backpropagation(thetas, x, y, bias)
        gradients = [ema(g) for ema, g in zip(gradient_emas, gradients, strict=True)]
        errors = []
        for i, x in enumerate(features):
            mean = mean_emas[i](x.mean(0))
            square = square_emas[i]((x * x).mean(0))
            p = preconditioner(mean, square, bias, DAMPING if careful else 0.0)
            m = metric(x, bias, DAMPING)
            if careful:
                directions[i] = best_multiple(m, gradients[i], directions[i])
            directions[i] = conjugate_gradients(m, gradients[i], p, directions[i])
            errors.append(relative_error(m, directions[i], gradients[i]))
        thetas, diagnostics = step_by_hand(thetas, gradients, directions, rate, 1e-4, min_norm)
        diagnostics["residuals"] = dict(zip(NAMES, errors, strict=True))
        history.append(thetas)
    return ByHand(history, diagnostics)


def exact_by_hand(
    bias: bool, gradient_decay=0.0, nesterov=False, damping=0.0, min_norm=0.0, decay=DECAY
) -> ByHand:
    """The paper's Algorithm 1, or with an average of the gradients."""
    thetas, history, diagnostics = to_matrices(make_params(bias)), [], {}
    emas = [Ema(gradient_decay), Ema(gradient_decay)]
    for x, y in make_batches():
        gradients, features = backpropagation(thetas, x, y, bias)
        averages = [ema(g) for ema, g in zip(emas, gradients, strict=True)]
        if nesterov:
            averages = [ema.ahead(g) for ema, g in zip(emas, gradients, strict=True)]
        metrics = [metric(x, bias, damping) for x in features]
        directions = [np.linalg.solve(m, g) for m, g in zip(metrics, averages, strict=True)]
        thetas, diagnostics = step_by_hand(thetas, averages, directions, RATE, decay, min_norm)
        history.append(thetas)
    return ByHand(history, diagnostics)


def relative_error(m, h, g) -> float:
    return float(np.linalg.norm(m @ h - g) / np.linalg.norm(g))


# The library


def find(params, **options) -> lnb.Neurons:
    return lnb.find_neurons(loss_fn, params, *make_batches()[0], rows="all", **options)


class Trained(NamedTuple):
    history: list
    state: Any


def train(make_optimizer: Callable, params, batches=None, **numbers) -> Trained:
    """Trains with `make_optimizer(neurons, **numbers)`, the numbers being traced."""
    neurons = find(params)

    @jax.jit
    def step(params, state, x, y, numbers):
        optimizer = make_optimizer(neurons, **numbers)
        _, gradients, features = lnb.backprop(loss_fn, neurons)(params, x, y)
        updates, state = optimizer.update(gradients, state, params, features=features)
        return optax.apply_updates(params, updates), state

    history, state = [], make_optimizer(neurons, **numbers).init(params)
    for x, y in make_batches() if batches is None else batches:
        params, state = step(params, state, x, y, numbers)
        history.append(params)
    return Trained(history, state)


def assert_same(trained: Trained, expected: ByHand):
    for params, matrices in zip(trained.history, expected.history, strict=True):
        for actual, matrix in zip(to_matrices(params), matrices, strict=True):
            np.testing.assert_allclose(actual, matrix, rtol=1e-8, atol=1e-9)
    diagnostics = lnb.diagnostics(trained.state)
    for key, value in expected.diagnostics.items():
        assert_close(diagnostics[key], value)


def assert_close(actual, expected, rtol: float = 1e-7):
    """Equal trees, but for rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=1e-9), actual, expected)


# The algorithms


@pytest.mark.parametrize("bias", [True, False])
def test_algorithm2_line_by_line(bias):
    expected = algorithm2_by_hand(bias)
    assert not expected.diagnostics["capped"]
    assert max(expected.diagnostics["residuals"].values()) > 1e-3  # two steps are not many
    assert_same(train(partial(lnb.algorithm2, RATE), make_params(bias)), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_algorithm2_with_careful_conjugate_gradients(bias):
    make_optimizer = partial(lnb.algorithm2, RATE, solver=lnb.CG())
    expected = algorithm2_by_hand(bias, careful=True)
    assert_same(train(make_optimizer, make_params(bias)), expected)


def test_algorithm2_with_a_schedule_and_a_large_min_norm():
    schedule = optax.linear_schedule(0.5, 0.1, STEPS - 1)
    rates = np.linspace(0.5, 0.1, STEPS)
    expected = algorithm2_by_hand(True, min_norm=20.0, rates=rates)
    assert expected.diagnostics["capped"]
    trained = train(partial(lnb.algorithm2, schedule), make_params(True), min_norm=20.0)
    assert_same(trained, expected)


@pytest.mark.parametrize("bias", [True, False])
def test_algorithm1_line_by_line(bias):
    def make_optimizer(neurons, **numbers):
        return lnb.algorithm1(RATE, neurons, solver=KRYLOV, weight_decay=DECAY, **numbers)

    assert_same(train(make_optimizer, make_params(bias)), exact_by_hand(bias))


def test_algorithm1_with_damping_and_min_norm():
    def make_optimizer(neurons, **numbers):
        solver = lnb.Cholesky(decay=0.0)
        return lnb.algorithm1(RATE, neurons, solver=solver, weight_decay=DECAY, **numbers)

    options: dict[str, Any] = {"damping": DAMPING, "min_norm": 20.0}
    expected = exact_by_hand(True, **options)
    assert expected.diagnostics["capped"]
    assert_same(train(make_optimizer, make_params(True), **options), expected)
    # Without damping and min_norm the algorithm has no more than its solver.
    by_default = train(partial(lnb.algorithm1, RATE, solver=KRYLOV), make_params(True))
    assert_same(by_default, exact_by_hand(True, decay=0.0))


# Its parts


@pytest.mark.parametrize("nesterov", [True, False])
def test_gradient_average(nesterov):
    def make_optimizer(neurons):
        return lnb.lnb(
            RATE,
            neurons,
            solver=lnb.Cholesky(decay=0.0),
            norm="network",
            gradient_decay=0.8,
            nesterov=nesterov,
            damping=lnb.Absolute(DAMPING),
            min_norm=0.05,
            weight_decay=DECAY,
            weight_decay_mask=None,
        )

    expected = exact_by_hand(True, 0.8, nesterov, DAMPING, min_norm=0.05)
    assert_same(train(make_optimizer, make_params(True)), expected)


OPTIMIZERS = {"lnb": lnb.lnb, "algorithm1": lnb.algorithm1, "algorithm2": lnb.algorithm2}
TREE = {"first": {"w": True, "b": False}, "second": {"w": True, "b": False}}
MASKS = {
    "no mask": None,
    "weights": "weights",
    "tree": TREE,
    "function": lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
}


@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, "no mask") for name in OPTIMIZERS]
    + [("lnb", "weights"), ("lnb", "tree"), ("lnb", "function")],
)
def test_weight_decay_reaches_biases_unless_masked(name, mask):
    params = make_params(bias=True)
    neurons = find(params)
    optimizer = OPTIMIZERS[name](RATE, neurons, weight_decay=DECAY, weight_decay_mask=MASKS[mask])

    @jax.jit
    def decayed(params, x, y):
        features = lnb.forward_features(loss_fn, neurons)(params, x, y)
        still = jax.tree.map(jnp.zeros_like, params)
        updates, _ = optimizer.update(still, optimizer.init(params), params, features=features)
        return optax.apply_updates(params, updates)

    decays = jax.tree.map(lambda weight: weight or mask == "no mask", TREE)
    expected = jax.tree.map(lambda p, d: p * (1 - RATE * DECAY * d), params, decays)
    assert_close(decayed(params, *make_batches()[0]), expected, rtol=1e-12)


# Diagnostics


def nested(neurons, wrap: str):
    """`algorithm2` inside other transformations."""
    bare = lnb.algorithm2(RATE, neurons)
    if wrap == "chain":
        return optax.chain(optax.identity(), optax.chain(bare, optax.identity()))
    if wrap == "inject_hyperparams":
        return optax.inject_hyperparams(lnb.algorithm2)(learning_rate=RATE, neurons=neurons)
    if wrap == "partition":
        return optax.partition({"lnb": bare, "identity": optax.sgd(RATE)}, neurons.labels)
    assert wrap == "apply_if_finite"
    return optax.apply_if_finite(bare, 3)


@pytest.mark.parametrize("wrap", ["chain", "inject_hyperparams", "partition", "apply_if_finite"])
def test_diagnostics_inside(wrap):
    trained = train(partial(nested, wrap=wrap), make_params(True))
    check_diagnostics(trained.state, algorithm2_by_hand(True).diagnostics)


def check_diagnostics(state, expected):
    found = lnb.diagnostics(state)
    assert set(found.pop("changes")) == {"first.w", "first.b", "second.w", "second.b"}
    assert_close(found, expected)


def test_diagnostics_of_several_optimizers_are_joined():
    def make_optimizer(neurons):
        both: dict[Any, Any] = {n: lnb.algorithm2(RATE, neurons) for n in ("first", "second")}
        return optax.partition(both, {"first": "first", "second": "second"})

    trained = train(make_optimizer, make_params(True), make_batches()[:1])
    check_diagnostics(trained.state, algorithm2_by_hand(True, steps=1).diagnostics)


def test_residuals_of_a_solver_that_stops_early():
    params, (x, y) = make_params(True), make_batches()[0]
    neurons, c = find(params), 1e3
    _, gradients, features = lnb.backprop(loss_fn, neurons)(params, x, y)
    solver = lnb.Krylov(partial(jax.scipy.sparse.linalg.cg, maxiter=2))
    optimizer = lnb.algorithm1(c, neurons, solver=solver, damping=DAMPING, min_norm=c)
    updates, state = optimizer.update(gradients, optimizer.init(params), params, features=features)
    _, inputs = backpropagation(to_matrices(params), x, y, bias=True)
    expected = [
        relative_error(metric(x, True, DAMPING), -update, gradient)
        for x, update, gradient in zip(
            inputs, to_matrices(updates), to_matrices(gradients), strict=True
        )
    ]
    assert min(expected) > 1e-3
    residuals = lnb.diagnostics(state)["residuals"]
    assert_close(residuals, dict(zip(NAMES, expected, strict=True)))


def test_a_direct_solver_reports_no_residuals():
    params = make_params(True)
    state = lnb.lnb(RATE, find(params), solver=lnb.Cholesky()).init(params)
    assert lnb.diagnostics(state)["residuals"] == {}


def test_skipped_steps_are_counted():
    params, batches = make_params(True), make_batches()
    batches[1] = (batches[1][0], np.full_like(batches[1][1], np.nan))
    batches[2] = (np.full_like(batches[2][0], np.inf), batches[2][1])
    trained = train(partial(lnb.algorithm2, RATE), params, batches)
    assert lnb.diagnostics(trained.state)["skipped_steps"] == 2


def test_diagnostics_need_the_state_of_lnb():
    with pytest.raises(ValueError, match="scale_by_lnb"):
        lnb.diagnostics(optax.adam(0.1).init(make_params(True)))
