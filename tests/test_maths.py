"""What the paper says of directions and steps, each against arithmetic of the test's own."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import Array, lax

import lnb
from lnb._norms import NORMS, Norm, orthogonal, polar

pytestmark = pytest.mark.usefixtures("x64")

KRYLOV = lnb.Krylov(partial(jax.scipy.sparse.linalg.cg, tol=1e-13))
EXACT = {
    "cholesky": lnb.Cholesky(decay=0.0),
    "woodbury": lnb.Woodbury(decay=0.0, every=1),
    "krylov": KRYLOV,
    "cg": lnb.CG(steps=30),
}
MIN_NORM = 1e6  # more than any norm here, so that steps are not normalised


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


def assert_close(actual, expected, tolerance: float = 1e-8):
    """Equal but for rounding, relative to the largest entry of each array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance * scale)


# A network with three neurons: a strided convolution, a dense neuron at each of its pixels, and one
# for all pixels together. It is written twice, the second time with its features in the open.

BATCH, PIXELS = 20, 4
NEURONS = ("conv", "pixel", "head")


def make_network(bias: bool):
    shapes = {"conv": (3, 2, 3), "pixel": (3, 3), "head": (12, 2)}
    params = {name: {"w": 0.5 * normal(i, *shapes[name])} for i, name in enumerate(NEURONS)}
    if bias:
        for i, (name, outputs) in enumerate(zip(NEURONS, (3, 3, 2), strict=True)):
            params[name]["b"] = normal(10 + i, outputs)
    x, y = normal(20, BATCH, 2, 9) + 0.5, normal(21, BATCH, 2)
    return arrays(params), jnp.asarray(x), jnp.asarray(y)


def network(params, x: Array) -> Array:
    def add_bias(name, output):
        return output + params[name]["b"][None] if "b" in params[name] else output

    x = lax.conv_general_dilated(x, params["conv"]["w"], (2,), "VALID")
    x = add_bias("conv", jnp.moveaxis(x, 1, 2).reshape(-1, 3))
    x = add_bias("pixel", jnp.tanh(x) @ params["pixel"]["w"])
    return add_bias("head", jnp.tanh(x).reshape(BATCH, -1) @ params["head"]["w"])


def loss_of(outputs: Array, y: Array) -> Array:
    return jnp.mean(jax.nn.logsumexp(outputs, axis=1) - jnp.sum(outputs * y, axis=1))


def loss_fn(params, x, y):
    return loss_of(network(params, x), y)


def network_by_hand(matrices, x, shifts=None, whiten=lambda name, features: features):
    """The outputs, and every neuron's features as [n, d].

    Args:
      matrices: for each neuron [d, o], or [d + 1, o] with the bias last.
      x: the inputs.
      shifts: added to the outputs of each neuron.
      whiten: what the features go through before the weights.
    """
    seen = {}

    def apply(name, features):
        seen[name], matrix = features, matrices[name]
        features = whiten(name, features)
        if len(matrix) > features.shape[1]:
            features = jnp.hstack([features, jnp.ones((len(features), 1))])
        return features @ matrix + (0 if shifts is None else shifts[name])

    windows = jnp.stack([x[:, :, 2 * i : 2 * i + 3] for i in range(PIXELS)], axis=1)
    x = apply("conv", windows.reshape(BATCH * PIXELS, 6))
    x = apply("pixel", jnp.tanh(x))
    return apply("head", jnp.tanh(x).reshape(BATCH, -1)), seen


def to_matrices(tree) -> dict[str, np.ndarray]:
    """Parameters, gradients or directions as `network_by_hand` takes them."""
    weights = {name: np.asarray(tree[name]["w"]) for name in NEURONS}
    weights["conv"] = weights["conv"].reshape(3, 6).T
    return {
        name: np.vstack([w, tree[name]["b"]]) if "b" in tree[name] else w
        for name, w in weights.items()
    }


def with_ones(features, bias: bool) -> np.ndarray:
    features = np.asarray(features)
    return np.hstack([features, np.ones((len(features), 1))]) if bias else features


class Solved(NamedTuple):
    direction: dict
    gradient: dict
    features: dict
    diagnostics: dict


@partial(jax.jit, static_argnames=("loss_fn", "solver", "metric", "norm", "damping", "min_norm"))
def solve(loss_fn, solver, params, *args, metric="auto", norm="network", damping=0.0, min_norm=1e6):
    """One step of `lnb` without memory, times `min_norm`: where that is large, the direction h."""
    neurons = lnb.find_neurons(loss_fn, params, *args, metric=metric)
    _, gradient, features = lnb.backprop(loss_fn, neurons)(params, *args)
    optimizer = lnb.lnb(
        min_norm or 1.0,
        neurons,
        solver=solver,
        norm=norm,
        gradient_decay=0.0,
        nesterov=False,
        damping=damping,
        relative_damping=False,
        min_norm=min_norm,
        weight_decay=0.0,
    )
    updates, state = optimizer.update(gradient, optimizer.init(params), params, features=features)
    direction = jax.tree.map(jnp.negative, updates)
    return Solved(direction, gradient, features, lnb.diagnostics(state))


# 2. Directions are least-squares fits


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("metric", ["gram", "matrix-free"])
@pytest.mark.parametrize("name", EXACT)
def test_direction_is_the_least_squares_fit_of_the_errors(name, metric, bias):
    params, x, y = make_network(bias)
    direction, gradient, features, diagnostics = solve(
        loss_fn, EXACT[name], params, x, y, metric=metric
    )
    outputs = {"conv": (80, 3), "pixel": (80, 3), "head": (20, 2)}

    def shifted_loss(shifts):
        outputs, features = network_by_hand(to_matrices(params), x, shifts)
        return loss_of(outputs, y), features

    shifts = {name: jnp.zeros(shape) for name, shape in outputs.items()}
    slopes, rows = jax.grad(shifted_loss, has_aux=True)(shifts)
    fits = {}
    for name in NEURONS:
        inputs, errors = with_ones(rows[name], bias), len(rows[name]) * slopes[name]
        fits[name] = np.linalg.lstsq(inputs, errors)[0]
    assert_close(to_matrices(direction), fits)

    # ||f(.; h)||^2 = h.Mh = h.g, for each neuron and together.
    product = lnb.metric_product(
        lnb.find_neurons(loss_fn, params, x, y, metric=metric), features, direction
    )
    for name in NEURONS:
        h, g, image = (to_matrices(tree)[name] for tree in (direction, gradient, product))
        square = ((with_ones(rows[name], bias) @ h) ** 2).sum(1).mean()
        np.testing.assert_allclose([(h * image).sum(), (h * g).sum()], square, rtol=1e-8)
        np.testing.assert_allclose(diagnostics["neuron_norms"][f"{name}.w"] ** 2, square)
    total = optax.tree.vdot(direction, gradient)
    np.testing.assert_allclose(diagnostics["norm"] ** 2, total, rtol=1e-9)


# 3. Steps are gradient steps of a whitened network


def whitening(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean, and the symmetric inverse root of the covariance."""
    values, vectors = np.linalg.eigh(np.cov(rows.T, bias=True))
    return rows.mean(0), vectors / np.sqrt(values) @ vectors.T


def paper_w(rows: np.ndarray) -> np.ndarray:
    """The paper's W, with M^-1 = W W^T."""
    mean, root = whitening(rows)
    zeros = np.zeros((len(mean), 1))
    return np.block([[root, zeros], [-mean[None] @ root, np.ones((1, 1))]])


def test_step_is_a_gradient_step_on_whitened_features():
    params, x, y = make_network(bias=True)
    direction = solve(loss_fn, EXACT["cholesky"], params, x, y).direction
    stepped = jax.tree.map(lambda p, h: p - 0.3 * h, params, direction)

    matrices = to_matrices(params)
    rows = {name: np.asarray(r) for name, r in network_by_hand(matrices, x)[1].items()}
    w = {name: paper_w(rows[name]) for name in NEURONS}
    statistics = {name: whitening(rows[name]) for name in NEURONS}

    def whiten(name, features):
        mean, root = statistics[name]
        return (features - mean[None]) @ root

    def whitened_loss(whitened):
        return loss_of(network_by_hand(whitened, x, whiten=whiten)[0], y)

    # The whitened network is the same function ...
    whitened = {name: jnp.linalg.solve(w[name], matrices[name]) for name in NEURONS}
    np.testing.assert_allclose(whitened_loss(whitened), loss_fn(params, x, y), rtol=1e-10)
    # ... and one step of gradient descent leaves it so.
    gradient = jax.grad(whitened_loss)(whitened)
    whitened = {name: whitened[name] - 0.3 * gradient[name] for name in NEURONS}
    assert_close(to_matrices(stepped), {name: w[name] @ whitened[name] for name in NEURONS})
    np.testing.assert_allclose(whitened_loss(whitened), loss_fn(stepped, x, y), rtol=1e-10)


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("name", ["cholesky", "krylov"])
def test_step_without_bias_is_that_of_foof(name, damping):
    params, x, y = make_network(bias=False)
    direction = solve(loss_fn, EXACT[name], params, x, y, damping=damping).direction
    gradients = to_matrices(jax.grad(loss_fn)(params, x, y))
    _, rows = network_by_hand(to_matrices(params), x)
    expected = {}
    for name in NEURONS:
        second = np.asarray(rows[name].T @ rows[name]) / len(rows[name])
        expected[name] = np.linalg.solve(second + damping * np.eye(len(second)), gradients[name])
    assert_close(to_matrices(direction), expected)


# 4. Invariance: the trained function does not depend on how its inputs are written down


class Problem(NamedTuple):
    """A network whose inputs can be rewritten as A x + c, with the first neuron compensated."""

    params: dict
    batches: Array  # [steps, batch, inputs] or [steps, batch, channels, pixels]
    targets: Array
    predict: Callable
    rewrite: Callable


def dense_problem(bias: bool = True) -> Problem:
    params = {"first": {"w": normal(0, 4, 5)}, "second": {"w": normal(1, 5, 2), "b": normal(2, 2)}}
    if bias:
        params["first"]["b"] = normal(3, 5)
    batches, targets = normal(4, STEPS, 40, 4) + 1, normal(5, STEPS, 40, 2)

    def predict(params, x):
        x = x @ params["first"]["w"]
        x = x + params["first"]["b"][None] if bias else x
        return jnp.tanh(x) @ params["second"]["w"] + params["second"]["b"][None]

    def rewrite(params, batches, a, c):
        w = np.linalg.solve(a.T, params["first"]["w"])
        first = {"w": w, "b": params["first"]["b"] - c @ w} if bias else {"w": w}
        return {**params, "first": first}, batches @ a.T + c

    return Problem(arrays(params), jnp.asarray(batches), jnp.asarray(targets), predict, rewrite)


def conv_problem(padding: str) -> Problem:
    params = {
        "first": {"w": normal(0, 3, 4, 2), "b": normal(1, 3)},  # outputs, channels, taps
        "second": {"w": normal(2, 3 * 6, 2), "b": normal(3, 2)},
    }
    batches = normal(4, STEPS, 40, 4, 7 if padding == "VALID" else 6) + 1
    targets = normal(5, STEPS, 40, 2)

    def predict(params, x):
        x = lax.conv_general_dilated(x, params["first"]["w"], (1,), padding)
        x = jnp.tanh(x + params["first"]["b"][None, :, None]).reshape(len(x), -1)
        return x @ params["second"]["w"] + params["second"]["b"][None]

    def rewrite(params, batches, a, c):
        w = np.einsum("ji,ojk->oik", np.linalg.inv(a), params["first"]["w"])
        first = {"w": w, "b": params["first"]["b"] - np.einsum("i,oik->o", c, w)}
        return {**params, "first": first}, np.einsum("ij,sbjp->sbip", a, batches) + c[:, None]

    return Problem(arrays(params), jnp.asarray(batches), jnp.asarray(targets), predict, rewrite)


STEPS = 5
PROBLEMS = {
    "dense": dense_problem,
    "conv VALID": partial(conv_problem, "VALID"),
    "conv SAME": partial(conv_problem, "SAME"),
}
ROTATION = np.linalg.qr(normal(6, 4, 4))[0]
MAPS = {
    "affine": (normal(6, 4, 4) + 2 * np.eye(4), 3 * normal(7, 4)),
    "linear": (normal(6, 4, 4) + 2 * np.eye(4), np.zeros(4)),
    "orthogonal": (ROTATION, 3 * normal(7, 4)),
    "inverted": (-np.eye(4), np.ones(4)),
}


def drift(problem: Problem, name: str, make_optimizer: Callable) -> float:
    """How much the rewritten inputs change what the network predicts while it is trained."""

    def loss_fn(params, x, y):
        return 0.5 * jnp.mean(jnp.sum((problem.predict(params, x) - y) ** 2, axis=1))

    neurons = lnb.find_neurons(loss_fn, problem.params, problem.batches[0], problem.targets[0])
    optimizer = optax.with_extra_args_support(make_optimizer(neurons))

    @jax.jit
    def train(params, batches):
        def step(carry, batch):
            params, state = carry
            _, gradients, features = lnb.backprop(loss_fn, neurons)(params, *batch)
            updates, state = optimizer.update(gradients, state, params, features=features)
            params = optax.apply_updates(params, updates)
            return (params, state), problem.predict(params, batches[0])

        start = problem.predict(params, batches[0])
        steps = lax.scan(step, (params, optimizer.init(params)), (batches, problem.targets))[1]
        return start, steps

    a, c = MAPS[name]
    before, predictions = train(problem.params, problem.batches)
    rewritten = arrays(problem.rewrite(problem.params, problem.batches, a, c))
    assert_close(train(*rewritten)[0], before, 1e-10)  # the same function to begin with
    assert np.abs(predictions[-1] - before).max() > 0.1  # and it does learn
    return float(np.abs(train(*rewritten)[1] - predictions).max())


def optimizer(norm: str = "network", solver=lnb.Cholesky(), damping=0.0, relative=True):
    """`lnb` with all of its memory, but no weight decay: that one does depend on the inputs."""
    options = {"solver": solver, "norm": norm, "damping": damping, "relative_damping": relative}
    return lambda neurons: lnb.lnb(0.2, neurons, weight_decay=0.0, **options)


WHERE = [("dense", "affine"), ("conv VALID", "affine"), ("conv SAME", "linear")]


@pytest.mark.parametrize(("problem", "change"), WHERE)
@pytest.mark.parametrize("norm", NORMS)
def test_invariant_to_affine_maps_of_the_inputs(problem, change, norm):
    assert drift(PROBLEMS[problem](), change, optimizer(norm)) < 1e-7


@pytest.mark.parametrize("name", ["krylov", "woodbury"])
def test_invariant_with_any_exact_solver(name):
    assert drift(dense_problem(), "affine", optimizer(solver=EXACT[name])) < 1e-7


@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("norm", ["network", "spectral"])
@pytest.mark.parametrize("problem", ["dense", "conv VALID"])
def test_invariant_to_rotations_with_damping(problem, norm, relative):
    damped = optimizer(norm, damping=0.1, relative=relative)
    assert drift(PROBLEMS[problem](), "orthogonal", damped) < 1e-9


@pytest.mark.parametrize("norm", NORMS)
def test_invariant_to_inverted_inputs_with_relative_damping(norm):
    assert drift(dense_problem(), "inverted", optimizer(norm, damping=0.1)) < 1e-9


def test_invariant_to_inverted_inputs_with_two_steps_of_cg():
    """P knows means and variances; these must be of the same batches."""
    solver = lnb.CG(mean_decay=0.9, second_decay=0.9)
    assert drift(dense_problem(), "inverted", optimizer(solver=solver, damping=0.1)) < 1e-9


@pytest.mark.parametrize(
    ("change", "make_optimizer"),
    [
        ("affine", lambda neurons: optax.sgd(0.05)),
        ("affine", optimizer(damping=0.1)),
        ("inverted", lambda neurons: optax.adam(0.05)),
    ],
    ids=["sgd", "damping", "adam"],
)
def test_what_is_not_invariant(change, make_optimizer):
    """That the tests above can fail."""
    assert drift(dense_problem(), change, make_optimizer) > 1e-2


def test_not_invariant_to_shifts_without_a_bias():
    problem = dense_problem(bias=False)
    shifted = problem._replace(rewrite=lambda params, batches, a, c: (params, batches))
    assert drift(shifted, "inverted", optimizer()) == 0
    assert drift(problem, "linear", optimizer()) < 1e-7
    assert drift(problem, "linear", optimizer(damping=0.1)) > 1e-2


# 6. Linear least squares in one step


def half_mean_squared_error(outputs: Array, targets: Array) -> Array:
    return 0.5 * jnp.mean(jnp.sum((outputs - targets) ** 2, axis=1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("solver", [KRYLOV, lnb.Cholesky()], ids=["krylov", "cholesky"])
def test_linear_model_lands_on_its_minimum_in_one_step(solver, bias):
    x, y = normal(0, 50, 6) + 2, normal(1, 50, 3)
    params = arrays({"w": normal(2, 6, 3), "b": normal(3, 3)} if bias else {"w": normal(2, 6, 3)})

    def loss_fn(params, x, y):
        outputs = x @ params["w"]
        outputs = outputs + params["b"][None] if bias else outputs
        return half_mean_squared_error(outputs, y)

    x, y = jnp.asarray(x), jnp.asarray(y)
    neurons = lnb.find_neurons(loss_fn, params, x, y)
    _, gradients, features = lnb.backprop(loss_fn, neurons)(params, x, y)
    c = 30.0
    optimizer = lnb.algorithm1(c, neurons, solver=solver, min_norm=c)
    updates, state = optimizer.update(gradients, optimizer.init(params), params, features=features)
    assert lnb.diagnostics(state)["capped"]  # c is more than ||h||
    params = optax.apply_updates(params, updates)
    solution = np.linalg.lstsq(with_ones(x, bias), y)[0]
    found = np.vstack([params["w"], params["b"]]) if bias else params["w"]
    np.testing.assert_allclose(found, solution, rtol=1e-7, atol=1e-8)


def test_linear_convolution_lands_on_its_minimum_in_one_step():
    x, y = normal(0, 10, 2, 9) + 2, normal(1, 10, 4, 3)
    params = arrays({"w": normal(2, 3, 2, 3), "b": normal(3, 3)})

    def loss_fn(params, x, y):
        outputs = lax.conv_general_dilated(x, params["w"], (2,), "VALID")
        outputs = jnp.moveaxis(outputs, 1, 2) + params["b"][None, None]
        return 0.5 * jnp.mean(jnp.sum((outputs - y) ** 2, axis=2))

    direction = solve(loss_fn, EXACT["cholesky"], params, jnp.asarray(x), jnp.asarray(y)).direction
    windows = np.stack([x[:, :, 2 * i : 2 * i + 3] for i in range(4)], axis=1).reshape(40, 6)
    solution = np.linalg.lstsq(with_ones(windows, True), y.reshape(40, 3))[0]
    found = np.vstack(
        [(params["w"] - direction["w"]).reshape(3, 6).T, params["b"] - direction["b"]]
    )
    np.testing.assert_allclose(found, solution, rtol=1e-7, atol=1e-8)


# 7. Positions, and how many of them a filter's taps see


def convolution(stride=1, padding="SAME", transposed=False) -> Callable:
    numbers = ("NCHW", "OIHW", "NCHW")

    def apply(params, x):
        if transposed:
            y = lax.conv_transpose(
                x, params["w"], (stride, stride), padding, dimension_numbers=numbers
            )
        else:
            y = lax.conv_general_dilated(x, params["w"], (stride, stride), padding)
        return jnp.sum(jnp.sin(y))

    return apply


def tokens(params, x):
    return jnp.sum(jnp.sin(x.reshape(5, 10, 6) @ params["w"]))


POSITIONS = {
    "strided": (convolution(stride=2), (3, 2, 3, 3), 5 * 3 * 5),
    "strided VALID": (convolution(stride=2, padding="VALID"), (3, 2, 3, 3), 5 * 2 * 4),
    "transposed": (convolution(stride=2, transposed=True), (3, 2, 2, 2), 5 * 12 * 20),
    "tokens": (tokens, (6, 3), 50),
}


@pytest.mark.parametrize("metric", ["gram", "matrix-free"])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_output(name, metric):
    loss_fn, shape, n = POSITIONS[name]
    params = arrays({"w": normal(0, *shape)})
    x = jnp.asarray(normal(1, 5, 2, 6, 10) if len(shape) == 4 else normal(1, 5, 60))
    (neuron,) = neurons = lnb.find_neurons(loss_fn, params, x, metric=metric)
    assert neuron.n == n
    features = lnb.features(loss_fn, neurons)(params, x)
    assert features["w"].count == n


def diagonal_of_m(loss_fn, params, x) -> np.ndarray:
    """The metric's diagonal, shaped like the weight, from one product for each of its elements."""
    neurons = lnb.find_neurons(loss_fn, params, x)
    features = lnb.features(loss_fn, neurons)(params, x)
    weight = params["w"]
    units = jnp.eye(weight.size).reshape(weight.size, *weight.shape)
    columns = jax.vmap(lambda unit: lnb.metric_product(neurons, features, {"w": unit})["w"])(units)
    return np.diagonal(columns.reshape(weight.size, -1)).reshape(weight.shape)


def diagonal_of_p(loss_fn, params, x) -> np.ndarray:
    """One over the diagonal of P, up to a factor: without a bias the first step of CG is along P g.

    What is returned has the mean 1.
    """
    neurons = lnb.find_neurons(loss_fn, params, x)
    features = lnb.features(loss_fn, neurons)(params, x)
    gradient = jax.tree.map(jnp.ones_like, params)
    solver = lnb.CG(steps=1, shrinkage=0.0)
    optimizer = lnb.scale_by_lnb(neurons, solver=solver, damping=0.0, min_norm=0.0)
    step, _ = optimizer.update(gradient, optimizer.init(params), params, features=features)
    inverse = 1 / np.asarray(step["w"])
    return inverse / inverse.mean()


def test_taps_of_a_transposed_convolution_see_a_quarter_of_the_positions():
    loss_fn = convolution(stride=2, transposed=True)
    params, x = arrays({"w": normal(0, 3, 2, 2, 2)}), jnp.asarray(normal(1, 5, 2, 6, 10))
    power = np.mean(np.asarray(x) ** 2, axis=(0, 2, 3))
    expected = np.broadcast_to(power[None, :, None, None] / 4, params["w"].shape)
    np.testing.assert_allclose(diagonal_of_m(loss_fn, params, x), expected, rtol=1e-10)
    p = diagonal_of_p(loss_fn, params, x)
    np.testing.assert_allclose(p, expected / expected.mean(), rtol=1e-10)


def test_outer_taps_see_fewer_pixels():
    height, width = 6, 10
    image = np.broadcast_to(normal(1, 5, 2, 1, 1), (5, 2, height, width))
    params, x = arrays({"w": normal(0, 3, 2, 3, 3)}), jnp.asarray(image)
    rows, columns = (np.array([size - 1, size, size - 1]) / size for size in (height, width))
    power = np.mean(image**2, axis=(0, 2, 3))
    coverage = power[:, None, None] * rows[:, None] * columns
    expected = np.broadcast_to(coverage, params["w"].shape)
    np.testing.assert_allclose(diagonal_of_m(convolution(), params, x), expected, rtol=1e-10)
    p = diagonal_of_p(convolution(), params, x)
    np.testing.assert_allclose(p, expected / expected.mean(), rtol=1e-10)


# 8. The spectral norm


def explicit_metrics(params, x, bias: bool) -> dict[str, np.ndarray]:
    _, rows = network_by_hand(to_matrices(params), x)
    inputs = {name: with_ones(rows[name], bias) for name in NEURONS}
    return {name: inputs[name].T @ inputs[name] / len(inputs[name]) for name in NEURONS}


def whitened_values(metric: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The singular values of L^T h."""
    return np.linalg.svd(np.linalg.cholesky(metric).T @ direction, compute_uv=False)


@pytest.fixture
def exact_norm(monkeypatch) -> str:
    """The spectral norm with an exact orthogonaliser."""
    unit = partial(orthogonal, orthogonalize=polar)
    monkeypatch.setitem(NORMS, "exactly spectral", Norm(shared=False, unit=unit))
    return "exactly spectral"


@pytest.mark.parametrize("bias", [True, False])
def test_spectral_step_has_singular_values_of_one(bias, exact_norm):
    params, x, y = make_network(bias)
    metrics = explicit_metrics(params, x, bias)
    for norm, tolerance in [(exact_norm, 1e-8), ("spectral", 0.32)]:
        solved = solve(loss_fn, EXACT["cholesky"], params, x, y, norm=norm, min_norm=0.0)
        directions = to_matrices(solved.direction)
        for name in NEURONS:
            values = whitened_values(metrics[name], directions[name])
            assert len(values) == min(directions[name].shape)
            np.testing.assert_allclose(values, 1, atol=tolerance)


def test_spectral_step_is_shortened_by_min_norm():
    params, x, y = make_network(bias=True)
    solve_ = partial(solve, loss_fn, EXACT["cholesky"], params, x, y, norm="spectral")
    free, gradients = solve_(min_norm=0.0)[:2]
    metrics = explicit_metrics(params, x, bias=True)
    norms = {
        name: np.linalg.norm(np.linalg.solve(np.linalg.cholesky(metrics[name]), g))
        for name, g in to_matrices(gradients).items()
    }
    min_norm = float(np.median(list(norms.values())))  # so that it matters to some, not to all
    capped = solve_(min_norm=min_norm)
    expected = {
        name: min_norm * min(1, norms[name] / min_norm) * h for name, h in to_matrices(free).items()
    }
    assert_close(to_matrices(capped.direction), expected)
    assert capped.diagnostics["capped"]


@pytest.mark.parametrize("bias", [True, False])
def test_spectral_step_without_a_factor(bias):
    params, x, y = make_network(bias)
    solved = solve(loss_fn, KRYLOV, params, x, y, norm="spectral", min_norm=0.0)
    unscaled = to_matrices(solve(loss_fn, KRYLOV, params, x, y).direction)
    for name, step in to_matrices(solved.direction).items():
        direction, gradient = unscaled[name], to_matrices(solved.gradient)[name]
        norm = np.sqrt((direction * gradient).sum())
        expected = direction / norm * np.sqrt(min(direction.shape))
        np.testing.assert_allclose(step, expected, rtol=1e-8, atol=1e-10)


def test_spectral_step_of_every_other_kind(exact_norm):
    """Lookup and scale have a diagonal L; what has M = I gets the length of an orthogonal map."""
    batch = np.random.default_rng(0).integers(7, size=(12, 5))
    params = {"embed": normal(1, 7, 3), "position": normal(2, 5, 3), "bias": normal(4, 3)}
    params = arrays(params | {"scale": normal(3, 3), "unclaimed": normal(5, 3)})

    def loss_fn(params, batch):
        x = jnp.sin(params["embed"][batch] + params["position"][None])
        x = jnp.sin(x * params["scale"][None, None] + params["bias"][None, None])
        return jnp.mean(x @ (params["unclaimed"] / jnp.linalg.norm(params["unclaimed"])))

    neurons = lnb.find_neurons(loss_fn, params, batch)
    kinds = {"embed": "lookup", "position": "identity", "scale": "scale"}
    assert {neuron.name: neuron.kind for neuron in neurons} == kinds
    solver = EXACT["cholesky"]
    h, g, *_ = solve(loss_fn, solver, params, batch, norm=exact_norm, min_norm=0.0)
    counts = np.bincount(batch.ravel(), minlength=7) / batch.size
    np.testing.assert_allclose(whitened_values(np.diag(counts), h["embed"]), 1, rtol=1e-8)
    x = np.sin(params["embed"][batch] + params["position"][None]).reshape(-1, 3)
    for channel in range(3):
        inputs = with_ones(x[:, [channel]], True)
        vector = np.stack([h["scale"][channel], h["bias"][channel]])[:, None]
        metric = inputs.T @ inputs / len(inputs)
        np.testing.assert_allclose(whitened_values(metric, vector), 1, rtol=1e-8)
    for name, rank in {"position": 3, "unclaimed": 1}.items():
        expected = g[name] / jnp.linalg.norm(g[name]) * jnp.sqrt(rank)
        np.testing.assert_allclose(h[name], expected, rtol=1e-8)
