"""SOAP: "Improving and Stabilizing Shampoo using Adam".

Vyas et al. 2024, arXiv 2409.11321, Algorithms 3 and 4; where these leave a choice, as the authors'
own code (https://github.com/nikhilvyas/SOAP) does it. There is no package of it for JAX.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from .matrices import are_matrices, second_moment, stacked

_HIGHEST = lax.Precision.HIGHEST


class Side(NamedTuple):
    """One side of a stack of matrices, its rows or its columns.

    Attributes:
      second: the running average of G G^T, or of G^T G, [count, size, size].
      basis: an estimate of its eigenvectors, the largest eigenvalue's first, of the same shape.
    """

    second: Array
    basis: Array


class Rotated(NamedTuple):
    """What SOAP knows of a stack of parameters.

    Attributes:
      momentum: the running average of gradients.
      square: the running average of squared gradients in the basis.
      sides: rows and columns; None for one that is too long, none at all for vectors.
    """

    momentum: Array
    square: Array
    sides: tuple[Side | None, ...]


class SOAPState(NamedTuple):
    """State of `scale_by_soap`.

    Attributes:
      count: calls so far; the first takes no step.
      stacks: by the shape of their matrices.
    """

    count: Array
    stacks: dict[str, Rotated]


def soap(learning_rate: Any, weight_decay: float = 0.01) -> optax.GradientTransformation:
    """SOAP with its authors' settings."""
    return optax.chain(
        scale_by_soap(),
        optax.add_decayed_weights(weight_decay, are_matrices),
        optax.scale_by_learning_rate(learning_rate),
    )


def scale_by_soap(
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    every: int = 10,
    max_size: int = 10_000,
) -> optax.GradientTransformation:
    """Adam in the eigenbasis of Shampoo's factors; plain Adam for vectors.

    Args:
      b1: decay of the momentum.
      b2: decay of squared gradients, and of the factors.
      eps: added to the root of squared gradients.
      every: steps from one basis to the next.
      max_size: a side longer than this is not rotated.

    Returns:
      The transformation.
    """

    def init(params: Any) -> Any:
        def start(x: Array) -> Rotated:
            zeros, axes = jnp.zeros_like(x), range(1, x.ndim if x.ndim == 3 else 1)
            return Rotated(zeros, zeros, tuple(_side(x, axis, max_size) for axis in axes))

        stacks = {name: start(x) for name, x in params.items()}
        state = SOAPState(jnp.zeros((), jnp.int32), stacks)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        first, t = state.count == 0, jnp.maximum(state.count, 1).astype(jnp.float32)
        correction = jnp.sqrt(1 - b2**t) / (1 - b1**t)
        directions, stacks = {}, {}
        for name, g in updates.items():
            momentum, square, sides = state.stacks[name]
            momentum = b1 * momentum + (1 - b1) * g
            square = b2 * square + (1 - b2) * _rotate(g, sides) ** 2
            # The first gradient makes the first basis and is used for nothing else.
            momentum, square = (jnp.where(first, 0, x) for x in (momentum, square))
            step = correction.astype(g.dtype) * _rotate(momentum, sides)
            directions[name] = _rotate(step / (jnp.sqrt(square) + eps), sides, back=True)
            sides = tuple(side and _absorb(side, g, axis, b2) for axis, side in enumerate(sides))
            stacks[name] = Rotated(momentum, square, sides)
        due = (state.count % every == 0).astype(jnp.int32)
        stacks = lax.switch(
            jnp.where(first, 2, due),
            [
                lambda stacks: stacks,
                lambda stacks: {name: _refresh(own) for name, own in stacks.items()},
                lambda stacks: {name: _begin(own) for name, own in stacks.items()},
            ],
            stacks,
        )
        return directions, SOAPState(state.count + 1, stacks)

    return stacked(optax.GradientTransformation(init, update))


def _side(x: Array, axis: int, max_size: int) -> Side | None:
    size = x.shape[axis]
    if size > max_size:
        return None
    zeros = jnp.zeros((len(x), size, size), x.dtype)
    return Side(zeros, zeros)


def _rotate(x: Array, sides: tuple[Side | None, ...], back: bool = False) -> Array:
    """Q^T X R, for the bases Q of rows and R of columns; or back from there."""
    for axis, side in enumerate(sides):
        if side is not None:
            basis = side.basis.mT if back else side.basis
            product = "bij,bik->bkj" if axis == 0 else "bij,bjk->bik"
            x = jnp.einsum(product, x, basis, precision=_HIGHEST)
    return x


def _absorb(side: Side, g: Array, axis: int, decay: float) -> Side:
    second = decay * side.second + (1 - decay) * second_moment(g, axis)
    return side._replace(second=second)


def _begin(own: Rotated) -> Rotated:
    """The eigenvectors of the first gradient's factors."""
    eigenvectors = lambda second: jnp.linalg.eigh(second)[1][:, :, ::-1]
    sides = (side and side._replace(basis=eigenvectors(side.second)) for side in own.sides)
    return own._replace(sides=tuple(sides))


def _refresh(own: Rotated) -> Rotated:
    """One step of orthogonal iteration (Algorithm 4), the largest eigenvalue first."""
    square, sides = own.square, []
    for axis, side in enumerate(own.sides):
        if side is not None:
            image = jnp.matmul(side.second, side.basis, precision=_HIGHEST)
            order = jnp.argsort(-jnp.sum(side.basis * image, axis=1), axis=-1)
            image = jnp.take_along_axis(image, order[:, None, :], axis=2)
            order = order[:, :, None] if axis == 0 else order[:, None, :]
            square = jnp.take_along_axis(square, order, axis=axis + 1)
            side = side._replace(basis=jnp.linalg.qr(image)[0])
        sides.append(side)
    return own._replace(square=square, sides=tuple(sides))
