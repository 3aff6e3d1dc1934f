"""Shampoo: "Preconditioned Stochastic Tensor Optimization", with steps as long as AdamW's.

Gupta, Koren and Singer 2018 (arXiv 1802.09568), with what made it practical: moving averages,
roots that are computed now and then, and the norm of Adam's step, "grafting" (Anil et al. 2020,
arXiv 2002.09018; https://github.com/facebookresearch/optimizers).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from .adamw import B2, WEIGHT_DECAY
from .matrices import Stacks, are_matrices, second_moment, stacked

_HIGHEST = lax.Precision.HIGHEST


class Side(NamedTuple):
    """One side of a stack of matrices, its rows or its columns.

    Attributes:
      second: the running average of G G^T, or of G^T G, [count, size, size].
      root: its power of -1/4, as it was when it was last due.
    """

    second: Array
    root: Array


class ShampooState(NamedTuple):
    """State of `scale_by_shampoo`.

    Attributes:
      count: steps taken.
      momentum: the running average of gradients, in stacks by the shape of their matrices.
      square: the running average of squared gradients, for Adam's step.
      sides: rows and columns of each stack; None for one that is too long, none for vectors.
    """

    count: Array
    momentum: Stacks
    square: Stacks
    sides: dict[str, tuple[Side | None, ...]]


def shampoo(learning_rate: Any, weight_decay: float = WEIGHT_DECAY) -> optax.GradientTransformation:
    """Shampoo in AdamW's place, with AdamW's settings."""
    return optax.chain(
        scale_by_shampoo(),
        optax.add_decayed_weights(weight_decay, are_matrices),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_shampoo(
    b1: float = 0.9,
    b2: float = B2,
    eps: float = 1e-8,
    ridge: float = 1e-6,
    every: int = 10,
    max_size: int = 8192,
) -> optax.GradientTransformation:
    """L^-1/4 G R^-1/4, as long as Adam's step; Adam's step itself for vectors, and at the start.

    Args:
      b1: decay of the momentum.
      b2: decay of L, R and of squared gradients.
      eps: Adam's.
      ridge: added to L and R, in units of the largest eigenvalue.
      every: steps from one root to the next; the first so many steps are Adam's.
      max_size: a side longer than this has no factor.

    Returns:
      The transformation.
    """

    def init(params: Any) -> Any:
        zeros = optax.tree.zeros_like(params)
        sides = {name: _sides(x, max_size) for name, x in params.items()}
        state = ShampooState(jnp.zeros((), jnp.int32), zeros, zeros, sides)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = state.count + 1
        momentum = optax.tree.update_moment(updates, state.momentum, b1, 1)
        square = optax.tree.update_moment(updates, state.square, b2, 2)
        means = optax.tree.bias_correction(momentum, b1, count)
        squares = optax.tree.bias_correction(square, b2, count)
        directions = {name: m / (jnp.sqrt(squares[name]) + eps) for name, m in means.items()}
        sides = {
            name: tuple(
                side and _absorb(side, g, i, b2) for i, side in enumerate(state.sides[name])
            )
            for name, g in updates.items()
        }
        is_side = lambda node: isinstance(node, Side)
        # The averages' bias, 1 - b2^t, is a factor that grafting divides out again.
        sides = lax.cond(
            count % every == 0,
            lambda sides: jax.tree.map(lambda side: _refresh(side, ridge), sides, is_leaf=is_side),
            lambda sides: sides,
            sides,
        )
        for name, own in sides.items():
            if any(own):
                grafted = _graft(means[name], directions[name], own)
                directions[name] = jnp.where(count >= every, grafted, directions[name])
        return directions, ShampooState(count, momentum, square, sides)

    return stacked(optax.GradientTransformation(init, update))


def _sides(x: Array, max_size: int) -> tuple[Side | None, ...]:
    if x.ndim < 3:
        return ()
    zeros = [jnp.zeros((len(x), size, size), x.dtype) for size in x.shape[1:]]
    return tuple(Side(z, z) if z.shape[1] <= max_size else None for z in zeros)


def _absorb(side: Side, g: Array, axis: int, decay: float) -> Side:
    second = decay * side.second + (1 - decay) * second_moment(g, axis)
    return side._replace(second=second)


def _refresh(side: Side, ridge: float) -> Side:
    values, vectors = jnp.linalg.eigh(side.second)
    largest = jnp.maximum(values[:, -1:], jnp.finfo(values.dtype).tiny)
    powers = (jnp.maximum(values, 0) + ridge * largest) ** -0.25
    root = jnp.matmul(vectors * powers[:, None, :], vectors.mT, precision=_HIGHEST)
    return side._replace(root=root)


def _graft(momentum: Array, adam: Array, sides: tuple[Side | None, ...]) -> Array:
    """Shampoo's directions, each with the norm of Adam's step."""
    x = momentum
    for axis, side in enumerate(sides):
        if side is not None:
            product = "bij,bik->bkj" if axis == 0 else "bij,bjk->bik"
            x = jnp.einsum(product, x, side.root, precision=_HIGHEST)
    norm = lambda x: jnp.sqrt(jnp.sum(x**2, axis=(1, 2), keepdims=True))
    return x * norm(adam) / jnp.maximum(norm(x), jnp.finfo(x.dtype).tiny)
