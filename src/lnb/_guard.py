"""What stands around a whole optimizer: float32 arithmetic, and no step that is not finite."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ._checks import check_arguments, check_arrays
from ._jaxpr import is_parameter, path_name, varying_axes
from ._numerics import at_least_float32, ratio


class GuardState(NamedTuple):
    """State of `guard`.

    Attributes:
      count: steps taken.
      skipped: steps not taken.
      changes: by how much the last step changed each parameter, relative to its size.
      inner_state: state of the guarded transformation.
    """

    count: Array
    skipped: Array
    changes: dict[str, Array]
    inner_state: Any


def guard(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 or better, and only on finite gradients and features.

    A gradient or a feature that is not finite, or whose square is not, makes all updates zero,
    leaves the inner state as it is and is counted. Updates have the dtypes of the gradients.

    There is no `lax.cond` around the whole: it would hold all state twice. Instead the inner
    transformation is told by the keyword argument `finite`, and given features of no positions.

    Args:
      inner: the transformation; where `finite` is false it changes no array but scalars.

    Returns:
      A transformation.
    """
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: Any) -> GuardState:
        check_arrays(params)
        zero = lambda dtype: jnp.zeros((), dtype)  # a buffer each, so that they can be donated
        changes = {name: zero(jnp.result_type(float)) for name in _named(params)}
        inner_state = inner.init(at_least_float32(params))
        return GuardState(zero(jnp.int32), zero(jnp.int32), changes, inner_state)

    def update_fn(updates, state, params=None, *further, features: Any = None, **extra_args):
        check_arguments(further, features)
        if params is not None:  # without what has no gradient, such as a model's functions
            is_none = lambda x: x is None
            keep = lambda g, p: None if g is None else p
            params = jax.tree.map(keep, updates, params, is_leaf=is_none)
        gradients, arrays = at_least_float32((updates, params))
        finite = all_finite(gradients, features)
        features = {name: own.only_if(finite) for name, own in features.items()}
        extra_args |= {"features": features, "finite": finite}
        new, inner_state = inner.update(gradients, state.inner_state, arrays, **extra_args)
        new = jax.tree.map(lambda x: jnp.where(finite & jnp.isfinite(x), x, 0), new)
        changes = state.changes if params is None else _changes(new, arrays)
        scalar = lambda new, old: jnp.where(finite, new, old) if jnp.ndim(new) == 0 else new
        changes = jax.tree.map(scalar, changes, state.changes)
        inner_state = jax.tree.map(scalar, inner_state, state.inner_state)
        taken = finite.astype(jnp.int32)
        state = GuardState(state.count + taken, state.skipped + 1 - taken, changes, inner_state)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def all_finite(gradients: Any, features: Any) -> Array:
    """Whether all sums of squares are finite."""
    arrays = jax.tree.leaves(at_least_float32((gradients, features)))
    flags = [jnp.isfinite(optax.tree.norm(x)) for x in arrays if is_parameter(x)]
    finite = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    # Inside a shard_map, devices whose gradients are the same must agree.
    axes = tuple(varying_axes(features) - varying_axes(gradients))
    return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite


def _named(tree: Any) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves if is_parameter(leaf)}


def _changes(updates: Any, params: Any) -> dict[str, Array]:
    """The norm of each update, relative to that of its parameter; 0 where that is 0."""
    named = _named(params)
    relative = lambda new, old: ratio(optax.tree.norm(new), optax.tree.norm(old))
    changes = {name: relative(update, named[name]) for name, update in _named(updates).items()}
    return {name: change.astype(jnp.result_type(float)) for name, change in changes.items()}
