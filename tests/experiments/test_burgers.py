"""Burgers' equation: the exact solution, the points, and the network's residual."""

import jax
import numpy as np
import pytest

from lnb_experiments.data import Source, burgers
from lnb_experiments.experiments import Burgers

KEY = jax.random.key(0)
VISCOSITY = 0.01 / np.pi
X = np.linspace(-1, 1, 101)


def residual(u, t, x, step):
    """u_t + u u_x - v u_xx by central differences."""
    u_t = (u(t + step, x) - u(t - step, x)) / (2 * step)
    u_x = (u(t, x + step) - u(t, x - step)) / (2 * step)
    u_xx = (u(t, x + step) - 2 * u(t, x) + u(t, x - step)) / step**2
    return u_t + u(t, x) * u_x - VISCOSITY * u_xx


def test_the_solution_starts_as_a_sine_and_ends_at_zero():
    np.testing.assert_allclose(burgers(np.zeros(101), X), -np.sin(np.pi * X), atol=1e-12)
    np.testing.assert_allclose(burgers(np.full(101, 1e-6), X), -np.sin(np.pi * X), atol=1e-4)
    t = np.linspace(0, 1, 11)
    for end in (-1.0, 1.0):
        np.testing.assert_allclose(burgers(t, np.full(11, end)), 0, atol=1e-12)


def test_the_solution_is_odd_and_has_a_shock():
    t = np.full(101, 0.7)
    np.testing.assert_allclose(burgers(t, -X), -burgers(t, X), atol=1e-12)
    # Basdevant et al. give the steepest slope, 152.00516, at t = 1.6037 / pi.
    slopes = burgers(np.array([0.5, 1.6037 / np.pi, 0.52]), np.full(3, 1e-6)) / 1e-6
    assert slopes[1] == pytest.approx(-152.00516, rel=1e-4)
    assert slopes.argmin() == 1


def test_the_solution_solves_the_equation():
    t, x = np.meshgrid([0.2, 0.5, 0.9], [-0.8, -0.31, -0.05, 0.02, 0.4, 0.77])
    assert np.abs(burgers(t, x)).max() > 0.5
    np.testing.assert_allclose(residual(burgers, t, x, 1e-4), 0, atol=0.02)


def test_points():
    experiment = Burgers.preset("tiny")
    data = experiment.load(Source())
    t, x, edge_t, edge_x = data.train.inputs.T
    assert t.min() >= 0
    assert t.max() <= 1
    assert -1 <= x.min() < -0.9 < 0.9 < x.max() <= 1
    sides = np.abs(edge_x) == 1
    assert np.mean(sides) == 0.5
    assert (edge_t[~sides] == 0).all()
    np.testing.assert_allclose(burgers(edge_t, edge_x), data.train.targets, atol=1e-6)
    held_out = experiment.hold_out(data)
    assert held_out.train is data.train
    for split in (data.test, held_out.test):
        np.testing.assert_allclose(
            burgers(split.inputs[:, 2], split.inputs[:, 3]), split.targets, atol=1e-4
        )


def test_outputs_and_loss(x64):
    experiment = Burgers.preset("tiny")
    model = experiment.init(KEY)
    batch = experiment.load(Source()).train.take(slice(50))
    batch = jax.tree.map(lambda array: array.astype(np.float64), batch)

    def u(t, x):
        y = np.stack([2 * t - 1, x], axis=1)
        for layer in model[:-1]:
            y = np.tanh(y @ np.asarray(layer["weight"]) + np.asarray(layer["bias"]))
        return (y @ np.asarray(model[-1]["weight"]) + np.asarray(model[-1]["bias"]))[:, 0]

    outputs = experiment.outputs(model, batch, None)
    t, x, edge_t, edge_x = batch.inputs.T
    expected = residual(u, t, x, 1e-4)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(outputs[:, 0], expected, atol=1e-5)
    np.testing.assert_allclose(outputs[:, 1], u(edge_t, edge_x), atol=1e-10)
    errors = u(edge_t, edge_x) - batch.targets
    loss = experiment.objective(outputs, batch)
    np.testing.assert_allclose(loss, np.mean(expected**2) + np.mean(errors**2), rtol=1e-4)
    counts = experiment.counts(model, batch)
    np.testing.assert_allclose(counts["loss"], np.sum(errors**2), rtol=1e-6)
