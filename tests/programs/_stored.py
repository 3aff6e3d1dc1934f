"""How a weight is stored, and the view of it that a layer uses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

FORMS = ("plain", "scaled", "negated", "flat", "boxed", "masked", "broadcast")
UNSTRUCTURED = ("masked", "broadcast")  # no mere rearrangements of what is stored


@dataclasses.dataclass(frozen=True)
class Stored:
    """A weight of some shape that is stored otherwise, or used with constant factors."""

    shape: tuple[int, ...]
    form: str = "plain"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        match self.form:
            case "flat":
                return (math.prod(self.shape),)
            case "boxed":
                return (1, *self.shape)
            case "broadcast":
                return (*self.shape[:-1], 1)
        return self.shape

    def view(self, stored: Any) -> Any:
        """The weight, from JAX's arrays or from NumPy's."""
        match self.form:
            case "scaled":
                return 0.5 * stored
            case "negated":
                return -stored
            case "masked":
                return stored * self._mask().astype(stored.dtype)
            case "flat":
                return stored.reshape(self.shape)
            case "boxed":
                return stored[0]
            case "broadcast":
                xp = np if isinstance(stored, np.ndarray) else jnp
                return xp.broadcast_to(stored, self.shape)
        return stored

    def _mask(self) -> np.ndarray:
        """Ones, and some zeros."""
        return np.sum(np.indices(self.shape), axis=0) % 3 != 1

    def __str__(self):
        return "" if self.form == "plain" else f", {self.form}"
