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

RECENT = 9  # values whose sizes tell what is ordinary: their median does not heed a few outliers
OUTLIER = 5.0  # times that median: what is larger is made as large as the median


class Judgement(NamedTuple):
    """What to make of one more value, by its size. Arrays of the sizes' shape.

    Attributes:
      recent: the sizes of the latest values, [RECENT, ...]; 0 where there was none yet.
      factor: by which to make the value smaller: 1 unless it is an outlier.
      stale: whether the average is made of outliers that came first, and should be forgotten.
    """

    recent: Array
    factor: Array
    stale: Array


def no_sizes(*shape: int) -> Array:
    """The sizes of the latest values, before the first one."""
    return jnp.zeros((RECENT, *shape), jnp.result_type(float))


def judge(recent: Array, size: Array, held: Array) -> Judgement:
    """Compares the size of a new value, and that of the average held, with what is ordinary."""
    size = size.astype(recent.dtype)
    recent = jnp.concatenate([recent[1:], size[None]])
    median = _lower_median(recent)
    limit = OUTLIER * median
    factor = jnp.where(size > limit, median / jnp.where(size > 0, size, 1), 1)
    # Later outliers were made smaller when they came: only the first few can be all of an average.
    return Judgement(recent, factor, (held > limit) & (recent[0] == 0))


def _lower_median(sizes: Array) -> Array:
    """The median along the first axis of all that are positive; of two, the smaller one."""
    count = jnp.sum(sizes > 0, axis=0)
    place = jnp.clip(len(sizes) - count + (count - 1) // 2, 0, len(sizes) - 1)
    return jnp.take_along_axis(jnp.sort(sizes, axis=0), place[None], axis=0)[0]


class Average(NamedTuple):
    """A debiased exponential moving average of a pytree.

    Attributes:
      mass: the weight of all values seen so far, `1 - decay**steps`; a sum, so never rounded to 0.
      value: the average, already divided by the mass; zeros before the first value.
      size: the same average of the values' sizes, where they are told.
    """

    mass: Array
    value: Any
    size: Array

    @classmethod
    def empty(cls, like: Any) -> "Average":
        zero = lambda: jnp.zeros((), jnp.result_type(float))  # a buffer each: states are donated
        return cls(zero(), optax.tree.zeros_like(like), zero())

    def absorb(
        self,
        value: Any,
        decay: ArrayLike,
        seen: ArrayLike = True,
        stale: ArrayLike = False,
        size: ArrayLike = 0.0,
    ) -> "Average":
        """The average with one more value, which is finite; unchanged where `seen` is false.

        A `stale` average is forgotten first.
        """
        old = self._replace(mass=jnp.where(stale, 0, self.mass))
        rate = jnp.where(seen, old.rate(decay), 0)
        new = (value, jnp.asarray(size))
        mixed = jax.tree.map(lambda x, y: mix(rate, y, x), (self.value, self.size), new)
        return Average(jnp.where(seen, old._next_mass(decay), old.mass), *mixed)

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
