"""Every solver, against least squares and explicit matrices."""

from functools import partial

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from explicit import (
    explicit_metric,
    gram_of,
    make_neuron,
    matrix,
    rows_of,
    theta_of,
    uncorrelated,
    with_ones,
)

from lnb._damping import Damping
from lnb._metric import Gram, Theta, empty_unless
from lnb._packed import WHOLE, is_packed
from lnb._solvers import CG, Cholesky, Krylov, Woodbury

pytestmark = pytest.mark.usefixtures("x64")

KRYLOV = Krylov(partial(jax.scipy.sparse.linalg.cg, tol=1e-13))
EXACT = {"cg": CG(steps=20), "cholesky": Cholesky(), "woodbury": Woodbury(), "krylov": KRYLOV}
USUAL = {"cg": CG(), "cholesky": Cholesky(), "woodbury": Woodbury(every=3), "krylov": Krylov()}
DENSE, ROWS = make_neuron(), make_neuron(metric="matrix-free")
NO_DAMPING, FIRST = Damping(0.0), jnp.int32(0)
HELD = {"gram": (DENSE, gram_of), "rows": (ROWS, rows_of)}


@partial(jax.jit, static_argnames=("solver", "neuron", "damping"))
def take(solver, neuron, features, gradient, state=None, damping=NO_DAMPING):
    """One step: the direction and the state after it."""
    state = solver.init(neuron, gradient) if state is None else state
    state = solver.update(neuron, features, state, damping, FIRST)
    return solver.direction(neuron, features, gradient, state, damping)


def gradient_of(x, errors, bias: bool) -> Theta:
    """That of a neuron, when the gradient of the loss to its outputs is errors / n."""
    weight = jnp.asarray(x.T @ errors / len(x))[None]
    return Theta(weight, jnp.asarray(errors.mean(0))[None] if bias else None)


def normal(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def finite(tree) -> bool:
    return all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


# Exact solves


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_direction_is_the_least_squares_fit_of_the_errors(name, bias, held):
    x, errors = normal(50, 6) + 1, normal(50, 3, seed=1)
    neuron, hold = HELD[held]
    gradient = gradient_of(x, errors, bias)
    direction, _ = take(EXACT[name], neuron, hold(x, bias), gradient)
    expected = np.linalg.lstsq(with_ones(x, bias), errors)[0]
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", EXACT)
def test_damped_direction_solves_the_explicit_system(name, bias, held):
    x, gradient = normal(2, 30, 6) + 1, theta_of(6, 3, bias, g=2)
    neuron, hold = HELD[held]
    direction, _ = take(EXACT[name], neuron, hold(x, bias), gradient, damping=Damping(0.1))
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
    damping = Damping(0.3, relative=False)
    direction, _ = take(Cholesky(), DENSE, gram_of(x, True), gradient, damping=damping)
    np.testing.assert_allclose(matrix(direction)[:, 0], expected, rtol=1e-9)


@pytest.mark.parametrize("name", EXACT)
def test_scales_are_solved_channel_by_channel(name):
    x, gradient = normal(5, 30, 1) + 1, theta_of(1, 1, bias=True, g=5)
    damping = Damping(0.1, relative=False)
    direction, _ = take(
        EXACT[name], make_neuron("scale"), gram_of(x, True), gradient, damping=damping
    )
    for block in range(5):
        metric = explicit_metric(x[block], True, gamma=0.1)
        expected = np.linalg.solve(metric, matrix(gradient, block))
        np.testing.assert_allclose(matrix(direction, block), expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_lookups_are_solved_row_by_row(name):
    counts, gradient = jnp.asarray([[3.0, 5.0, 0.0, 2.0]]), theta_of(4, 3, bias=False)
    features = Gram(counts, None, jnp.asarray(10.0))
    damping = Damping(0.1)
    direction, _ = take(EXACT[name], make_neuron("lookup"), features, gradient, damping=damping)
    share = np.asarray(counts[0, :, None]) / 10
    expected = matrix(gradient) / (share + 0.1 * share.mean())
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8)


@pytest.mark.parametrize("name", EXACT)
def test_a_masked_bias_gives_the_metric_without_bias(name):
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=False)
    direction, _ = take(EXACT[name], DENSE, gram_of(x, True), gradient)
    expected = np.linalg.solve(explicit_metric(x, False), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-8)


# Conjugate gradients


@pytest.mark.parametrize("bias", [True, False])
def test_cg_needs_one_step_where_its_preconditioner_is_exact(bias):
    x, gradient = uncorrelated(50, 4, centred=bias), theta_of(4, 3, bias)
    direction, state = take(CG(steps=1, shrinkage=0.0), DENSE, gram_of(x, bias), gradient)
    expected = np.linalg.solve(explicit_metric(x, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-9)
    assert state.residual < 1e-9


def test_cg_reports_its_residual():
    x, gradient = normal(30, 6) + 1, theta_of(6, 3, bias=True)
    direction, state = take(CG(), DENSE, gram_of(x, True), gradient)
    error = explicit_metric(x, True) @ matrix(direction) - matrix(gradient)
    expected = np.linalg.norm(error) / np.linalg.norm(matrix(gradient))
    np.testing.assert_allclose(state.residual, expected, rtol=1e-8)


def test_cg_converges_over_steps_by_its_warm_start():
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    state, residuals = None, []
    for _ in range(20):
        _, state = take(CG(), DENSE, gram_of(x, True), gradient, state)
        residuals.append(float(state.residual))
    assert residuals[-1] < 1e-4 * residuals[0]


@pytest.mark.parametrize("scale", [-1.0, 1e-8, -1e8])
def test_cg_is_safe_from_a_stale_start(scale):
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    fresh = CG().init(DENSE, gradient)
    for seed in range(20):
        start = jax.tree.map(lambda v: scale * v, theta_of(10, 3, bias=True, seed=seed))
        state = fresh._replace(direction=start)
        direction, _ = take(CG(), DENSE, gram_of(x, True), gradient, state)
        assert np.vdot(matrix(direction), matrix(gradient)) > 0


def test_cg_starts_from_any_multiple_of_the_solution():
    x, gradient = normal(50, 10) + 1, theta_of(10, 3, bias=True)
    solution, _ = take(Cholesky(), DENSE, gram_of(x, True), gradient)
    state = (
        CG().init(DENSE, gradient)._replace(direction=jax.tree.map(lambda v: -7.0 * v, solution))
    )
    direction, _ = take(CG(steps=0), DENSE, gram_of(x, True), gradient, state)
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


def feed(solver, neuron, hold, batches, bias, gradient):
    state = solver.init(neuron, gradient)
    for step, x in enumerate(batches):
        features = empty_unless(solver.due(neuron, jnp.int32(step)), hold(x, bias))
        state = solver.update(neuron, features, state, Damping(0.0), jnp.int32(step))
    return solver.direction(neuron, hold(batches[-1], bias), gradient, state, Damping(0.0))[0]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize(
    ("every", "turns"),
    [
        (1, {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}),
        (2, {0: 1, 1: 1, 2: 2, 4: 2}),
        (4, {0: 1, 1: 1, 2: 1, 3: 1, 4: 2}),
    ],
)
def test_cholesky_solves_for_the_running_metric(every, turns, factors, bias):
    """Of the batches at the neuron's turns; as the intervals grow, so do the batches' weights."""
    batches, gradient = normal(6, 30, 4) + 1, theta_of(4, 3, bias)
    solver = Cholesky(decay=0.8, every=every, factors=factors)
    direction = feed(solver, DENSE, gram_of, batches, bias, gradient)
    metric = running(batches[list(turns)], 0.8, bias, list(turns.values()))
    expected = np.linalg.solve(metric, matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factors", [False, True])
@pytest.mark.parametrize("inputs", [WHOLE + 1, WHOLE + 2])
def test_cholesky_of_a_packed_metric(inputs, factors, bias):
    x, gradient = normal(2, 3 * inputs, inputs) + 1, theta_of(inputs, 3, bias, g=2)
    solver, damping = Cholesky(factors=factors), Damping(0.1, relative=False)
    direction, state = take(solver, DENSE, gram_of(x, bias), gradient, damping=damping)
    assert is_packed(state.running.average.value[1])
    for block in range(2):
        metric = explicit_metric(x[block], bias, gamma=0.1)
        expected = np.linalg.solve(metric, matrix(gradient, block))
        np.testing.assert_allclose(matrix(direction, block), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_woodbury_inverts_the_running_metric(every, bias):
    batches, gradient = [normal(30, 8) + 1, *(normal(9, 3, 8, seed=1) + 1)], theta_of(8, 3, bias)
    solver = Woodbury(decay=0.9, every=every)
    direction = feed(solver, ROWS, rows_of, batches, bias, gradient)
    expected = np.linalg.solve(running(batches, 0.9, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(direction), expected, rtol=1e-7)


def test_woodbury_stays_finite():
    solver, gradient = Woodbury(decay=0.95, every=20), theta_of(8, 3, bias=True)
    batches = jnp.asarray(normal(5000, 3, 8) + 1, jnp.float32)
    gradient = jax.tree.map(lambda v: v.astype(jnp.float32), gradient)

    def step(state, x):
        x = x.at[:, 0].set(0)  # an input that is never visited
        direction, state = take(solver, ROWS, rows_of(x, True), gradient, state, Damping(0.1))
        return state, direction

    state, directions = jax.jit(partial(jax.lax.scan, step))(solver.init(ROWS, gradient), batches)
    assert finite((state, directions))
    assert np.abs(directions.weight).max() < 1e4


def empty_like(features: Gram) -> Gram:
    return jax.tree.map(jnp.zeros_like, features)


@pytest.mark.parametrize("name", USUAL)
def test_a_batch_without_positions_changes_no_statistics(name):
    x, gradient, solver = normal(30, 4) + 1, theta_of(4, 3, bias=True), USUAL[name]
    features = gram_of(x, True)
    state = solver.update(DENSE, features, solver.init(DENSE, gradient), Damping(0.1), FIRST)
    after = solver.update(DENSE, empty_like(features), state, Damping(0.1), FIRST)
    jax.tree.map(np.testing.assert_array_equal, state, after)
    direction, after = solver.direction(DENSE, empty_like(features), gradient, after, Damping(0.1))
    assert finite((direction, after))


def test_cg_falls_back_on_its_preconditioner_without_positions():
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=True)
    features = gram_of(x, True)
    _, state = take(CG(), DENSE, features, gradient)
    direction, _ = take(CG(), DENSE, empty_like(features), gradient, state)
    exact, _ = take(Cholesky(), DENSE, features, gradient)
    ratio = np.linalg.norm(matrix(direction)) / np.linalg.norm(matrix(exact))
    assert 0.5 < ratio < 2


@pytest.mark.parametrize(
    ("solver", "neuron", "hold"),
    [
        (Cholesky(), DENSE, gram_of),
        (Cholesky(factors=True), DENSE, gram_of),
        (Woodbury(every=1), ROWS, rows_of),
    ],
)
def test_a_failed_factorisation_keeps_the_old_one(solver, neuron, hold):
    x, gradient = normal(2, 30, 4) + 1, theta_of(4, 3, bias=True, g=2)
    state = solver.update(neuron, hold(x, True), solver.init(neuron, gradient), Damping(0.0), FIRST)
    broken = x.copy()
    broken[1] = np.inf  # in one block of two
    after = solver.update(neuron, hold(broken, True), state, Damping(0.0), FIRST)
    old, new = (s.matrix if isinstance(solver, Cholesky) else s.inverse for s in (state, after))
    np.testing.assert_array_equal(old[1], new[1])
    assert finite(new)
    direction, _ = solver.direction(neuron, hold(x, True), gradient, after, Damping(0.0))
    assert finite(direction)


def test_an_indefinite_matrix_keeps_the_old_inverse():
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=False)
    state = Cholesky(decay=0.0).init(DENSE, gradient)
    state = Cholesky(decay=0.0).update(DENSE, gram_of(x, False), state, Damping(0.0), FIRST)
    indefinite = Gram(-jnp.eye(4)[None], None, jnp.asarray(1.0))
    after = Cholesky(decay=0.0).update(DENSE, indefinite, state, Damping(0.0), FIRST)
    np.testing.assert_array_equal(after.matrix, state.matrix)


# Neurons without a gram


@pytest.mark.parametrize("solver", [Cholesky(), Woodbury()])
def test_neurons_without_a_gram_are_left_to_cg(solver):
    neuron = make_neuron(metric="matrix-free", has_gram=False)
    x, gradient = normal(30, 4) + 1, theta_of(4, 3, bias=True)
    features = gram_of(x, True)
    expected, state = take(CG(), neuron, features, gradient)
    direction, fallback_state = take(solver, neuron, features, gradient)
    np.testing.assert_array_equal(matrix(direction), matrix(expected))
    assert jax.tree.structure(state) == jax.tree.structure(fallback_state)
    assert solver.inverse(neuron, fallback_state) is None


# Robustness, in float32 as in use


@partial(jax.jit, static_argnames=("solver", "neuron", "damping"))
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
        neuron, hold = HELD["rows" if name == "woodbury" else "gram"]
        gradient = jax.tree.map(lambda v: v.astype(jnp.float32), gradient)
        features = hold(np.asarray(x, np.float32), bias)
        directions, state = turn(USUAL[name], neuron, features, gradient, Damping(damping))
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
