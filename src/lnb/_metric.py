"""The metric M = (1/n) J^T J of a neuron, as an operator on its parameters.

Features come in one of two forms. A `Gram` holds the sums of x x^T and x, all that M depends on; a
`MatrixFree` holds the features themselves, and M theta is J^T (J theta) by differentiating the map
from parameters to outputs (the paper's matrix-vector product, section "Optimization"). Where
neurons take turns, a gram may be `Postponed`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._interpret import Arrangement, Layout, Program, accumulator
from ._packed import diagonal, unpack

HIGHEST = lax.Precision.HIGHEST


class Theta(NamedTuple):
    """A neuron's parameters, gradient or direction, as blocks of matrices."""

    weight: Array  # [blocks, inputs, outputs]
    bias: Array | None  # [blocks, outputs]


class Gram(NamedTuple):
    """The second moment of a neuron's features, as sums: over sites, batches, devices they add."""

    second: Array  # sum of x x^T, [blocks, inputs, inputs], or packed (`_packed.py`); of a lookup
    # the diagonal, [blocks, inputs]
    first: Array | None  # sum of x, [blocks, inputs]; of a lookup it would be the diagonal again
    count: Array  # n, the number of positions

    @property
    def matrix(self) -> Array:
        """The sum of x x^T, not packed; of a lookup the diagonal."""
        return self.second if self.second.ndim == 2 else unpack(self.second)


class Moments(NamedTuple):
    """The means of x and x * x, [blocks, inputs] each."""

    first: Array | None
    square: Array


@dataclasses.dataclass(frozen=True)
class SiteMap:
    """One site of a neuron: its outputs as a function of its parameters, its features as rows."""

    program: Program
    arrangement: Arrangement | None  # `None` where the weight has no matrix form, and where
    # another slice of it is fed the same
    features: tuple[str, ...]  # the residuals that are the features (of a scale, their product)
    layout: Layout | None = None  # its own, of a weight used in two orientations


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["residuals", "count"],
    meta_fields=["sites", "layout", "bias_layout"],
)
@dataclasses.dataclass(frozen=True)
class MatrixFree:
    """The features themselves, with all else that the sites' outputs depend on."""

    residuals: tuple[dict[str, Array], ...]  # of each site
    count: Array
    sites: tuple[SiteMap, ...]
    layout: Layout
    bias_layout: Layout | None

    def outputs(self, theta: Theta) -> tuple[Array, ...]:
        """The neuron's outputs at all its positions, were `theta` its parameters."""
        weight, bias = self.layout.from_matrix(theta.weight), theta.bias
        if bias is not None:
            assert self.bias_layout is not None
            bias = self.bias_layout.from_matrix(bias[:, None, :])
        return tuple(
            site.program(weight, bias, {int(slot): value for slot, value in residuals.items()})
            for site, residuals in zip(self.sites, self.residuals, strict=True)
        )

    def arranged(self) -> list[tuple[Arrangement, Sequence[Array]]]:
        """The features of each site, with how they stand as rows."""
        return [
            (site.arrangement, [residuals[slot] for slot in site.features])
            for site, residuals in zip(self.sites, self.residuals, strict=True)
            if site.arrangement is not None and site.layout is None
        ]

    def product(self, theta: Theta) -> Theta:
        """J^T J theta."""
        weight = self.layout.from_matrix(theta.weight)
        sided = self._sided(
            lambda layout, second: _times(second.astype(weight.dtype), layout.to_matrix(weight))
        )
        if sided is not None:
            return Theta(sided, None)
        _, jacobian = jax.linearize(self.outputs, jax.tree.map(jnp.zeros_like, theta))
        return jax.linear_transpose(jacobian, theta)(jacobian(theta))[0]

    def _sided(self, matrix: Callable[[Layout, Array], Array]) -> Array | None:
        """A sum over the sites of a weight used in two orientations.

        Each site's layout of the weight and sum of x x^T give a matrix in that layout. `None` where
        products with the features are cheaper.
        """
        parts = []
        for site, residuals in zip(self.sites, self.residuals, strict=True):
            if site.arrangement is not None and site.layout is not None:
                sums = site.arrangement.all_moments(*(residuals[slot] for slot in site.features))
                parts.append(site.layout.from_matrix(matrix(site.layout, sums["second"])))
        return self.layout.to_matrix(functools.reduce(jnp.add, parts)) if parts else None

    def squares(self) -> Array:
        """The sums of x * x for each element of the weight: the diagonal of J^T J.

        Every output is a sum of features times elements, each element once; so with the features
        squared, what flows back from ones is the sum of squares.
        """
        sided = self._sided(
            lambda layout, second: jnp.repeat(_squares(second)[:, :, None], layout.outputs, 2)
        )
        if sided is not None:
            return sided
        squared = [
            {k: v * v if jnp.issubdtype(v.dtype, jnp.inexact) else v for k, v in site.items()}
            for site in self.residuals
        ]
        zeros = jnp.zeros((self.layout.blocks, self.layout.inputs, self.layout.outputs), self.dtype)
        copy = dataclasses.replace(self, residuals=tuple(squared))
        outputs, backward = jax.vjp(lambda weight: copy.outputs(Theta(weight, None)), zeros)
        return backward(jax.tree.map(jnp.ones_like, outputs))[0]

    @property
    def dtype(self) -> jnp.dtype:
        """That of the statistics."""
        dtypes = [accumulator(x.dtype) for x in jax.tree.leaves(self.residuals)]
        return max(dtypes, key=lambda dtype: dtype.itemsize)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["features", "count"],
    meta_fields=["arrangements"],
)
@dataclasses.dataclass(frozen=True)
class Postponed:
    """Features whose gram is left to the solver, at the neuron's turn."""

    features: tuple[tuple[Array, ...], ...]  # of each site
    count: Array
    arrangements: tuple[Arrangement, ...]

    def arranged(self) -> list[tuple[Arrangement, Sequence[Array]]]:
        """The features of each site, with how they stand as rows."""
        return list(zip(self.arrangements, self.features, strict=True))


Features = Gram | MatrixFree | Postponed


def count(features: Features) -> Array:
    """n, the number of positions that the features come from."""
    return features.count


def empty_unless(flag: ArrayLike, features: Features) -> Features:
    """The same features, said to come from no positions, and so to be ignored, if not `flag`."""
    if flag is True:
        return features
    count = jnp.where(flag, features.count, 0)
    if isinstance(features, Gram):
        return features._replace(count=count)
    return dataclasses.replace(features, count=count)


def product(features: Features, theta: Theta) -> Theta:
    """M theta, exactly."""
    features = taken(features)
    share = _share(features.count, theta.weight.dtype)
    if isinstance(features, MatrixFree):
        return jax.tree.map(lambda leaf: leaf * share, features.product(theta))
    weight = _times(features.matrix.astype(theta.weight.dtype), theta.weight)
    if theta.bias is None:
        return Theta(weight * share, None)
    assert features.first is not None
    first = features.first.astype(theta.weight.dtype)
    weight += first[:, :, None] * theta.bias[:, None, :]
    bias = jnp.einsum("gd,gdo->go", first, theta.weight, precision=HIGHEST)
    bias += features.count.astype(theta.bias.dtype) * theta.bias
    return Theta(weight * share, bias * share)


def taken(features: Features) -> Gram | MatrixFree:
    """The features, with their gram no longer postponed."""
    if not isinstance(features, Postponed):
        return features
    whole = gram(features)
    assert whole is not None
    return whole


def gram(features: Features) -> Gram | None:
    """The gram, built from the features where they are held; `None` where M has no such form."""
    if isinstance(features, Gram):
        return features
    total = _total(features, lambda arrangement, xs: arrangement.all_moments(*xs))
    return None if total is None else Gram(total["second"], total.get("first"), features.count)


def rows(features: Features) -> Array | None:
    """The features as [blocks, positions, inputs], where they are held and have that form."""
    if not isinstance(features, MatrixFree):
        return None
    arranged = features.arranged()
    found = [x for arrangement, xs in arranged if (x := arrangement.all_rows(*xs)) is not None]
    return jnp.concatenate(found, axis=1) if found and len(found) == len(arranged) else None


def moments(features: Features) -> Moments:
    """The means of x and x * x (its first is `None` for a lookup, or without a matrix form)."""
    features = taken(features)
    if isinstance(features, Gram):
        second, first = features.second, features.first
        square = _squares(second)
    else:
        total = _total(features, lambda arrangement, xs: arrangement.all_sums(*xs))
        total = {"square": features.squares()[:, :, 0]} if total is None else total
        square, first = total["square"], total.get("first")
    share = _share(features.count, square.dtype)
    return Moments(None if first is None else first * share, square * share)


def _total(
    features: MatrixFree | Postponed, of: Callable[..., dict[str, Array]]
) -> dict[str, Array] | None:
    parts = [of(arrangement, xs) for arrangement, xs in features.arranged()]
    return jax.tree.map(lambda *sums: functools.reduce(jnp.add, sums), *parts) if parts else None


def _times(second: Array, weight: Array) -> Array:
    """x x^T times a weight; of a lookup there is but the diagonal."""
    if second.ndim == 2:
        return second[:, :, None] * weight
    return jnp.matmul(second, weight, precision=HIGHEST)


def _squares(second: Array) -> Array:
    return second if second.ndim == 2 else diagonal(second)


def _share(n: Array, dtype: jnp.dtype) -> Array:
    """1 / n, and nothing of nothing."""
    n = n.astype(dtype)
    return jnp.where(n > 0, 1 / jnp.maximum(n, 1), 0)
