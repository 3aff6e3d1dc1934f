"""Inverses and inverse roots by halves, beside NumPy's in double precision."""

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnb._inverse import LEAF, inverse_root, invert
from lnb._packed import WHOLE, halves, pack


def metrics(count: int, size: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((count, max(1, size // 2), size))
    return x.mT @ x / size + 0.1 * np.eye(size)


SIZES = pytest.mark.parametrize("size", [1, 7, LEAF, LEAF + 1, 2 * LEAF + 5])


@SIZES
def test_inverse(size):
    metric = metrics(2, size)
    np.testing.assert_allclose(invert(jnp.asarray(metric, "f")), np.linalg.inv(metric), atol=1e-3)


@SIZES
def test_inverse_root(size):
    metric = metrics(2, size)
    expected = np.linalg.inv(np.linalg.cholesky(metric))
    root = inverse_root(jnp.asarray(metric, "f"))
    np.testing.assert_allclose(root, expected, atol=1e-3)
    assert (np.triu(root, 1) == 0).all()


@pytest.mark.parametrize("size", [WHOLE + 1, WHOLE + 8, 2 * LEAF + 5])
def test_by_halves(size):
    """Of packed matrices, without taking them apart first."""
    metric = metrics(2, size)
    packed = halves(pack(jnp.asarray(metric, "f")))
    np.testing.assert_allclose(invert(packed), np.linalg.inv(metric), atol=1e-3)
    expected = np.linalg.inv(np.linalg.cholesky(metric))
    np.testing.assert_allclose(inverse_root(packed), expected, atol=1e-3)


@pytest.mark.parametrize("function", [invert, inverse_root])
def test_one_by_one(function):
    """Large batches are not inverted at once; that changes nothing but memory."""
    metric = jnp.asarray(metrics(3, 20), "f")
    together = function(metric)
    np.testing.assert_allclose(function(metric[1:2]), together[1:2], rtol=1e-4, atol=1e-5)
    with patch("lnb._inverse.TOGETHER", 100):
        assert "scan[" in str(jax.make_jaxpr(lambda x: function(x))(metric))
        np.testing.assert_allclose(function(metric), together, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [invert, inverse_root])
@pytest.mark.parametrize("size", [5, LEAF + 3])
def test_not_positive_definite(function, size):
    metric = jnp.asarray(metrics(2, size), "f").at[1, -1, -1].set(-1.0)
    for form in (metric, halves(pack(metric))) if size > WHOLE else (metric,):
        result = function(form)
        assert jnp.isfinite(result[0]).all()
        assert jnp.isnan(result[1])[np.tril_indices(size)].all()


def test_diagonals():
    diagonal = jnp.array([[4.0, 0.25], [1.0, 0.0]])
    np.testing.assert_allclose(invert(diagonal), [[0.25, 4.0], [1.0, np.nan]])
    np.testing.assert_allclose(inverse_root(diagonal), [[0.5, 2.0], [1.0, np.nan]])
