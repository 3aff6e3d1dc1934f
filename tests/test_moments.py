"""Running averages, damping and the preconditioner P, each against its formula written out."""

from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest
from explicit import explicit_metric, gram_of, make_neuron, matrix, theta_of, uncorrelated

from lnb._damping import Damping, damped_product
from lnb._metric import Gram, Moments, Theta, moments
from lnb._moments import Average, preconditioner
from lnb._packed import diagonal, pack, unpack

pytestmark = pytest.mark.usefixtures("x64")
NO_DAMPING = Damping(0.0)


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


def test_average_ignores_what_was_not_seen():
    average = Average.empty(jnp.zeros(2)).absorb(jnp.ones(2), 0.9)
    after = average.absorb(jnp.full(2, 7.0), 0.9, seen=jnp.asarray(False))
    np.testing.assert_array_equal(after.value, average.value)
    assert after.mass == average.mass


@pytest.mark.parametrize("bias", [True, False])
def test_preconditioner_inverts_a_metric_of_uncorrelated_features(bias):
    x = uncorrelated(50, 4, centred=bias)
    neuron, gradient = make_neuron(), theta_of(4, 3, bias)
    batch = moments(gram_of(x, bias))
    inverse = preconditioner(neuron.kind, batch, bias, shrinkage=0.0, damping=NO_DAMPING)
    expected = np.linalg.solve(explicit_metric(x, bias), matrix(gradient))
    np.testing.assert_allclose(matrix(inverse.solve(gradient)), expected, rtol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_preconditioner_shrinks_variances_towards_their_mean(bias):
    mean, square = np.array([[1.0, -2.0, 0.0]]), np.array([[3.0, 4.5, 0.0]])
    variance = np.array([[2.0, 0.5, 0.0]])
    expected = 0.9 * variance + 0.1 * variance.mean()
    expected = expected if bias else expected + mean**2
    batch = Moments(jnp.asarray(mean), jnp.asarray(square))
    inverse = preconditioner("dense", batch, bias, shrinkage=0.1, damping=NO_DAMPING)
    np.testing.assert_allclose(1 / inverse.matrix, expected, rtol=1e-12)
    assert (inverse.mean is not None) == bias


def test_preconditioner_of_a_dead_neuron_is_the_identity():
    dead = Moments(jnp.zeros((1, 3)), jnp.zeros((1, 3)))
    gradient = theta_of(3, 2, bias=True)
    inverse = preconditioner("dense", dead, True, 0.1, Damping(0.1))
    np.testing.assert_array_equal(matrix(inverse.solve(gradient)), matrix(gradient))


@pytest.mark.parametrize("bias", [True, False])
def test_relative_damping_is_relative_to_variance_or_power(bias):
    x = np.random.default_rng(0).normal(size=(2, 30, 4)) * np.array([1, 10]).reshape(2, 1, 1) + 3
    gamma = Damping(0.1).gamma("dense", moments(gram_of(x, True)), bias)
    power = (x**2).mean(1) - (x.mean(1) ** 2 if bias else 0)
    np.testing.assert_allclose(gamma, 0.1 * power.mean(1, keepdims=True), rtol=1e-10)


def test_relative_damping_is_one_for_all_blocks_of_a_scale():
    x = np.random.default_rng(0).normal(size=(5, 30, 1)) * np.arange(1, 6).reshape(5, 1, 1)
    gamma = Damping(0.1).gamma("scale", moments(gram_of(x, True)), True)
    np.testing.assert_allclose(gamma, [[0.1 * x.var(1).mean()]], rtol=1e-10)


def test_absolute_damping_is_the_number_itself():
    x = np.random.default_rng(0).normal(size=(2, 30, 4))
    gamma = Damping(0.1, relative=False).gamma("dense", moments(gram_of(x, True)), True)
    np.testing.assert_allclose(gamma, np.full((2, 1), 0.1), rtol=1e-10)


def test_damping_never_touches_the_bias():
    x = np.random.default_rng(0).normal(size=(30, 4))
    theta, features = theta_of(4, 3, bias=True), gram_of(x, True)
    damped = matrix(damped_product(features, jnp.full((1, 1), 5.0), theta))
    weights = np.diag([5.0] * 4 + [0.0])
    expected = (explicit_metric(x, True) + weights) @ matrix(theta)
    np.testing.assert_allclose(damped, expected, rtol=1e-10)


def test_damping_survives_a_batch_without_positions():
    empty = Gram(jnp.zeros((1, 2, 2)), jnp.zeros((1, 2)), jnp.zeros(()))
    image = damped_product(empty, jnp.ones((1, 1)), Theta(jnp.ones((1, 2, 1)), jnp.ones((1, 1))))
    np.testing.assert_array_equal(image.weight, np.ones((1, 2, 1)))
    np.testing.assert_array_equal(image.bias, np.zeros((1, 1)))


@pytest.mark.parametrize("size", [2, 5, 8])
def test_packed_matrices(size):
    square = np.random.default_rng(0).normal(size=(3, size, size)).astype(np.float32)
    matrix = square + square.transpose(0, 2, 1)
    assert pack(jnp.asarray(matrix)).shape == matrix.shape  # too small to be worth it
    with patch("lnb._packed.WHOLE", 1):
        packed = pack(jnp.asarray(matrix))
    assert packed.shape == (3, size + 1, (size + 1) // 2)
    np.testing.assert_array_equal(unpack(packed), matrix)
    for form in (packed, jnp.asarray(matrix)):
        np.testing.assert_array_equal(diagonal(form), np.diagonal(matrix, axis1=1, axis2=2))
    if size % 2 == 0:  # no number twice, none left out
        for a, b in zip(packed, matrix, strict=True):
            np.testing.assert_array_equal(np.sort(a, None), np.sort(b[np.tril_indices(size)]))
