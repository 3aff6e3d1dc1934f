"""Running averages that no outlier can spoil."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

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
        mixed = jax.tree.map(lambda x, y: _mix(rate, x, y), (self.value, self.size), new)
        return Average(jnp.where(seen, old._next_mass(decay), old.mass), *mixed)

    def rate(self, decay: ArrayLike) -> Array:
        """The weight of the next value: 1 for the first, `1 - decay` in the long run."""
        return (1 - jnp.asarray(decay, self.mass.dtype)) / self._next_mass(decay)

    def _next_mass(self, decay: ArrayLike) -> Array:
        decay = jnp.asarray(decay, self.mass.dtype)
        return decay * self.mass + 1 - decay


def _mix(rate: Array, old: Array, new: Array) -> Array:
    rate = rate.astype(old.dtype)
    return (1 - rate) * old + rate * new.astype(old.dtype)


class AverageGradientState(NamedTuple):
    """State of `average_gradient`: an average for each parameter, the latest gradients' sizes."""

    averages: list[Average]
    recent: Array


def average_gradient(
    decay: ArrayLike, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by their debiased exponential moving average, outliers left out.

    A gradient that is more than ten times as large as the median of the latest nine is an outlier:
    steps are normalised, so it alone would say where they go, for hundreds of steps.

    Args:
      decay: decay of the average.
      nesterov: whether to look ahead: return what the average would be after the same gradient
        once more.

    Returns:
      A transformation.
    """

    def init_fn(params: Any) -> AverageGradientState:
        leaves = jax.tree.leaves(params)
        return AverageGradientState([*map(Average.empty, leaves)], no_sizes(len(leaves)))

    def update_fn(updates, state, params=None, *, finite=True, **extra_args):
        del params, extra_args
        leaves, tree = jax.tree.flatten(updates)
        norm = lambda leaf: jnp.sqrt(jnp.sum(jnp.real(jnp.conj(leaf) * leaf))).astype(
            state.recent.dtype
        )
        sizes = jnp.stack([*map(norm, leaves)])
        held = jnp.stack([average.size for average in state.averages])
        recent, factor, stale = judge(state.recent, sizes, held)
        # A bad first example is in all gradients, though not in all as plainly.
        sizes, stale = factor * sizes, finite & jnp.any(stale)
        averages, ahead = [], []
        for i, (leaf, old) in enumerate(zip(leaves, state.averages, strict=True)):
            leaf = leaf * factor[i].astype(leaf.dtype)
            averages.append(old.absorb(leaf, decay, finite, stale, sizes[i]))
            ahead.append(averages[i].absorb(leaf, decay, finite) if nesterov else averages[i])
        averaged = jax.tree.unflatten(tree, [average.value for average in ahead])
        recent = jnp.where(finite, recent, state.recent)
        return averaged, AverageGradientState(averages, recent)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
