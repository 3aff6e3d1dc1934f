"""What stands around a whole optimizer: float32 arithmetic, and no step that is not finite."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from ._interpret import is_parameter, path_name
from ._kernels import dot, finite_or_zero
from ._metric import Gram, Postponed, empty_unless
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
    Features whose gram is postponed are left to the solver. If they are not finite, nor is their
    gradient; if only their squares are not, the solver leaves them out.

    There is no `lax.cond` around the whole: it would hold all state twice. Instead the inner
    transformation is told by the keyword argument `finite`, and given empty features.

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
        features = extra_args.get("features")
        finite = _all_finite((updates, features))
        if features is not None:
            extra_args["features"] = {k: empty_unless(finite, x) for k, x in features.items()}
        new, inner_state = inner.update(
            jax.tree.map(_finite, at_least_float32(updates)),
            state.inner_state,
            at_least_float32(params),
            finite=finite,
            **extra_args,
        )
        new = jax.tree.map(lambda x: finite.astype(x.dtype) * finite_or_zero(x), new)
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


def _finite(x: Any) -> Any:
    return finite_or_zero(x) if is_parameter(x) else x


def _all_finite(tree: Any) -> Array:
    """Whether all sums of squares are finite.

    Inside a jitted step this becomes a chain of scalars, which compiles in no time. An array of
    them, or a selection between old and new state, took XLA a minute for a small transformer.
    """

    def checked(node: Any) -> Any:
        if isinstance(node, Gram):
            return node.second  # the sum of x is finite if that of x x^T is
        return None if isinstance(node, Postponed) else node

    is_leaf = lambda node: isinstance(node, Gram | Postponed)
    tree = jax.tree.map(checked, tree, is_leaf=is_leaf)
    leaves = [x for x in jax.tree.leaves(at_least_float32(tree)) if is_parameter(x)]
    finite = (jnp.isfinite(dot(x, x)) for x in leaves)
    return functools.reduce(jnp.logical_and, finite, jnp.asarray(True))
