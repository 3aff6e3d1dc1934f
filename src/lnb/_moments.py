"""Running moments of a neuron's features, and the preconditioner P made from them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from ._damping import Damping, block_mean
from ._factor import Factor
from ._metric import Moments
from ._neurons import Neuron


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

    def rate(self, decay: ArrayLike) -> Array:
        """The weight of the next value: 1 for the first, `1 - decay` in the long run."""
        decay = jnp.asarray(decay, self.mass.dtype)
        return (1 - decay) / (decay * self.mass + 1 - decay)

    def absorb(self, value: Any, decay: ArrayLike, seen: ArrayLike = True) -> "Average":
        """The average with one more value; unchanged where `seen` is false, whatever the value.

        A value not seen gets no weight; selecting arrays by a scalar would double the code that
        LLVM makes of it. What is not finite counts as zero, since no weight times NaN is NaN.
        """
        rate = jnp.where(seen, self.rate(decay), 0)

        def mix(old: Array, new: Array) -> Array:
            weight = rate.astype(old.dtype)
            new = jnp.where(jnp.isfinite(new), new.astype(old.dtype), 0)
            return (1 - weight) * old + weight * new

        decay = jnp.asarray(decay, self.mass.dtype)
        mass = jnp.where(seen, decay * self.mass + 1 - decay, self.mass)
        return Average(mass, jax.tree.map(mix, self.value, value))


def preconditioner(
    neuron: Neuron, moments: Moments, bias: bool, shrinkage: float, damping: Damping
) -> Factor:
    r"""The factor whose `solve` is the paper's preconditioner P (section "Online Learning").

    With a bias, :math:`P = \tilde W \tilde W^T` where the covariance is replaced by its diagonal
    and the mean is kept; without one, the inverse of the diagonal of :math:`E[x x^T]`. The
    variances are first shrunk towards their mean.

    Args:
      neuron: the neuron.
      moments: running means of x and x * x; `first` may be None, which reads as zero.
      bias: whether the neuron has a bias.
      shrinkage: 0 keeps every input's own variance, 1 gives all inputs their mean.
      damping: what the metric's diagonal is raised by.

    Returns:
      A factor with a diagonal whitener.
    """
    mean = jnp.zeros_like(moments.square) if moments.first is None else moments.first
    variance = jnp.maximum(moments.square - mean**2, 0)
    diagonal = (1 - shrinkage) * variance + shrinkage * block_mean(neuron, variance)
    if not bias:
        diagonal = diagonal + mean**2
    diagonal = diagonal + damping.gamma(neuron, moments, bias)
    # Only an input that is dead together with its whole block has no variance left: leave it alone.
    return Factor(mean if bias else None, lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)))
