"""Parameters as matrices, for methods that treat rows and columns differently."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

Stacks = dict[str, Array]


def are_matrices(params: Any) -> Any:
    """Which parameters have weight decay: all but biases, the scales of norms and the like."""
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def stacked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation of any tree of parameters, from one of stacks.

    A stack has all matrices, or all vectors, of one shape: [count, rows, columns] or [count, size].
    XLA compiles a few stacks several times as fast as many parameters.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        directions, state = inner.update(stack(updates), state)
        return unstack(directions, updates), state

    return optax.GradientTransformation(lambda params: inner.init(stack(params)), update)


def stack(tree: Any) -> Stacks:
    """All parameters, by the shape of their matrices."""
    groups: dict[str, list[Array]] = {}
    for leaf in jax.tree.leaves(tree):
        groups.setdefault(_name(leaf), []).append(_blocks(leaf))
    return {name: jnp.concatenate(group) for name, group in groups.items()}


def unstack(stacks: Any, like: Any) -> Any:
    """The inverse of `stack`, with the structure of `like`."""
    leaves, structure = jax.tree.flatten(like)
    used = dict.fromkeys(stacks, 0)
    found = []
    for leaf in leaves:
        name, count = _name(leaf), len(_blocks(leaf))
        part = stacks[name][used[name] : used[name] + count]
        used[name] += count
        found.append(part.reshape(leaf.shape))
    return structure.unflatten(found)


def second_moment(g: Array, axis: int) -> Array:
    """G G^T of matrices [count, rows, columns] for axis 0, their rows; G^T G for the columns."""
    g = g if axis == 0 else g.mT
    return jnp.matmul(g, g.mT, precision=lax.Precision.HIGHEST)


def _blocks(x: Array) -> Array:
    """A convolution [height, width, inputs, outputs] is one matrix whose columns are its filters.

    An array of three axes is a stack of matrices already.
    """
    if x.ndim < 2:
        return x.reshape(1, -1)
    return x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])


def _name(x: Array) -> str:
    return "x".join(map(str, _blocks(x).shape[1:])) + f" {np.dtype(x.dtype)}"
