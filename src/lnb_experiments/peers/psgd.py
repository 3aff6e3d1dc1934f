r"""PSGD Kron: "Preconditioned Stochastic Gradient Descent" with a Kronecker product.

Li 2018 (arXiv 1512.04202) and Pooladzandi and Li 2024 (arXiv 2402.04553), as in the package
psgd-jax 0.2.9, whose README is followed here and whose numbers these are. The package itself
imports a module that optax 0.2.7 removed.

The preconditioner of a matrix G is :math:`G \mapsto Q^T Q\, G\, R^T R` with triangular Q and R. It
descends, by steps of its own, a criterion whose minimum makes preconditioned gradients white.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from .adamw import WEIGHT_DECAY
from .matrices import Stacks, are_matrices, stacked

_HIGHEST = lax.Precision.HIGHEST


class PSGDState(NamedTuple):
    """State of `scale_by_psgd`.

    Attributes:
      count: steps taken; random numbers are a function of it.
      waited: steps since the preconditioner was last updated.
      momentum: the running average of gradients, in stacks by the shape of their matrices.
      factors: one for each side of a stack: triangular [count, size, size], or diagonal
        [count, size].
    """

    count: Array
    waited: Array
    momentum: Stacks
    factors: dict[str, list[Array]]


def psgd(learning_rate: Any, weight_decay: float = WEIGHT_DECAY) -> optax.GradientTransformation:
    """PSGD Kron with the settings of psgd-jax."""
    return optax.chain(
        scale_by_psgd(),
        optax.add_decayed_weights(weight_decay, are_matrices),
        optax.scale_by_learning_rate(learning_rate),
    )


def update_probability(count: Array) -> Array:
    """1 for 500 steps, then down to 0.03 by step 4,000: psgd-jax's default."""
    return jnp.clip(jnp.exp(-0.001 * (count.astype(jnp.float32) - 500)), 0.03, 1.0)


def scale_by_psgd(
    b1: float = 0.9,
    rate: float = 0.1,
    probability: Callable[[Array], Array] = update_probability,
    max_size: int = 8192,
) -> optax.GradientTransformation:
    """Whitens momentum by a preconditioner that is updated, from momentum too, now and then.

    Args:
      b1: decay of the momentum.
      rate: of the preconditioner's own steps.
      probability: of such a step, as a function of the number of steps taken.
      max_size: a side longer than this has a diagonal factor, as vectors have.

    Returns:
      The transformation.
    """

    def init(params: Any) -> Any:
        factors = {name: _identity(x, max_size) for name, x in params.items()}
        zero = jnp.zeros((), jnp.int32)
        state = PSGDState(zero, zero, optax.tree.zeros_like(params), factors)
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count, waited = state.count + 1, state.waited + 1
        momentum = optax.tree.update_moment(updates, state.momentum, b1, 1)
        means = optax.tree.bias_correction(momentum, b1, count)
        due = waited.astype(jnp.float32) >= 1 / probability(count)
        key = jax.random.fold_in(jax.random.key(0), state.count)
        factors = lax.cond(
            due, lambda old: _update(key, old, means, rate), lambda old: old, state.factors
        )
        directions = {
            name: _clip(jax.vmap(precondition)(factors[name], m)) for name, m in means.items()
        }
        return directions, PSGDState(count, jnp.where(due, 0, waited), momentum, factors)

    return stacked(optax.GradientTransformation(init, update))


def _update(
    key: Array, factors: dict[str, list[Array]], means: Stacks, rate: float
) -> dict[str, list[Array]]:
    """A step of every preconditioner; one in a hundred makes a matrix's two factors as large."""
    keys = jax.random.split(key)
    even = jax.random.uniform(keys[0]) < 0.01
    noise, new = _normal(keys[1], means), {}
    for name, own in factors.items():
        own = [jnp.where(even, *q) for q in zip(_balance(own), own, strict=True)]
        new[name] = jax.vmap(partial(learn, rate=rate))(own, means[name], noise[name])
    return new


def learn(factors: list[Array], g: Array, noise: Array, rate: float) -> list[Array]:
    """One step of the preconditioner of one matrix or vector g, which has a little noise added."""
    g = g + jnp.finfo(jnp.float32).eps ** 0.5 * jnp.mean(jnp.abs(g)) * noise
    return _learn(factors, g, noise, rate)


def _learn(factors: list[Array], g: Array, noise: Array, rate: float) -> list[Array]:
    """With A = Q G R^T and B = Q^-T V R^-1: Q <- Q - rate triu(A A^T - B B^T) Q / their norm."""
    a, b = g, noise
    for axis, factor in enumerate(factors):
        a = _along(axis, lambda x, q=factor: _times(q, x), a)
        b = _along(axis, lambda x, q=factor: _divided(q, x), b)
    new = []
    for axis, factor in enumerate(factors):
        rows = [jnp.moveaxis(x, axis, 0).reshape(x.shape[axis], -1) for x in (a, b)]
        if factor.ndim == 1:
            up, down = (jnp.sum(x**2, axis=1) for x in rows)
            change = (up - down) * factor / jnp.maximum(jnp.max(up + down), _tiny(up))
        else:
            up, down = (jnp.matmul(x, x.T, precision=_HIGHEST) for x in rows)
            norm = jnp.maximum(norm_bound(up + down), _tiny(up))
            change = jnp.matmul(jnp.triu(up - down) / norm, factor, precision=_HIGHEST)
        new.append(factor - rate * change)
    return new


def precondition(factors: list[Array], g: Array) -> Array:
    """Q^T Q G R^T R."""
    for axis, factor in enumerate(factors):
        g = _along(axis, lambda x, q=factor: _times(q.T, _times(q, x)), g)
    return g


def norm_bound(matrix: Array) -> Array:
    """A lower bound of a symmetric matrix's largest eigenvalue, at most sqrt(2) too low in tests.

    One power iteration from the longest column, as in psgd-jax.
    """
    largest = jnp.maximum(jnp.max(jnp.abs(matrix)), _tiny(matrix))
    scaled = matrix / largest
    x = scaled @ scaled[:, jnp.argmax(jnp.sum(scaled**2, axis=0))]
    return largest * jnp.linalg.norm(scaled @ (x / jnp.maximum(jnp.linalg.norm(x), _tiny(x))))


def _normal(key: Array, like: Stacks) -> Stacks:
    """Normal numbers. Drawn flat and at once: otherwise XLA compiles for half a minute on a CPU."""
    ends = np.cumsum([x.size for x in like.values()])
    parts = jnp.split(jax.random.normal(key, (ends[-1],)), ends[:-1])
    pairs = zip(parts, like.items(), strict=True)
    return {name: part.reshape(x.shape).astype(x.dtype) for part, (name, x) in pairs}


def _along(axis: int, apply: Callable[[Array], Array], x: Array) -> Array:
    """A linear map of one axis, as a map of the rows of a matrix."""
    moved = jnp.moveaxis(x, axis, 0)
    return jnp.moveaxis(apply(moved.reshape(len(moved), -1)).reshape(moved.shape), 0, axis)


def _times(factor: Array, x: Array) -> Array:
    if factor.ndim == 1:
        return factor[:, None] * x
    return jnp.matmul(factor, x, precision=_HIGHEST)


def _divided(factor: Array, x: Array) -> Array:
    """Q^-T x."""
    return x / factor[:, None] if factor.ndim == 1 else solve_triangular(factor, x, trans="T")


def _identity(x: Array, max_size: int) -> list[Array]:
    def side(size: int) -> Array:
        ones = jnp.ones((len(x), size), x.dtype)
        if x.ndim < 3 or size == 1 or size > max_size:
            return ones
        return ones[:, :, None] * jnp.eye(size, dtype=x.dtype)[None]

    return [side(size) for size in x.shape[1:]]


def _balance(factors: list[Array]) -> list[Array]:
    """Factors of one size, with the same product."""
    if len(factors) == 1:
        return factors
    sizes = [jnp.max(jnp.abs(q), axis=tuple(range(1, q.ndim)), keepdims=True) for q in factors]
    mean = jnp.sqrt(sizes[0].ravel() * sizes[1].ravel())
    return [q * mean.reshape(size.shape) / size for q, size in zip(factors, sizes, strict=True)]


def _clip(x: Array) -> Array:
    """White gradients have a root mean square of 1; more than 1.1 is cut back to that."""
    rms = jnp.sqrt(jnp.mean(x**2, axis=tuple(range(1, x.ndim)), keepdims=True))
    return x / jnp.maximum(1.0, rms / 1.1)


def _tiny(x: Array) -> float:
    return float(jnp.finfo(x.dtype).tiny)
