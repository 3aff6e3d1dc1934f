"""Every solver, against least squares and explicit matrices."""

import dataclasses
from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from explicit import explicit_metric, fed, matrix, theta_of, uncorrelated, with_ones

from lnb import CG, Absolute, Cholesky, Krylov, Woodbury
from lnb._metric import Theta

pytestmark = pytest.mark.usefixtures("x64")

KRYLOV = Krylov(partial(jax.scipy.sparse.linalg.cg, tol=1e-13))
EXACT = {"cg": CG(steps=20), "cholesky": Cholesky(), "woodbury": Woodbury(), "krylov": KRYLOV}
USUAL = {"cg": CG(), "cholesky": Cholesky(), "woodbury": Woodbury(every=3), "krylov": Krylov()}
FIRST = jnp.int32(0)


@partial(jax.jit, static_argnames=("solver", "neuron"))
def take(solver, neuron, features, gradient, state=None, damping=0.0):
    """One step: the direction and the state after it."""
    known, memory = solver.init(neuron, gradient) if state is None else state
    known = solver.update(neuron, features, known, damping, FIRST)
    direction, memory = solver.direction(neuron, features, gradient, known, memory, damping)
    return direction, (known, memory)


def gradient_of(x, errors, bias: bool) -> Theta:
    """That of a neuron, when the gradient of the loss to its outputs is errors / n."""
    weight = jnp.asarray(x.T @ errors / len(x))[None]
    return Theta(weight, jnp.asarray(errors.mean(0))[None] if bias else None)


def normal(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def finite(tree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


# Exact solves


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_direction_is_the_least_squares_fit_of_the_errors(name, bias):
    x, errors = normal(50, 6) + 1, normal(50, 3, seed=1)
    gradient = gradient_of(x, errors, bias)
    direction, _ = take(EXACT[name], *fed(x, bias), gradient)
    expected = np.linalg.lstsq(with_ones(x, bias), errors)[0]
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_damped_direction_solves_the_explicit_system(name, bias):
    x, gradient = normal(2, 30, 6) + 1, theta_of(6, 3, bias, g=2)
    direction, _ = take(EXACT[name], *fed(x, bias), gradient, damping=0.1)
    for block in range(2):
        power = x[block].var(0).mean() if bias else (x[block] ** 2).mean()
        metric = explicit_metric(x[block], bias, gamma=0.1 * power)
        expected = np.linalg.solve(metric, matrix(gradient, block))
        np.testing.assert_allclose(matrix(direction, block), expected, rtol=1e-8, atol=1e-9)


def test_direction_agrees_with_lineax():
    x, gradient = normal(30, 6) + 1, theta_of(6, 3, bias=True)
    metric = jnp.asarray(explicit_metric(x, True, gamma=0.3))
    operator = lx.MatrixLinearOperator(metric, lx.positive_semidefinite_tag)
    column = jnp.asarray(matrix(gradient)[:, 0])
    expected = lx.linear_solve(operator, column, lx.Cholesky()).value
    damping = Absolute(0.3)
    direction, _ = take(Cholesky(), *fed(x, True), gradient, damping=damping)
    np.testing.assert_allclose(matrix(direction)[:, 0], expected, rtol=1e-9)


@pytest.mark.parametrize("name", EXACT)
def test_scales_are_solved_channel_by_channel(name):
    x, gradient = normal(5, 30, 1) + 1, theta_of(1, 1, bias=True, g=5)
    damping = Absolute(0.1)
    direction, _ = take(EXACT[name], *fed(x, True, "scale"), gradient, damping=damping)
    for block in range(5):
        metric = explicit_metric(x[block], True, gamma=0.1)
        expected = np.linalg.solve(metric, matrix(gradient, block))
        np.testing.assert_allclose(matrix(direction, block), expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_lookups_are_solved_row_by_row(name):
    counts, gradient = jnp.asarray([[3.0, 5.0, 0.0, 2.0]]), theta_of(4, 3, bias=False)
    indices = np.repeat(np.arange(4), np.asarray(counts[0], int))
    direction, _ = take(EXACT[name], *fed(indices, False, "lookup"), gradient, damping=0.1)
    share = np.asarray(counts[0, :, None]) / 10
    expected = matrix(gradient) / (share + 0.1 * share.mean())
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_a_masked_bias_gives_the_metric_without_bias(name):
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=False)
    neuron, features = fed(x, True)
    neuron = dataclasses.replace(neuron, bias=None, bias_layout=None)  # as the optimizer does
    direction, _ = take(EXACT[name], neuron, features, gradient)
    expected = np.linalg.solve(explicit_metric(x, False), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8)


# Conjugate gradients


@pytest.mark.parametrize("bias", [True, False])
def test_cg_needs_one_step_where_its_preconditioner_is_exact(bias):
    x, gradient = uncorrelated(50, 4, centred=bias), theta_of(4, 3, bias)
    direction, (_, memory) = take(CG(steps=1, shrinkage=0.0), *fed(x, bias), gradient)
    expected = np.linalg.solve(explicit_metric(x, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-9)
    assert memory.residual < 1e-9


def test_cg_reports_its_residual():
    x, gradient = normal(30, 6) + 1, theta_of(6, 3, bias=True)
    direction, (_, memory) = take(CG(), *fed(x, True), gradient)
    error = explicit_metric(x, True) @ matrix(direction) - matrix(gradient)
    expected = np.linalg.norm(error) / np.linalg.norm(matrix(gradient))
    np.testing.assert_allclose(memory.residual, expected, rtol=1e-8)


def test_cg_converges_over_steps_by_its_warm_start():
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    state, residuals = None, []
    for _ in range(20):
        _, state = take(CG(), *fed(x, True), gradient, state)
        residuals.append(float(state[1].residual))
    assert residuals[-1] < 1e-4 * residuals[0]


@pytest.mark.parametrize("scale", [-1.0, 1e-8, -1e8])
def test_cg_is_safe_from_a_stale_start(scale):
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    neuron, features = fed(x, True)
    known, memory = CG().init(neuron, gradient)
    for seed in range(20):
        start = jax.tree.map(lambda v: scale * v, theta_of(10, 3, bias=True, seed=seed))
        state = known, memory._replace(direction=start)
        direction, _ = take(CG(), neuron, features, gradient, state)
        assert np.vdot(matrix(direction), matrix(gradient)) > 0


def test_cg_starts_from_any_multiple_of_the_solution():
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    solution, _ = take(Cholesky(), *fed(x, True), gradient)
    known, memory = CG().init(fed(x, True)[0], gradient)
    state = known, memory._replace(direction=jax.tree.map(lambda v: -7.0 * v, solution))
    direction, _ = take(CG(steps=0), *fed(x, True), gradient, state)
    np.testing.assert_allclose(matrix(direction), matrix(solution), rtol=1e-9)


# Memory


def running(batches, decay, bias, intervals=None):
    """Debiased averages of E[x x^T] and E[x], as [d + 1, d + 1].

    Each batch stands for its interval, the steps since the one before; all weights decay by steps.
    """
    intervals = np.ones(len(batches)) if intervals is None else np.array(intervals)
    age = intervals[::-1].cumsum()[::-1] - intervals
    weights = (1 - decay**intervals) * decay**age
    metrics = [explicit_metric(x, bias) for x in batches]
    return np.tensordot(weights / weights.sum(), metrics, 1)


def feed(solver, batches, bias, gradient):
    """The direction after some batches."""
    neuron, features = fed(batches[0], bias)
    known, memory = solver.init(neuron, gradient)
    for step, x in enumerate(batches):
        _, features = fed(x, bias)
        known = solver.update(neuron, features, known, 0.0, jnp.int32(step))
    return solver.direction(neuron, features, gradient, known, memory, 0.0)[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("every", "refreshes"),
    [
        (1, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}),
        (2, {0: 1, 1: 1, 2: 2, 4: 2}),
        (4, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2}),
    ],
)
def test_cholesky_solves_for_the_running_metric(every, refreshes, bias):
    """As the intervals between refreshes grow, so do the batches' weights."""
    batches, gradient = normal(6, 30, 4) + 1, theta_of(4, 3, bias)
    direction = feed(Cholesky(decay=0.8, every=every), batches, bias, gradient)
    metric = running(batches[list(refreshes)], 0.8, bias, list(refreshes.values()))
    expected = np.linalg.solve(metric, matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-7)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_woodbury_inverts_the_running_metric(every, bias):
    batches, gradient = [normal(30, 8) + 1, *(normal(9, 3, 8, seed=1) + 1)], theta_of(8, 3, bias)
    direction = feed(Woodbury(decay=0.9, every=every), batches, bias, gradient)
    expected = np.linalg.solve(running(batches, 0.9, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-7)


def test_woodbury_stays_finite():
    solver, gradient = Woodbury(decay=0.95, every=20), theta_of(8, 3, bias=True)
    batches = jnp.asarray(normal(5000, 3, 8) + 1, jnp.float32)
    gradient = jax.tree.map(lambda v: v.astype(jnp.float32), gradient)

    def step(state, x):
        x = x.at[:, 0].set(0)  # an input that is never visited
        direction, state = take(solver, neuron, fed(x, True)[1], gradient, state, 0.1)
        return state, direction

    neuron, _ = fed(batches[0], True)
    state, directions = jax.jit(partial(jax.lax.scan, step))(solver.init(neuron, gradient), batches)
    assert finite((state, directions))
    assert np.abs(directions.weight).max() < 1e4


@pytest.mark.parametrize("name", USUAL)
def test_a_batch_without_positions_changes_no_statistics(name):
    x, gradient, solver = normal(30, 4) + 1, theta_of(4, 3, bias=True), USUAL[name]
    neuron, features = fed(x, True)
    empty = features.only_if(jnp.asarray(False))
    _, (known, memory) = take(solver, neuron, features, gradient, damping=0.1)
    after = solver.update(neuron, empty, known, 0.1, FIRST)
    jax.tree.map(np.testing.assert_array_equal, known, after)
    assert finite(solver.direction(neuron, empty, gradient, after, memory, 0.1))


def test_cg_falls_back_on_its_preconditioner_without_positions():
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=True)
    neuron, features = fed(x, True)
    _, state = take(CG(), neuron, features, gradient)
    direction, _ = take(CG(), neuron, features.only_if(jnp.asarray(False)), gradient, state)
    exact, _ = take(Cholesky(), neuron, features, gradient)
    ratio = np.linalg.norm(matrix(direction)) / np.linalg.norm(matrix(exact))
    assert 0.5 < ratio < 2


@pytest.mark.parametrize("solver", [Cholesky(), Woodbury(every=1)])
def test_features_that_are_not_finite_keep_the_old_inverse(solver):
    x, gradient = normal(2, 30, 4) + 1, theta_of(4, 3, bias=True, g=2)
    neuron, features = fed(x, True)
    known, memory = solver.init(neuron, gradient)
    known = solver.update(neuron, features, known, 0.0, FIRST)
    broken = x.copy()
    broken[1] = np.inf  # in one block of two
    after = solver.update(neuron, fed(broken, True)[1], known, 0.0, FIRST)
    np.testing.assert_allclose(known.inverse, after.inverse, rtol=1e-12)
    direction, _ = solver.direction(neuron, features, gradient, after, memory, 0.0)
    assert finite(direction)


def test_an_indefinite_matrix_keeps_the_old_inverse():
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=False)
    _, (known, _) = take(Cholesky(), *fed(x, False), gradient)
    # Damping that makes M indefinite: nothing else can.
    _, (after, _) = take(Cholesky(), *fed(x, False), gradient, (known, ()), Absolute(-1e3))
    np.testing.assert_array_equal(after.inverse, known.inverse)


# Neurons without a Gram matrix


@pytest.mark.parametrize("solver", [Cholesky(), Woodbury()])
def test_neurons_without_a_matrix_are_left_to_cg(solver):
    neuron, _ = fed(normal(30, 4), True)
    assert solver.serving(neuron) is solver
    assert solver.serving(dataclasses.replace(neuron, has_matrix=False)) == CG()
    with patch("lnb._plan.LARGEST", 3):
        assert solver.serving(neuron) == CG()


# Robustness, in float32 as in use


@partial(jax.jit, static_argnames=("solver", "neuron"))
def turn(solver, neuron, features, gradient, damping):
    """The directions of three steps whose gradient turns round, and the state after them."""

    def step(state, scale):
        scaled = jax.tree.map(lambda v: scale * v, gradient)
        return take(solver, neuron, features, scaled, state, damping)[::-1]

    scales = jnp.asarray([1.0, -1.0, 0.5], jnp.float32)
    state, directions = jax.lax.scan(step, solver.init(neuron, gradient), scales)
    return directions, state


@pytest.mark.parametrize("damping", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", USUAL)
class TestNothingBreaks:
    def run(self, name, bias, damping, x, gradient):
        gradient = jax.tree.map(lambda v: v.astype(jnp.float32), gradient)
        neuron, features = fed(np.asarray(x, np.float32), bias)
        directions, state = turn(USUAL[name], neuron, features, gradient, damping)
        assert finite((directions, state))
        return directions

    def test_dead_neuron(self, name, bias, damping):
        """All that can change is the mean of its outputs, and that does."""
        x = np.zeros((20, 4))
        gradient = gradient_of(x, normal(20, 3, seed=1), bias)
        directions = self.run(name, bias, damping, x, gradient)
        np.testing.assert_array_equal(directions.weight, 0)
        if bias:
            mean = np.asarray(gradient.bias)
            assert np.abs(mean).max() > 0.1
            expected = np.array([1, -1, 0.5])[:, None, None] * mean
            np.testing.assert_allclose(directions.bias, expected, rtol=1e-5)

    def test_one_dead_input(self, name, bias, damping):
        x = normal(20, 4) * np.array([1, 0, 1, 1])
        self.run(name, bias, damping, x, theta_of(4, 3, bias))

    def test_constant_features(self, name, bias, damping):
        self.run(name, bias, damping, np.full((20, 4), 3.7), theta_of(4, 3, bias))

    def test_zero_gradient(self, name, bias, damping):
        zero = jax.tree.map(jnp.zeros_like, theta_of(4, 3, bias))
        directions = self.run(name, bias, damping, normal(20, 4), zero)
        jax.tree.map(lambda v: np.testing.assert_array_equal(v, 0), directions)

    def test_fewer_positions_than_inputs(self, name, bias, damping):
        x = normal(5, 40)
        gradient = gradient_of(x, normal(5, 3, seed=1), bias)
        self.run(name, bias, damping, x, gradient)

    @pytest.mark.parametrize("scale", [1e-6, 1e6])
    def test_scale_of_the_features(self, name, bias, damping, scale):
        x, errors = scale * (normal(20, 4) + 1), normal(20, 3, seed=1)
        gradient = gradient_of(x, errors, bias)
        direction = self.run(name, bias, damping, x, gradient)
        # Features times `scale` are weights divided by it; relative damping scales along.
        unit = gradient_of(x / scale, errors, bias)
        expected = self.run(name, bias, damping, x / scale, unit)
        largest = np.abs(expected.weight).max()
        np.testing.assert_allclose(scale * direction.weight, expected.weight, atol=1e-3 * largest)
