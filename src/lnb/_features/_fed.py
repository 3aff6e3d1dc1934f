"""What a neuron was fed: arrays of samples, and the number of positions they stand for."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.random import define_prng_impl

from ._program import Program
from ._rows import SiteRows


def _no_random_numbers(*args: Any) -> Any:
    raise TypeError("this is no random key but a part of lnb's features.")


# Features are samples and not sums. JAX refuses arithmetic with random keys, eagerly and under jit,
# and says their type's name.
_SEAL = define_prng_impl(
    key_shape=(1,),
    seed=_no_random_numbers,
    split=_no_random_numbers,
    random_bits=_no_random_numbers,
    fold_in=_no_random_numbers,
    tag="lnb: features of batches may not be added, pass those of one of them",
)


def _seal() -> Array:
    return jax.random.wrap_key_data(jnp.zeros(1, jnp.uint32), impl=_SEAL)


Form = SiteRows | Program


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays", "positions", "seal"],
    meta_fields=["sites", "devices"],
)
@dataclasses.dataclass(frozen=True)
class Features:
    """What a neuron was fed.

    Attributes:
      arrays: of each site, as they were handed out by the forward pass: rows, or the residuals of a
        program by slot.
      positions: of each site, the number of positions; those that were left out count, those in a
        branch that was not taken do not.
      sites: what the arrays mean.
      devices: the mesh axes along which devices have rows of their own, inside a `shard_map`.
      seal: makes it an error to add up features.
    """

    arrays: tuple[Any, ...]
    positions: tuple[Array, ...]
    sites: tuple[Form, ...]
    devices: tuple[str, ...] = ()
    seal: Array = dataclasses.field(default_factory=_seal, repr=False)

    def __iter__(self) -> Iterator[tuple[Form, Any, Array]]:
        """Each site, its arrays and its number of positions."""
        return zip(self.sites, self.arrays, self.positions, strict=True)

    @property
    def rows(self) -> list[tuple[SiteRows, Any]]:
        """The sites whose features stand as rows, and their arrays."""
        return [(site, x) for site, x, _ in self if isinstance(site, SiteRows)]

    @property
    def count(self) -> Array:
        """n, the number of positions of all sites."""
        parts = (site.fraction * n for site, _, n in self)
        return jnp.round(functools.reduce(jnp.add, parts))

    def averaged_over(self, devices: tuple[str, ...]) -> Features:
        """The same, as a part of what is spread over the devices along these axes."""
        return dataclasses.replace(
            self, devices=devices, positions=lax.pmean(self.positions, devices)
        )

    def only_if(self, flag: Array) -> Features:
        """The same, said to come from no positions, and so to be ignored, unless `flag`."""
        positions = tuple(jnp.where(flag, n, 0) for n in self.positions)
        return dataclasses.replace(self, positions=positions)
