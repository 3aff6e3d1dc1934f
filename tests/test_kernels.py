"""Arithmetic in forms that compile fast: the same numbers as by the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lnb._kernels import LARGE, dot, finite_or_zero, mix, total

SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (LARGE,), (100, 90), (3, 100, 90), (0,), (4, 0)]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_dot(shape):
    x, y = normal(*shape), normal(*shape) + 1
    result = dot(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(result, np.vdot(x, y), rtol=1e-4, atol=1e-4)


def test_dot_of_complex_numbers():
    x, y = normal(3, 4) + 1j * normal(4, 3).T, normal(3, 4) - 2j
    np.testing.assert_allclose(dot(jnp.asarray(x), jnp.asarray(y)), np.vdot(x, y), rtol=1e-5)


@pytest.mark.parametrize("axes", [None, (0,), (1,), (0, 1)])
@pytest.mark.parametrize("shape", [(3, 5), (8, 256), (100, 90)])
def test_total(shape, axes):
    x = normal(*shape)
    np.testing.assert_allclose(total(jnp.asarray(x), axes), x.sum(axes), rtol=1e-4, atol=1e-4)


def test_mix():
    """A weight of 0 or 1 selects, exactly."""
    new, old = jnp.asarray([1.1, 1e-9, 1e9]), jnp.asarray([3.3, 4.4, 5.5])
    np.testing.assert_array_equal(mix(jnp.asarray(False), new, old), old)
    np.testing.assert_array_equal(mix(jnp.asarray(True), new, old), new)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64, jnp.int32])
def test_finite_or_zero(dtype):
    x = jnp.asarray([1, jnp.nan, -jnp.inf, 4]) if dtype != jnp.int32 else jnp.asarray([1, 0, 0, 4])
    np.testing.assert_array_equal(finite_or_zero(x.astype(dtype)), jnp.asarray([1, 0, 0, 4], dtype))


@pytest.mark.parametrize("spec", [P("devices"), P(None, "devices")])
@pytest.mark.parametrize("shape", [(16, 8), (800, 800)])
def test_sharded_arrays_are_not_gathered(shape, spec):
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    program = str(jax.jit(dot).lower(x, x).compile().as_text())
    assert "all-reduce" in program
    assert "all-gather" not in program
    assert "collective-permute" not in program
