"""Running averages, damping and the preconditioner P, each against its formula written out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit import explicit_metric, fed, matrix, theta_of, uncorrelated

from lnb import Absolute
from lnb._average import Average, average_gradient
from lnb._inverse import preconditioner
from lnb._metric import Moments, damped_product, damping_constant, diagonal_moments, moments

pytestmark = pytest.mark.usefixtures("x64")


def numpy_average(values, decay):
    weights = (1 - decay) * decay ** np.arange(len(values))[::-1]
    return np.tensordot(weights, values, 1) / (1 - decay ** len(values))


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_average_is_debiased(decay):
    values = np.random.default_rng(0).normal(size=(7, 3))
    average = Average.empty(jnp.zeros(3))
    for steps, value in enumerate(values, 1):
        average = average.absorb(jnp.asarray(value), decay)
        np.testing.assert_allclose(average.value, numpy_average(values[:steps], decay), rtol=1e-12)
        np.testing.assert_allclose(average.mass, 1 - decay**steps, rtol=1e-12)


def test_average_starts_with_its_first_value():
    value = jnp.asarray([1e-30, 1.0, 1e30], jnp.float32)
    average = Average.empty(value).absorb(value, 0.999)
    np.testing.assert_array_equal(average.value, value)
    assert average.value.dtype == jnp.float32


def test_gradients_that_are_not_finite_leave_the_average_as_it_is():
    transformation = average_gradient(0.9)
    gradients = {"w": jnp.ones(2)}
    _, state = transformation.update(gradients, transformation.init(gradients))
    bad, finite = {"w": jnp.full(2, jnp.nan)}, jnp.asarray(False)
    _, after = transformation.update(bad, state, finite=finite)
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("bias", [True, False])
def test_preconditioner_inverts_a_metric_of_uncorrelated_features(bias):
    x = uncorrelated(50, 4, centred=bias)
    (neuron, features), gradient = fed(x, bias), theta_of(4, 3, bias)
    batch = diagonal_moments(features, neuron.layout)
    inverse = preconditioner(neuron.kind, batch, bias, shrinkage=0.0, damping=0.0)
    expected = np.linalg.solve(explicit_metric(x, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(inverse.solve(gradient)), expected, rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_preconditioner_shrinks_variances_towards_their_mean(bias):
    mean, square = np.array([[1.0, -2.0, 0.0]]), np.array([[3.0, 4.5, 0.0]])
    variance = np.array([[2.0, 0.5, 0.0]])
    expected = 0.9 * variance + 0.1 * variance.mean()
    expected = expected if bias else expected + mean**2
    batch = Moments(jnp.asarray(mean), jnp.asarray(square))
    inverse = preconditioner("dense", batch, bias, shrinkage=0.1, damping=0.0)
    np.testing.assert_allclose(1 / inverse.matrix, expected, rtol=1e-12)
    assert (inverse.mean is not None) == bias


def test_preconditioner_of_a_dead_neuron_is_the_identity():
    dead = Moments(jnp.zeros((1, 3)), jnp.zeros((1, 3)))
    gradient = theta_of(3, 2, bias=True)
    inverse = preconditioner("dense", dead, True, 0.1, 0.1)
    np.testing.assert_array_equal(matrix(inverse.solve(gradient)), matrix(gradient))


@pytest.mark.parametrize("bias", [True, False])
def test_relative_damping_is_relative_to_variance_or_power(bias):
    x = np.random.default_rng(0).normal(size=(2, 30, 4)) * np.array([1, 10]).reshape(2, 1, 1) + 3
    gamma = damping_constant(0.1, "dense", moments(fed(x, True)[1]), bias)
    power = (x**2).mean(1) - (x.mean(1) ** 2 if bias else 0)
    np.testing.assert_allclose(gamma, 0.1 * power.mean(1, keepdims=True), rtol=1e-10)


def test_relative_damping_is_one_for_all_blocks_of_a_scale():
    x = np.random.default_rng(0).normal(size=(5, 30, 1)) * np.arange(1, 6).reshape(5, 1, 1)
    gamma = damping_constant(0.1, "scale", moments(fed(x, True, "scale")[1]), True)
    np.testing.assert_allclose(gamma, [[0.1 * x.var(1).mean()]], rtol=1e-10)


def test_absolute_damping_is_the_number_itself():
    x = np.random.default_rng(0).normal(size=(2, 30, 4))
    gamma = damping_constant(Absolute(0.1), "dense", moments(fed(x, True)[1]), True)
    np.testing.assert_allclose(gamma, np.full((2, 1), 0.1), rtol=1e-10)


def test_damping_never_touches_the_bias():
    x = np.random.default_rng(0).normal(size=(30, 4))
    theta, (neuron, features) = theta_of(4, 3, bias=True), fed(x, True)
    product = damped_product(features, jnp.full((1, 1), 5.0), neuron.layout, neuron.bias_layout)
    weights = np.diag([5.0] * 4 + [0.0])
    expected = (explicit_metric(x, True) + weights) @ matrix(theta)
    np.testing.assert_allclose(matrix(product(theta)), expected, rtol=1e-10)
    empty = damped_product(
        features.only_if(jnp.asarray(False)),
        jnp.ones((1, 1)),
        neuron.layout,
        neuron.bias_layout,
    )
    assert np.isfinite(matrix(empty(theta))).all()


@pytest.mark.parametrize("kind", ["dense", "scale", "lookup"])
def test_diagonal_moments_are_those_of_the_whole_matrix(kind):
    x = np.random.default_rng(0).normal(size=(3, 30, 1 if kind == "scale" else 4))
    x = np.random.default_rng(0).integers(5, size=30) if kind == "lookup" else x
    neuron, features = fed(x, kind != "lookup", kind)
    whole, part = moments(features), diagonal_moments(features, neuron.layout)
    assert part.first is not None
    assert whole.first is not None
    np.testing.assert_allclose(part.first, whole.first, rtol=1e-12)
    np.testing.assert_allclose(part.second, whole.square, rtol=1e-12)
