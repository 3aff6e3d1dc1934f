"""Trust regions, against norms and singular values of explicit matrices."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit import exact_inverse_root, fed, matrix, theta_of

import lnb
from lnb import Cholesky, _plan
from lnb._metric import Theta
from lnb._norms import NORMS, Boosted, Norm, orthogonal
from lnb._orthogonalize import newton_schulz

pytestmark = pytest.mark.usefixtures("x64")

EXACT = Norm(shared=False, direction=partial(orthogonal, root=exact_inverse_root))


def part_of(x, gradient: Theta, kind: str = "dense") -> Boosted:
    """A neuron's direction by an exact solve."""
    solver, (neuron, features) = Cholesky(), fed(x, gradient.bias is not None, kind)
    known, memory = solver.init(neuron, gradient)
    known = solver.update(neuron, features, known, 0.0, jnp.int32(0))
    direction, _ = solver.direction(neuron, features, gradient, known, memory, 0.0)
    return Boosted(gradient, direction, 1, solver.inverse(neuron, known))


def dense_part(n=40, d=5, o=3, bias=True, seed=0) -> tuple[np.ndarray, Boosted]:
    x = np.random.default_rng(seed).normal(size=(n, d)) + 1
    return x, part_of(x, theta_of(d, o, bias))


def take(norm: Norm, parts: list[Boosted], min_norm) -> Any:
    """A step, with its directions as a list."""
    step = norm({str(i): part for i, part in enumerate(parts)}, min_norm)
    return SimpleNamespace(**step._asdict() | {"directions": [*step.directions.values()]})


def function_norm(x, theta: Theta) -> float:
    """Root mean square length of the outputs."""
    outputs = np.asarray(x @ theta.weight[0] + (0 if theta.bias is None else theta.bias))
    return np.sqrt((outputs**2).sum(1).mean())


def whitened_singular_values(metric: np.ndarray, direction: Theta, block: int = 0) -> np.ndarray:
    """Those of L^T h, with another L than the library's: the upper right one."""
    return np.linalg.svd(np.linalg.cholesky(metric).T @ matrix(direction, block))[1]


def test_norm_is_that_of_the_function():
    x, part = dense_part()
    np.testing.assert_allclose(part.norm, function_norm(x, part.direction), rtol=1e-9)


def test_norm_of_a_direction_uphill_is_zero():
    gradient = jnp.ones(3)
    assert Boosted(gradient, -gradient, rank=1).norm == 0


def test_network_has_one_norm():
    (x, first), (y, second) = dense_part(seed=0), dense_part(seed=1)
    other = Boosted(jnp.arange(3.0), jnp.arange(3.0), rank=1)
    step = take(NORMS["network"], [first, second, other], 1e-2)
    lengths = [
        function_norm(x, step.directions[0]),
        function_norm(y, step.directions[1]),
        np.linalg.norm(step.directions[2]),
    ]
    np.testing.assert_allclose(np.linalg.norm(lengths), 1, rtol=1e-9)
    ratio = step.directions[0].weight / first.direction.weight
    np.testing.assert_allclose(ratio, 1 / step.norm, rtol=1e-9)
    assert not step.capped


def test_neurons_have_one_norm_each():
    (x, first), (y, second) = dense_part(seed=0), dense_part(seed=1)
    other = Boosted(jnp.arange(3.0), jnp.arange(3.0), rank=1)
    step = take(NORMS["neuron"], [first, second, other], 1e-2)
    np.testing.assert_allclose(function_norm(x, step.directions[0]), 1, rtol=1e-9)
    np.testing.assert_allclose(function_norm(y, step.directions[1]), 1, rtol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(step.directions[2]), 1, rtol=1e-9)


@pytest.mark.parametrize("name", NORMS)
def test_min_norm_shortens_the_step(name):
    _, part = dense_part()
    (free,), (capped,) = (take(NORMS[name], [part], m).directions for m in (0.0, 4 * part.norm))
    np.testing.assert_allclose(4 * capped.weight, free.weight, rtol=1e-9)
    assert take(NORMS[name], [part], 4 * part.norm).capped
    assert not take(NORMS[name], [part], 0.25 * part.norm).capped


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("min_norm", [0.0, 1e-2])
def test_zero_gradient_has_a_zero_step(name, min_norm):
    x, part = dense_part()
    zero = part_of(x, jax.tree.map(jnp.zeros_like, part.gradient))
    step = take(NORMS[name], [zero], min_norm)
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(step.directions))


def whitened_parts(x: np.ndarray, direction: Theta, block: int = 0):
    """The weight as whitened features see it, and with a bias the change of the mean output."""
    weight = np.asarray(direction.weight[block])
    if direction.bias is None:
        return np.linalg.cholesky(x.T @ x / len(x)).T @ weight, None
    mean, covariance = x.mean(0), np.cov(x, rowvar=False, bias=True).reshape(2 * x.shape[1:])
    return np.linalg.cholesky(covariance).T @ weight, direction.bias[block] + mean @ weight


def root_mean_square(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d", "o"), [(5, 3), (3, 5)])
def test_spectral_step_is_orthogonal_for_whitened_features(d, o, bias):
    x, part = dense_part(d=d, o=o, bias=bias)
    (direction,) = take(EXACT, [part], 1e-2).directions
    weight, mean = whitened_parts(x, direction)
    np.testing.assert_allclose(np.linalg.svd(weight, compute_uv=False), 1, rtol=1e-8)
    assert mean is None or root_mean_square(mean) == pytest.approx(1, rel=1e-8)


def test_spectral_step_by_a_symmetric_factor():
    x, part = dense_part()
    mean, covariance = x.mean(0), np.cov(x, rowvar=False, bias=True)
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(values) @ vectors.T
    weight, bias = np.asarray(part.gradient.weight[0]), np.asarray(part.gradient.bias[0])
    centred = np.linalg.solve(root, weight - np.outer(mean, bias))
    left, _, right = np.linalg.svd(centred, full_matrices=False)
    expected = np.linalg.solve(root, left @ right)
    offset = bias / root_mean_square(bias) - mean @ expected
    (direction,) = take(EXACT, [part], 1e-2).directions
    np.testing.assert_allclose(matrix(direction), np.vstack([expected, offset]), rtol=1e-8)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("d", "o"), [(8, 6), (6, 8)])
def test_spectral_step_stays_within_its_bounds(d, o, bias):
    for seed in range(5):
        x, part = dense_part(d=d, o=o, bias=bias, seed=seed)
        (direction,) = take(NORMS["spectral"], [part], 1e-2).directions
        values = np.linalg.svd(whitened_parts(x, direction)[0], compute_uv=False)
        assert values.min() > 0.68
        assert values.max() < 1.2


def orthogonalized(x: jax.Array) -> np.ndarray:
    return np.asarray(x @ newton_schulz(x.mT @ x))


def test_bounds_of_the_inverse_root_over_its_range():
    values = jnp.geomspace(9e-3, 1, 2000)
    largest = (1 - values**8) ** 0.125  # so that the eighth powers add up to 1
    moved = orthogonalized(jax.vmap(jnp.diag)(jnp.stack([values, largest], axis=1)))
    moved = np.diagonal(moved, axis1=1, axis2=2)[:-1]
    assert np.all(moved > 0.68)
    assert np.all(moved < 1.2)


def test_inverse_root_in_single_precision():
    """Singular values from 0.01 to 1 times the largest, and as many of 0."""
    left, right = (np.linalg.qr(np.random.default_rng(s).normal(size=(40, 40)))[0] for s in (0, 1))
    values = np.concatenate([np.geomspace(0.01, 1, 20), np.zeros(20)])
    x = jnp.asarray(left * values @ right.T, jnp.float32)[None]
    moved = np.linalg.svd(orthogonalized(x)[0], compute_uv=False)
    assert np.all((moved[:20] > 0.66) & (moved[:20] < 1.22))
    assert np.all(moved[20:] < 1e-3)


@pytest.mark.parametrize(("d", "o"), [(64, 32), (32, 64)])
@pytest.mark.parametrize("condition", [1e2, 1e6])
def test_spectral_step_in_single_precision(d, o, condition):
    """Also where M is ill-conditioned."""
    rng = np.random.default_rng(0)
    vectors = np.linalg.qr(rng.normal(size=(d, d)))[0]
    metric = vectors * np.geomspace(1, 1 / condition, d) @ vectors.T
    lower = np.linalg.cholesky(metric)
    left, right = (np.linalg.qr(rng.normal(size=(n, min(d, o))))[0] for n in (d, o))
    whitened = left * np.geomspace(0.02, 1, min(d, o)) @ right.T
    gradient = Theta(jnp.asarray((lower @ whitened)[None], jnp.float32), None)
    x = np.asarray(d**0.5 * lower.T, np.float32)  # features whose second moment is M
    (direction,) = take(NORMS["spectral"], [part_of(x, gradient)], 1e-2).directions
    values = np.linalg.svd(lower.T @ np.asarray(direction.weight[0], float), compute_uv=False)
    assert values.min() > 0.65
    assert values.max() < 1.22


@pytest.mark.parametrize("root", [newton_schulz, exact_inverse_root])
def test_roots_keep_rank_and_scale(root):
    vector = np.random.default_rng(0).normal(size=(4, 1))
    x = jnp.asarray([vector @ vector.T, 1e-9 * vector @ vector.T, np.zeros((4, 4))])
    result = np.asarray(x @ root(x.mT @ x))
    np.testing.assert_allclose(result[0], result[1], rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(result[2], 0)
    values = np.linalg.svd(result[0])[1]
    assert 0.68 < values[0] < 1.2
    np.testing.assert_allclose(values[1:], 0, atol=1e-9)


def test_spectral_step_of_a_lookup():
    gradient = theta_of(6, 4, bias=False)
    counts = np.array([3, 5, 1, 2, 4, 5])
    indices = np.repeat(np.arange(6), counts)
    (direction,) = take(EXACT, [part_of(indices, gradient, "lookup")], 1e-2).directions
    values = whitened_singular_values(np.diag(counts / 20), direction)
    np.testing.assert_allclose(values, 1, rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_spectral_step_of_a_scale(bias):
    x = np.random.default_rng(0).normal(size=(4, 30, 1)) + 1
    part = part_of(x, theta_of(1, 1, bias, g=4), "scale")
    (direction,) = take(EXACT, [part], 1e-2).directions
    for block in range(4):
        weight, mean = whitened_parts(x[block], direction, block)
        np.testing.assert_allclose(np.abs(weight), 1, rtol=1e-9)
        assert mean is None or root_mean_square(mean) == pytest.approx(1, rel=1e-9)


def test_spectral_step_without_an_inverse_has_the_norm_of_an_orthogonal_map():
    x, part = dense_part(d=8, o=6)
    (orthogonal_step,) = take(EXACT, [part], 1e-2).directions
    (step,) = take(EXACT, [part._replace(inverse=None, rank=12)], 1e-2).directions
    expected = function_norm(x, orthogonal_step)
    np.testing.assert_allclose(function_norm(x, step), expected, rtol=1e-8)
    np.testing.assert_allclose(expected, 12**0.5, rtol=1e-8)  # 6 of the weight, 6 of the bias


@pytest.mark.parametrize("n", [64, 512])
def test_auto_is_spectral_for_small_layers(monkeypatch, n):
    """However many examples there are: the step of a batch is that of its parts together."""
    monkeypatch.setattr(_plan, "SMALL", 8)

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["wide"]) @ params["narrow"]) ** 2)

    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "wide": jax.random.normal(keys[0], (32, 32)),
        "narrow": jax.random.normal(keys[1], (32, 4)),
    }
    steps = {}
    for norm in ("auto", "spectral"):
        x = jax.random.normal(keys[2], (n, 32))
        neurons = lnb.find_neurons(loss_fn, params, x, rows="all")
        optimizer = lnb.lnb(1.0, neurons, norm=norm, weight_decay=0.0)
        _, grads, features = lnb.backprop(loss_fn, neurons)(params, x)
        updates, _ = optimizer.update(grads, optimizer.init(params), params, features=features)
        steps[norm] = updates
    same = lambda name: np.allclose(steps["auto"][name], steps["spectral"][name], rtol=1e-3)
    assert same("narrow")
    assert not same("wide")
