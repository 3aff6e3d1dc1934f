"""Running moments of a neuron's features, and the preconditioner P made from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._damping import Damping, block_mean
from ._inverse import Inverse
from ._kernels import mix
from ._metric import Moments


class Average(NamedTuple):
    """A debiased exponential moving average of a pytree.

    Attributes:
      mass: the weight of all values seen so far, `1 - decay**steps`; a sum, so never rounded to 0.
      value: the average, already divided by the mass; zeros before the first value.
    """

    mass: Array
    value: Any

    @classmethod
    def empty(cls, like: Any) -> "Average":
        return cls(jnp.zeros((), jnp.result_type(float)), optax.tree.zeros_like(like))

    def absorb(self, value: Any, decay: ArrayLike, seen: ArrayLike = True) -> "Average":
        """The average with one more value, which is finite; unchanged where `seen` is false."""
        rate = jnp.where(seen, self.rate(decay), 0)
        value = jax.tree.map(lambda old, new: mix(rate, new, old), self.value, value)
        return Average(jnp.where(seen, self._next_mass(decay), self.mass), value)

    def rate(self, decay: ArrayLike) -> Array:
        """The weight of the next value: 1 for the first, `1 - decay` in the long run."""
        return (1 - jnp.asarray(decay, self.mass.dtype)) / self._next_mass(decay)

    def _next_mass(self, decay: ArrayLike) -> Array:
        decay = jnp.asarray(decay, self.mass.dtype)
        return decay * self.mass + 1 - decay


def preconditioner(
    kind: str, moments: Moments, bias: bool, shrinkage: float, damping: Damping
) -> Inverse:
    r"""The paper's preconditioner P, as the inverse of a metric (section "Online Learning").

    With a bias, :math:`P = \tilde W \tilde W^T` where the covariance is replaced by its diagonal
    and the mean is kept; without one, the inverse of the diagonal of :math:`E[x x^T]`. The
    variances are first shrunk towards their mean.

    Args:
      kind: the kind of neuron.
      moments: running means of x and x * x; `first` may be None, which reads as zero.
      bias: whether the neuron has a bias.
      shrinkage: 0 keeps every input's own variance, 1 gives all inputs their mean.
      damping: what the metric's diagonal is raised by.

    Returns:
      A diagonal inverse.
    """
    mean = jnp.zeros_like(moments.square) if moments.first is None else moments.first
    variance = jnp.maximum(moments.square - mean**2, 0)
    diagonal = (1 - shrinkage) * variance + shrinkage * block_mean(kind, variance)
    if not bias:
        diagonal = diagonal + mean**2
    diagonal = diagonal + damping.gamma(kind, moments, bias)
    # Only an input that is dead together with its whole block has no variance left: leave it alone.
    return Inverse(mean if bias else None, 1 / jnp.where(diagonal > 0, diagonal, 1))
