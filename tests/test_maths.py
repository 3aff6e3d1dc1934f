"""What the paper says of directions and steps, each against arithmetic of the test's own."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from explicit import exact_inverse_root
from jax import Array, lax

import lnb
from lnb._norms import NORMS, Norm, orthogonal

pytestmark = pytest.mark.usefixtures("x64")

KRYLOV = lnb.Krylov(partial(jax.scipy.sparse.linalg.cg, tol=1e-13))
EXACT = {
    "cholesky": lnb.Cholesky(decay=0.0),
    "woodbury": lnb.Woodbury(decay=0.0, every=1),
    "krylov": KRYLOV,
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


# A network with two neurons: a strided convolution, and a dense one for all pixels together. It is
# written twice, the second time with its features in the open.

BATCH, PIXELS = 50, 4
NEURONS = ("conv", "head")


def make_network(bias: bool):
    params = {"conv": {"w": normal(0, 3, 2, 3)}, "head": {"w": normal(1, 12, 2)}}
    if bias:
        params["conv"]["b"], params["head"]["b"] = normal(2, 3), normal(3, 2)
    x, y = normal(4, BATCH, 2, 9) + 0.5, normal(5, BATCH, 2)
    return arrays(params), jnp.asarray(x), jnp.asarray(y)


def network(params, x: Array) -> Array:
    def add_bias(name, output):
        return output + params[name]["b"][None] if "b" in params[name] else output

    x = lax.conv_general_dilated(x, params["conv"]["w"], (2,), "VALID")
    x = add_bias("conv", jnp.moveaxis(x, 1, 2).reshape(-1, 3))
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
    return apply("head", jnp.tanh(x).reshape(BATCH, -1)), seen


def features_by_hand(params, x) -> dict[str, np.ndarray]:
    _, rows = network_by_hand(to_matrices(params), x)
    return {name: np.asarray(features) for name, features in rows.items()}


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
    product: dict
    diagnostics: dict


@partial(jax.jit, static_argnames=("loss_fn", "solver", "norm"))
def solve(loss_fn, solver, params, *args, norm="network", damping=0.0, min_norm=0.0):
    """The step of `lnb` at rate 1, with what it is made of."""
    neurons = lnb.find_neurons(loss_fn, params, *args, rows="all")
    _, gradient, features = lnb.backprop(loss_fn, neurons)(params, *args)
    optimizer = lnb.lnb(
        1.0,
        neurons,
        solver=solver,
        norm=norm,
        gradient_decay=0.0,
        nesterov=False,
        damping=lnb.Absolute(damping),
        min_norm=min_norm,
        weight_decay=0.0,
    )
    updates, state = optimizer.update(gradient, optimizer.init(params), params, features=features)
    direction = jax.tree.map(jnp.negative, updates)
    product = lnb.metric_product(neurons, features, direction)
    return Solved(direction, gradient, product, lnb.diagnostics(state))


def unnormalised(*args, **options) -> Solved:
    """The same with the direction as it was before normalisation."""
    solved = solve(*args, **options, min_norm=MIN_NORM)
    direction, product = (
        jax.tree.map(lambda x: MIN_NORM * x, tree) for tree in (solved.direction, solved.product)
    )
    return solved._replace(direction=direction, product=product)


# 2. Directions are least-squares fits


@pytest.mark.parametrize(
    ("name", "bias"),
    [
        ("cholesky", True),
        ("cholesky", False),
        ("woodbury", True),
        ("krylov", True),
        ("krylov", False),
    ],
)
def test_direction_is_the_least_squares_fit_of_the_errors(name, bias):
    params, x, y = make_network(bias)
    direction, gradient, product, diagnostics = unnormalised(loss_fn, EXACT[name], params, x, y)
    rows = features_by_hand(params, x)

    @jax.jit
    @jax.grad
    def slopes(shifts):
        return loss_of(network_by_hand(to_matrices(params), x, shifts)[0], y)

    slope = slopes({"conv": jnp.zeros((BATCH * PIXELS, 3)), "head": jnp.zeros((BATCH, 2))})
    fits = {}
    for name in NEURONS:
        errors = len(rows[name]) * np.asarray(slope[name])
        fits[name] = np.linalg.lstsq(with_ones(rows[name], bias), errors)[0]
    assert_close(to_matrices(direction), fits)

    # ||f(.; h)||^2 = h.Mh = h.g, for each neuron and together.
    total = 0.0
    for name in NEURONS:
        h, g, image = (to_matrices(tree)[name] for tree in (direction, gradient, product))
        square = ((with_ones(rows[name], bias) @ h) ** 2).sum(1).mean()
        total += square
        np.testing.assert_allclose([(h * image).sum(), (h * g).sum()], square, rtol=1e-8)
        np.testing.assert_allclose(diagnostics["neuron_norms"][f"{name}.w"] ** 2, square)
    np.testing.assert_allclose(diagnostics["norm"] ** 2, total)


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
    solved = unnormalised(loss_fn, EXACT["cholesky"], params, x, y)
    direction = solved.direction
    stepped = jax.tree.map(lambda p, h: p - 0.3 * h, params, direction)

    matrices, rows = to_matrices(params), features_by_hand(params, x)
    w = {name: paper_w(rows[name]) for name in NEURONS}
    statistics = {name: whitening(rows[name]) for name in NEURONS}

    def whiten(name, features):
        mean, root = statistics[name]
        return (features - mean[None]) @ root

    @jax.jit
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
def test_step_without_bias_is_that_of_foof(damping):
    params, x, y = make_network(bias=False)
    solved = unnormalised(loss_fn, EXACT["cholesky"], params, x, y, damping=damping)
    gradients = to_matrices(solved.gradient)
    expected = {}
    for name, rows in features_by_hand(params, x).items():
        second = rows.T @ rows / len(rows)
        expected[name] = np.linalg.solve(second + damping * np.eye(len(second)), gradients[name])
    assert_close(to_matrices(solved.direction), expected)


# 4. Invariance: the trained function does not depend on how its inputs are written down


STEPS = 5


class Problem(NamedTuple):
    """A network whose inputs can be rewritten as A x + c, with the first neuron compensated."""

    params: dict
    batches: np.ndarray  # [steps, batch, inputs] or [steps, batch, channels, pixels]
    targets: np.ndarray
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

    return Problem(params, batches, targets, predict, rewrite)


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

    return Problem(params, batches, targets, predict, rewrite)


PROBLEMS = {
    "dense": dense_problem,
    "dense without bias": partial(dense_problem, bias=False),
    "conv VALID": partial(conv_problem, "VALID"),
    "conv SAME": partial(conv_problem, "SAME"),
}
SOLVERS = {
    "cholesky": lnb.Cholesky(),
    "krylov": KRYLOV,
    # P has to know the mean and the second moment of the same batches.
    "cg": lnb.CG(mean_decay=0.9, second_decay=0.9),
}
A, C = normal(6, 4, 4) + 2 * np.eye(4), 3 * normal(7, 4)
MAPS = {
    "affine": (A, C),
    "linear": (A, 0 * C),
    "orthogonal": (np.linalg.qr(A)[0], C),
    "inverted": (-np.eye(4), np.ones(4)),
}


@cache
def trainer(problem: str, solver: str, norm: str, relative: bool) -> Callable:
    """Trains with all of `lnb`'s memory, but no weight decay: that depends on the inputs' scale.

    Returns a compiled function from parameters, batches, targets and damping to the predictions for
    the first batch, before the first step and after every one.
    """
    predict = PROBLEMS[problem]().predict

    def loss_fn(params, x, y):
        return 0.5 * jnp.mean(jnp.sum((predict(params, x) - y) ** 2, axis=1))

    def make_optimizer(neurons, damping):
        if solver == "sgd":
            return optax.with_extra_args_support(optax.sgd(0.05))
        return lnb.lnb(
            0.2,
            neurons,
            solver=SOLVERS[solver],
            norm=norm,
            damping=damping if relative else lnb.Absolute(damping),
            weight_decay=0.0,
        )

    @jax.jit
    def train(params, batches, targets, damping):
        neurons = lnb.find_neurons(loss_fn, params, batches[0], targets[0])
        optimizer = make_optimizer(neurons, damping)

        def step(carry, batch):
            params, state = carry
            _, gradients, features = lnb.backprop(loss_fn, neurons)(params, *batch)
            updates, state = optimizer.update(gradients, state, params, features=features)
            params = optax.apply_updates(params, updates)
            return (params, state), predict(params, batches[0])

        start = predict(params, batches[0])
        _, trained = lax.scan(step, (params, optimizer.init(params)), (batches, targets))
        return jnp.concatenate([start[None], trained])

    return train


def drift(problem, change, solver="cholesky", norm="network", damping=0.0, relative=True) -> float:
    """How much rewriting the inputs changes what the network predicts while it is trained."""
    params, batches, targets, _, rewrite = PROBLEMS[problem]()
    train = trainer(problem, solver, norm, relative)
    rewritten = rewrite(params, batches, *MAPS[change])
    one = train(*arrays((params, batches, targets)), damping)
    other = train(*arrays((*rewritten, targets)), damping)
    np.testing.assert_allclose(one[0], other[0], atol=1e-10)  # the same function to begin with
    assert np.abs(one[-1] - one[0]).max() > 0.1  # and it does learn
    return float(np.abs(one - other).max())


@pytest.mark.parametrize(
    ("problem", "change", "solver", "norm"),
    [
        ("dense", "affine", "cholesky", "network"),
        ("dense", "affine", "cholesky", "neuron"),
        ("dense", "affine", "cholesky", "spectral"),
        ("dense", "affine", "krylov", "network"),
        ("dense without bias", "linear", "cholesky", "network"),
        ("conv VALID", "affine", "cholesky", "spectral"),
        ("conv SAME", "linear", "cholesky", "network"),
    ],
)
def test_invariant_to_affine_maps_of_the_inputs(problem, change, solver, norm):
    assert drift(problem, change, solver, norm) < 1e-7


@pytest.mark.parametrize(
    ("problem", "norm", "relative"),
    [
        ("dense", "network", True),
        ("dense", "network", False),
        ("dense", "spectral", True),
        ("conv VALID", "spectral", True),
    ],
)
def test_invariant_to_rotations_with_damping(problem, norm, relative):
    assert drift(problem, "orthogonal", norm=norm, damping=0.1, relative=relative) < 1e-9


@pytest.mark.parametrize(
    ("problem", "solver", "norm"),
    [
        ("dense", "cholesky", "network"),
        ("dense", "cholesky", "neuron"),
        ("dense", "cholesky", "spectral"),
        ("dense", "cg", "network"),
        ("conv VALID", "cholesky", "spectral"),
    ],
)
def test_invariant_to_inverted_inputs_with_relative_damping(problem, solver, norm):
    assert drift(problem, "inverted", solver, norm, damping=0.1) < 1e-9


@pytest.mark.parametrize(
    ("problem", "change", "solver", "damping"),
    [
        ("dense", "affine", "sgd", 0.0),
        ("dense", "inverted", "sgd", 0.0),
        ("dense", "affine", "cholesky", 0.1),
        ("dense without bias", "linear", "cholesky", 0.1),
    ],
)
def test_what_is_not_invariant(problem, change, solver, damping):
    """That the tests above can fail."""
    assert drift(problem, change, solver, damping=damping) > 1e-2


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
    trained: Any = optax.apply_updates(params, updates)
    solution = np.linalg.lstsq(with_ones(x, bias), y)[0]
    found = np.vstack([trained["w"], trained["b"]]) if bias else trained["w"]
    np.testing.assert_allclose(found, solution, rtol=1e-7, atol=1e-8)


def test_linear_convolution_lands_on_its_minimum_in_one_step():
    x, y = normal(0, 10, 2, 9) + 2, normal(1, 10, 4, 3)
    params = arrays({"w": normal(2, 3, 2, 3), "b": normal(3, 3)})

    def loss_fn(params, x, y):
        outputs = lax.conv_general_dilated(x, params["w"], (2,), "VALID")
        outputs = jnp.moveaxis(outputs, 1, 2) + params["b"][None, None]
        return 0.5 * jnp.mean(jnp.sum((outputs - y) ** 2, axis=2))

    direction = unnormalised(loss_fn, EXACT["cholesky"], params, *arrays((x, y))).direction
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


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_are_those_of_the_output(name):
    loss_fn, shape, n = POSITIONS[name]
    params = arrays({"w": normal(0, *shape)})
    x = jnp.asarray(normal(1, 5, 2, 6, 10) if len(shape) == 4 else normal(1, 5, 60))
    (neuron,) = neurons = lnb.find_neurons(loss_fn, params, x, rows="all")
    assert neuron.n == n
    features = lnb.forward_features(loss_fn, neurons)(params, x)
    assert features["w"].count == n


def diagonal_of_m(loss_fn, params, x) -> np.ndarray:
    """The metric's diagonal, shaped like the weight, from one product for each of its elements."""
    neurons = lnb.find_neurons(loss_fn, params, x)
    features = lnb.forward_features(loss_fn, neurons)(params, x)
    weight = params["w"]
    units = jnp.eye(weight.size).reshape(weight.size, *weight.shape)
    columns = jax.vmap(lambda unit: lnb.metric_product(neurons, features, {"w": unit})["w"])(units)
    return np.diagonal(columns.reshape(weight.size, -1)).reshape(weight.shape)


def diagonal_of_p(loss_fn, params, x) -> np.ndarray:
    """One over the diagonal of P, up to a factor: without a bias the first step of CG is along P g.

    What is returned has the mean 1.
    """
    neurons = lnb.find_neurons(loss_fn, params, x)
    features = lnb.forward_features(loss_fn, neurons)(params, x)
    gradient = jax.tree.map(jnp.ones_like, params)
    solver = lnb.CG(steps=1, shrinkage=0.0)
    optimizer = lnb.scale_by_lnb(neurons, solver=solver, damping=0.0, min_norm=0.0)
    step: Any
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


def whitened_values(metric: np.ndarray, direction: np.ndarray) -> np.ndarray:
    """The singular values of L^T h."""
    return np.linalg.svd(np.linalg.cholesky(metric).T @ direction, compute_uv=False)


def whitened_parts(x: np.ndarray, direction: np.ndarray, bias: bool):
    """The singular values of a weight for whitened features, and the change of the mean output."""
    if not bias:
        return whitened_values(x.T @ x / len(x), direction), None
    weight, mean = direction[:-1], x.mean(0)
    covariance = x.T @ x / len(x) - np.outer(mean, mean)
    return whitened_values(covariance, weight), direction[-1] + mean @ weight


@pytest.fixture
def exact_norm(monkeypatch) -> str:
    """The spectral norm with an exact root."""
    unit = partial(orthogonal, root=exact_inverse_root)
    monkeypatch.setitem(NORMS, "exactly spectral", Norm(False, unit, lambda neuron: True))
    return "exactly spectral"


@pytest.mark.parametrize("bias", [True, False])
def test_spectral_step_has_singular_values_of_one(bias, exact_norm):
    params, x, y = make_network(bias)
    solved = solve(loss_fn, EXACT["cholesky"], params, x, y, norm=exact_norm)
    features = features_by_hand(params, x)
    for name, direction in to_matrices(solved.direction).items():
        values, mean = whitened_parts(features[name], direction, bias)
        assert len(values) == min(features[name].shape[1], direction.shape[1])
        np.testing.assert_allclose(values, 1, rtol=1e-8)
        if mean is not None:
            np.testing.assert_allclose(np.mean(mean**2), 1, rtol=1e-8)


def test_spectral_step_by_newton_schulz():
    params, x, y = make_network(bias=True)
    features = features_by_hand(params, x)
    free, gradients, _, diagnostics = solve(
        loss_fn, EXACT["cholesky"], params, x, y, norm="spectral"
    )
    assert not diagnostics["capped"]
    for name, direction in to_matrices(free).items():
        values, _ = whitened_parts(features[name], direction, bias=True)
        assert values.min() > 0.68
        assert values.max() < 1.21

    # `min_norm` shortens the step of a neuron whose norm is smaller, and no other.
    inputs = {name: with_ones(x, True) for name, x in features.items()}
    metrics = {name: x.T @ x / len(x) for name, x in inputs.items()}
    norms = {
        name: np.linalg.norm(np.linalg.solve(np.linalg.cholesky(metrics[name]), g))
        for name, g in to_matrices(gradients).items()
    }
    min_norm = np.mean(list(norms.values()))
    assert min(norms.values()) < 0.9 * min_norm
    capped = solve(loss_fn, EXACT["cholesky"], params, x, y, norm="spectral", min_norm=min_norm)
    expected = {name: min(1, norms[name] / min_norm) * h for name, h in to_matrices(free).items()}
    assert_close(to_matrices(capped.direction), expected)
    assert capped.diagnostics["capped"]


@pytest.mark.parametrize("bias", [True, False])
def test_spectral_step_without_an_inverse(bias):
    params, x, y = make_network(bias)
    solved = solve(loss_fn, KRYLOV, params, x, y, norm="spectral")
    directions = to_matrices(unnormalised(loss_fn, KRYLOV, params, x, y).direction)
    for name, step in to_matrices(solved.direction).items():
        direction, gradient = directions[name], to_matrices(solved.gradient)[name]
        norm = np.sqrt((direction * gradient).sum())
        inputs, outputs = direction.shape[0] - bias, direction.shape[1]
        expected = direction / norm * np.sqrt(min(inputs, outputs) + bias * outputs)
        np.testing.assert_allclose(step, expected, rtol=1e-7, atol=1e-9)


def test_spectral_step_of_every_other_kind(exact_norm):
    """Lookup and scale have a diagonal M; what has M = I gets the length of an orthogonal map."""
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
    h, g, *_ = solve(loss_fn, solver, params, batch, norm=exact_norm)
    counts = np.bincount(batch.ravel(), minlength=7) / batch.size
    np.testing.assert_allclose(whitened_values(np.diag(counts), h["embed"]), 1, rtol=1e-8)
    x = np.sin(params["embed"][batch] + params["position"][None]).reshape(-1, 3)
    for channel in range(3):
        vector = np.stack([h["scale"][channel], h["bias"][channel]])[:, None]
        values, mean = whitened_parts(x[:, [channel]], vector, bias=True)
        assert mean is not None
        np.testing.assert_allclose([*values, *np.abs(mean)], 1, rtol=1e-8)
    for name, rank in {"position": 3, "unclaimed": 1}.items():
        expected = g[name] / jnp.linalg.norm(g[name]) * jnp.sqrt(rank)
        np.testing.assert_allclose(h[name], expected, rtol=1e-8)


def test_two_orientations_by_grams():
    """A tied embedding: M is counts of tokens times one side of it, x x^T times the other.

    With those a product takes fewer flops than one pass over the features.
    """
    width, tokens = 16, np.random.default_rng(0).integers(0, 40, 512)
    params = {"embedding": jnp.asarray(normal(1, 40, width))}

    def loss_fn(params, tokens):
        return jnp.sum(jax.nn.logsumexp(params["embedding"][tokens] @ params["embedding"].T, -1))

    neurons = lnb.find_neurons(loss_fn, params, tokens)
    assert not neurons["embedding"].has_matrix
    features = lnb.forward_features(loss_fn, neurons)(params, tokens)
    product = jax.jit(partial(lnb.metric_product, neurons))
    v, x = normal(2, 40, width), np.asarray(params["embedding"])[tokens]
    expected = (np.bincount(tokens, minlength=40)[:, None] * v + v @ x.T @ x) / (2 * len(tokens))
    vector = {"embedding": jnp.asarray(v)}
    assert_close(product(features, vector), {"embedding": jnp.asarray(expected)})
    analysis: Any = product.lower(features, vector).compile().cost_analysis()
    assert analysis["flops"] < 2 * len(tokens) * width * 40
