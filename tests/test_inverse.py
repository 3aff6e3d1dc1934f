"""Inverses, beside NumPy's in double precision."""

import jax.numpy as jnp
import numpy as np
import pytest

from lnb import Absolute
from lnb._inverse import Inverse, inverse, invert
from lnb._metric import Moments


def metrics(count: int, size: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((count, max(1, size // 2), size))
    return x.mT @ x / size + 0.1 * np.eye(size)


@pytest.mark.parametrize("size", [1, 7, 300, 1300])
def test_inverse(size):
    metric = metrics(2, size)
    np.testing.assert_allclose(inverse(jnp.asarray(metric, "f")), np.linalg.inv(metric), atol=1e-3)


@pytest.mark.parametrize("size", [5, 700])
def test_not_positive_definite(size):
    metric = jnp.asarray(metrics(2, size), "f").at[1, -1, -1].set(-1.0)
    result = inverse(metric)
    assert jnp.isfinite(result[0]).all()
    assert not jnp.isfinite(result[1]).any()


def test_diagonals():
    moments = Moments(None, jnp.array([[4.0, 0.25], [1.0, 0.0]]))
    result = invert(moments, "lookup", bias=False, damping=Absolute(0.25))
    np.testing.assert_allclose(result, [[1 / 4.25, 2.0], [0.8, 4.0]], rtol=1e-5)


def test_whitening_is_a_root():
    """K K^T g = M^-1 g."""
    metric, gradient = metrics(2, 6), np.random.default_rng(1).normal(size=(2, 6, 3))
    held = Inverse(None, jnp.asarray(np.linalg.inv(metric), "f"))
    twice = held.unwhiten(held.whiten(jnp.asarray(gradient, "f")))
    np.testing.assert_allclose(twice, np.linalg.solve(metric, gradient), rtol=1e-4, atol=1e-4)
