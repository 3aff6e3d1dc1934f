"""What a case of the zoo is, and how its model is written a second time, by hand."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Expected(NamedTuple):
    """What `find_neurons` should say of one neuron; None where it is free to choose."""

    weight: str
    bias: str | None
    kind: str | None
    d_in: int | None = None
    d_out: int | None = None
    n: int = 0
    sites: int | None = 1


def identity(path: str) -> Expected:
    """A parameter whose metric is the identity by definition."""
    return Expected(path, None, "identity", sites=None)


class Case(NamedTuple):
    """A loss with its parameters, the same loss written by hand, and its neurons.

    Attributes:
      loss_fn: what the library gets.
      params: its first argument.
      args: its other arguments.
      by_hand: `(tape, *args) -> loss`, the same number, with every neuron applied through the tape.
      expected: all neurons, identity ones included; None where only value and gradients are known.
      unclaimed: key paths of the parameters that nothing can claim.
      has_aux: whether the loss returns `(loss, aux)`.
      exact: agreement demanded, relative to the largest entry.
      sliced: weights for which the library may make one neuron a slice.
    """

    loss_fn: Callable
    params: Any
    args: tuple
    by_hand: Callable[..., Array]
    expected: tuple[Expected, ...] | None
    unclaimed: tuple[str, ...] = ()
    has_aux: bool = False
    exact: float = 1e-9
    sliced: tuple[str, ...] = ()


class Tape:
    """Runs a model written by hand and notes, for every neuron, the Jacobian of its outputs.

    `tape(function, weight, bias)` applies `function` to the parameters at these key paths. What it
    was fed is closed over, so what is differentiated is the neuron with its features held fixed.
    """

    def __init__(self, params: Any):
        self._leaves = flat(params)
        self._jacobians: dict[str, list[dict[str, Array]]] = {}

    def __getitem__(self, path: str) -> Array:
        return self._leaves[path]

    def __call__(self, function: Callable[..., Array], *paths: str) -> Array:
        theta = [self._leaves[path] for path in paths]
        jacobian = jax.jacobian(lambda theta: jnp.ravel(function(*theta)))(theta)
        self._jacobians.setdefault(paths[0], []).append(dict(zip(paths, jacobian, strict=True)))
        return function(*theta)

    @property
    def weights(self) -> set[str]:
        return set(self._jacobians)

    def product(self, weight: str, n: int, vector: dict[str, Array]) -> dict[str, Array]:
        """(1/n) J^T J v, the outputs being those of all sites."""
        total: dict[str, Array] = {}
        for jacobian in self._jacobians[weight]:
            pushed = sum(jnp.tensordot(j, vector[p], vector[p].ndim) for p, j in jacobian.items())
            for p, j in jacobian.items():
                total[p] = total.get(p, 0.0) + jnp.tensordot(pushed, j, 1) / n
        return total


def flat(tree: Any) -> dict[str, Array]:
    """The inexact arrays of a pytree by key path; the `.value` that NNX appends is dropped."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    return {
        name.removesuffix(".value"): leaf
        for name, leaf in named.items()
        if eqx.is_inexact_array(leaf)
    }


def normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def integers(seed: int, high: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).integers(high, size=shape))


def fill(tree: Any, seed: int = 0) -> Any:
    """Random numbers for every floating-point array or shape in a pytree, zeros for the others."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        if not isinstance(x, jax.ShapeDtypeStruct | jax.Array):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(0.2 + rng.normal(size=x.shape) / math.sqrt(max(x.shape, default=1)))

    return jax.tree.map(leaf, tree)


def build(model: Callable, seed: int = 0) -> Any:
    """An Equinox model with random parameters, without running its initialisers."""
    shapes = eqx.filter_eval_shape(model, jax.eval_shape(lambda: jax.random.key(0)))
    return fill(shapes, seed)


def relaxed(function: Callable) -> Callable:
    """For what promotes ranks and dtypes: other people's layers, formulas written by hand."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **kwargs)

    return wrapped


CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    """Enters a function that makes a case in the zoo, under its own name."""
    assert function.__name__ not in CASES, function.__name__
    CASES[function.__name__] = function
    return function
