"""Running averages that no outlier can spoil."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

RECENT = 9  # values whose sizes tell what is ordinary: their median does not heed a few outliers
OUTLIER = 5.0  # times that median: what is larger is made as large as the median


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

    def absorb(self, value: Any, decay: ArrayLike, stale: ArrayLike = False) -> "Average":
        """The average with one more value; a `stale` average is forgotten first."""
        decay = jnp.asarray(decay, self.mass.dtype)
        mass = decay * jnp.where(stale, 0, self.mass) + 1 - decay
        rate = (1 - decay) / mass  # 1 for the first value, 1 - decay in the long run

        def mix(old: Array, new: Array) -> Array:
            weight = rate.astype(old.dtype)
            return (1 - weight) * old + weight * new.astype(old.dtype)

        return Average(mass, jax.tree.map(mix, self.value, value))


def no_sizes(*shape: int) -> Array:
    """The sizes of the latest values, before the first one."""
    return jnp.zeros((RECENT, *shape), jnp.result_type(float))


def judge(recent: Array, size: Array, held: Array) -> tuple[Array, Array, Array]:
    """Compares the size of a new value, and that of the average held, with what is ordinary.

    Args:
      recent: the sizes of the latest values, [RECENT, ...]; 0 where there was none yet.
      size: the size of the new value, [...].
      held: the size of the average of the values before it, [...].

    Returns:
      The next `recent`; a factor that makes an outlier as large as the median, 1 for other values;
      whether the average is made of outliers that came first, and should be forgotten.
    """
    size, held = size.astype(recent.dtype), held.astype(recent.dtype)
    recent = jnp.concatenate([recent[1:], size[None]])
    # The median of those that are positive; of two in the middle, the smaller one.
    count = jnp.sum(recent > 0, axis=0)
    middle = jnp.clip(RECENT - count + (count - 1) // 2, 0, RECENT - 1)
    median = jnp.take_along_axis(jnp.sort(recent, axis=0), middle[None], axis=0)[0]
    factor = jnp.where(size > OUTLIER * median, median / jnp.where(size > 0, size, 1), 1)
    # Later outliers were made smaller when they came: only the first few can be all of an average.
    return recent, factor, (held > OUTLIER * median) & (recent[0] == 0)


class AverageGradientState(NamedTuple):
    """State of `average_gradient`: the average, and the latest gradients' sizes by parameter."""

    average: Average
    recent: Array


def average_gradient(
    decay: ArrayLike, nesterov: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by their debiased exponential moving average, outliers made smaller.

    A gradient that is more than `OUTLIER` times as large as the median of the latest ones is an
    outlier: steps are normalised, so it alone would say where they go, for hundreds of steps.

    Args:
      decay: decay of the average.
      nesterov: whether to look ahead: return what the average would be after the same gradient
        once more.

    Returns:
      A transformation. Where the argument `finite` of its update is false, its state stays.
    """

    def init_fn(params: Any) -> AverageGradientState:
        sizes = no_sizes(len(jax.tree.leaves(params)))
        return AverageGradientState(Average.empty(params), sizes)

    def update_fn(updates, state, params=None, *, finite=True, **extra_args):
        del params, extra_args
        recent, factors, stale = judge(state.recent, _sizes(updates), _sizes(state.average.value))
        factors = jax.tree.unflatten(jax.tree.structure(updates), list(factors))
        updates = jax.tree.map(lambda f, g: f.astype(g.dtype) * g, factors, updates)
        # A bad first example is in all gradients, though not in all as plainly.
        average = state.average.absorb(updates, decay, jnp.any(stale))
        ahead = average.absorb(updates, decay) if nesterov else average
        new = AverageGradientState(average, recent)
        return ahead.value, optax.tree.where(finite, new, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _sizes(tree: Any) -> Array:
    """The norm of each leaf."""
    norms = [optax.tree.norm(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.stack([norm.astype(jnp.result_type(float)) for norm in norms])
