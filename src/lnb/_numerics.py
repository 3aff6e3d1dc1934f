"""Arithmetic that neither overflows in half precision nor divides by zero."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ._jaxpr import is_parameter


def at_least_float32(tree: Any) -> Any:
    """Casts half precision up; leaves all else alone."""
    is_half = lambda x: is_parameter(x) and jnp.finfo(x.dtype).bits < 32
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def ratio(numerator: ArrayLike, denominator: ArrayLike) -> Array:
    """The quotient, or 0 where the denominator is not positive."""
    denominator = jnp.asarray(denominator)
    positive = denominator > jnp.finfo(denominator.dtype).tiny
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1), 0)
