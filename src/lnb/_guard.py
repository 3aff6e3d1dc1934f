"""What stands around a whole optimizer: float32 arithmetic, and no step that is not finite."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from ._jaxpr import is_parameter, path_name, varying_axes
from ._norms import dot
from ._parameters import refuse_other_leaves, refuse_positional


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
        refuse_other_leaves(params)
        count, skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        changes = {name: jnp.zeros((), jnp.result_type(float)) for name in _named(params)}
        return GuardState(count, skipped, changes, inner.init(at_least_float32(params)))

    def update_fn(updates, state, params=None, *further, **extra_args):
        refuse_positional(further)
        gradients, features = at_least_float32(updates), extra_args.get("features")
        finite = all_finite(gradients, features)
        if features is not None:
            extra_args["features"] = {k: x.only_if(finite) for k, x in features.items()}
        new, inner_state = inner.update(
            jax.tree.map(_finite_or_zero, gradients),
            state.inner_state,
            at_least_float32(params),
            finite=finite,
            **extra_args,
        )
        new = jax.tree.map(lambda x: finite.astype(x.dtype) * _finite_or_zero(x), new)
        scalar = lambda new, old: jnp.where(finite, new, old) if jnp.ndim(new) == 0 else new
        inner_state = jax.tree.map(scalar, inner_state, state.inner_state)
        taken = finite.astype(jnp.int32)
        changes = state.changes
        if params is not None:
            changes = jax.tree.map(scalar, _changes(new, params), changes)
        state = GuardState(state.count + taken, state.skipped + 1 - taken, changes, inner_state)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def at_least_float32(tree: Any) -> Any:
    """Casts half precision up; leaves all else alone."""

    def cast(x):
        half = is_parameter(x) and jnp.finfo(x.dtype).bits < 32
        return x.astype(jnp.float32) if half else x

    return jax.tree.map(cast, tree)


def all_finite(gradients: Any, features: Any) -> Array:
    """Whether all sums of squares are finite."""
    arrays = lambda tree: [x for x in jax.tree.leaves(tree) if is_parameter(x)]
    flags = [jnp.isfinite(dot(x, x)) for x in arrays((gradients, at_least_float32(features)))]
    finite = functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
    # Inside a shard_map, devices whose gradients are the same must agree.
    axes = tuple(varying_axes(features) - varying_axes(gradients))
    return lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite


def _finite_or_zero(x: Any) -> Any:
    """Entries that are not finite, as zeros: no weight times NaN is NaN."""
    return jnp.where(jnp.isfinite(x), x, 0) if is_parameter(x) else x


def _named(tree: Any) -> dict[str, Array]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves if is_parameter(leaf)}


def _changes(updates: Any, params: Any) -> dict[str, Array]:
    """The norm of each update, relative to that of its parameter; 0 where that is 0."""

    def relative(update: Array, parameter: Array) -> Array:
        square = jnp.real(dot(parameter, parameter))
        ratio = jnp.real(dot(update, update)) / jnp.where(square > 0, square, 1)
        return jnp.sqrt(jnp.where(square > 0, ratio, 0)).astype(jnp.result_type(float))

    named = _named(at_least_float32(params))
    return {name: relative(update, named[name]) for name, update in _named(updates).items()}
