"""What makes it an error to add up features, which are samples and not sums."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.random import define_prng_impl


def _no_random_numbers(*args: Any) -> Any:
    raise TypeError("this is no random key but a part of lnb's features.")


# JAX refuses arithmetic with random keys, eagerly and under jit, and says their type's name.
_SEAL = define_prng_impl(
    key_shape=(1,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    tag="lnb: features of batches may not be added, pass those of one of them",
)


def seal() -> Array:
    """An array that is in all features, so that nothing can be computed from all their leaves."""
    return jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_SEAL)
