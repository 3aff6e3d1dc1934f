"""What stands around a whole optimizer: float32 arithmetic, and no step that is not finite."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ._interpret import is_parameter
from ._metric import Gram


class GuardState(NamedTuple):
    """State of `guard`.

    Attributes:
      count: steps taken.
      skipped: steps not taken.
      inner_state: state of the guarded transformation.
    """

    count: Array
    skipped: Array
    inner_state: Any


def guard(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 or better, and only on finite gradients and features.

    A gradient or a feature that is not finite, or whose square is not, makes all updates zero,
    leaves the inner state as it is and is counted. Updates have the dtypes of the gradients.

    Args:
      inner: the transformation.

    Returns:
      A transformation.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> GuardState:
        count, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        return GuardState(count, skipped, inner.init(at_least_float32(params)))

    def update_fn(updates, state, params=None, **extra_args):
        def take():
            new, inner_state = inner.update(
                at_least_float32(updates),
                state.inner_state,
                at_least_float32(params),
                **extra_args,
            )
            new = optax.tree.cast_like(new, updates)
            return new, GuardState(state.count + 1, state.skipped, inner_state)

        def skip():
            return optax.tree.zeros_like(updates), state._replace(skipped=state.skipped + 1)

        finite = _all_finite((updates, extra_args.get("features")))
        return lax.cond(finite, take, skip)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def at_least_float32(tree: Any) -> Any:
    """Casts half precision up; leaves all else alone."""

    def cast(x):
        half = is_parameter(x) and jnp.finfo(x.dtype).bits < 32
        return x.astype(jnp.float32) if half else x

    return jax.tree.map(cast, tree)


def _squares(node: Any) -> Any:
    """Of a gram the diagonal: no entry of a second moment is larger than the largest there."""
    if not isinstance(node, Gram) or node.second.ndim == 2:
        return node
    return jnp.diagonal(node.second, axis1=1, axis2=2)


def _all_finite(tree: Any) -> Array:
    """Whether all sums of squares are finite.

    Inside a jitted step this becomes a chain of scalars, which compiles in no time. An array of
    them, or a selection between old and new state, took XLA a minute for a small transformer.
    """
    tree = jax.tree.map(_squares, tree, is_leaf=lambda node: isinstance(node, Gram))
    leaves = [x for x in jax.tree.leaves(at_least_float32(tree)) if is_parameter(x)]
    finite = (jnp.isfinite(jnp.sum(x * x)) for x in leaves)
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))
