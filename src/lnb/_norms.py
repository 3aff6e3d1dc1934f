"""Trust regions: how long a step is, given every neuron's gradient and direction."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._cost import is_orthogonalized
from ._factor import Factor
from ._metric import Theta
from ._neurons import Neuron
from ._orthogonalize import newton_schulz


@dataclasses.dataclass(frozen=True)
class Boosted:
    """A neuron's part of the step, or that of a parameter whose metric is the identity.

    Attributes:
      gradient: g.
      direction: h, with M h = g.
      rank: how many singular values h has as a linear map.
      factor: M as L L^T, where the solver has it.
    """

    gradient: Any
    direction: Any
    rank: int
    factor: Factor | None = None

    @functools.cached_property
    def whitened(self) -> Any:
        """L^-1 g, where there is a factor."""
        return None if self.factor is None else self.factor.lower_solve(self.gradient)

    @property
    def norm(self) -> Array:
        """sqrt(h . g), the norm of the neuron's change as a function; with a factor, |L^-1 g|."""
        if self.factor is not None:
            return optax.tree.norm(self.whitened).astype(jnp.result_type(float))
        z = jnp.real(optax.tree.vdot(self.direction, self.gradient))
        return jnp.sqrt(jnp.maximum(z, 0)).astype(jnp.result_type(float))


class Step(NamedTuple):
    """A normalised step.

    Attributes:
      directions: one for each part.
      norms: each part's norm before normalisation.
      norm: that of all parts together, sqrt(z).
      capped: whether `min_norm` made the step shorter.
    """

    directions: list[Any]
    norms: list[Array]
    norm: Array
    capped: Array


class Norm(NamedTuple):
    """A trust region.

    Attributes:
      shared: whether there is one for all parts, rather than one each.
      directions: `(parts, norms, inverses) -> directions`, where norms are those of the parts'
        trust regions, and inverses 1 / max(min_norm, norm).
      needs_factor: whether it has a use for the factor of a neuron's metric.
    """

    shared: bool
    directions: Callable[[Sequence[Boosted], Sequence[Array], Sequence[Array]], list[Any]]
    needs_factor: Callable[[Neuron], bool] = lambda neuron: False

    def __call__(self, parts: Sequence[Boosted], min_norm: ArrayLike) -> Step:
        norms = [part.norm for part in parts]
        total = jnp.sqrt(jnp.sum(jnp.array(norms) ** 2))
        regions = [total for _ in parts] if self.shared else norms
        longest = [jnp.maximum(norm, jnp.asarray(min_norm, norm.dtype)) for norm in regions]
        inverses = [jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0) for x in longest]
        capped = jnp.any(jnp.array(regions) < jnp.array(longest))
        return Step(self.directions(parts, regions, inverses), norms, total, capped)


def scaled(
    parts: Sequence[Boosted], norms: Sequence[Array], inverses: Sequence[Array]
) -> list[Any]:
    r"""The boosting update, :math:`h / \Vert h \Vert_F`."""
    del norms
    return [_scale(x, part.direction) for x, part in zip(inverses, parts, strict=True)]


def orthogonal(
    parts: Sequence[Boosted],
    norms: Sequence[Array],
    inverses: Sequence[Array],
    orthogonalize: Callable[[Array], Array] = newton_schulz,
) -> list[Any]:
    r"""Steepest in the operator norm: :math:`L^{-T} orth(L^{-1} g)` with :math:`M = L L^T`.

    To features whitened by L the change is an orthogonal map: all singular values of its weight are
    1. The bias, which with L is the change of the mean output, is a part of its own, with a root
    mean square of 1 over the outputs. As one more row of the map it would share a norm of 1 among
    all of them: too little where outputs have a common offset to learn. A part without a factor
    keeps its direction and gets the norm that such a map has, the square root of its rank.
    `min_norm` acts by the factor min(1, norm / min_norm).
    """
    weights = _together(orthogonalize, [p.whitened.weight if p.factor else None for p in parts])

    def direction(part: Boosted, weight: Array | None, norm: Array, inverse: Array) -> Any:
        if part.factor is None or weight is None:
            return _scale(inverse * part.rank**0.5, part.direction)
        bias = part.gradient.bias
        if bias is not None:
            size = jnp.linalg.norm(bias, axis=-1, keepdims=True)
            bias = bias * (bias.shape[-1] ** 0.5 / jnp.where(size > 0, size, 1))
        return part.factor.upper_solve(_scale(norm * inverse, Theta(weight, bias)))

    return list(map(direction, parts, weights, norms, inverses))


def _together(
    function: Callable[[Array], Array], arrays: Sequence[Array | None]
) -> list[Array | None]:
    """A function of matrices [g, d, o], called once for all that are of one size."""
    groups: dict[tuple[int, ...], list[tuple[int, Array]]] = {}
    for i, x in enumerate(arrays):
        if x is not None:
            groups.setdefault(x.shape[1:], []).append((i, x))
    results: list[Array | None] = [None for _ in arrays]
    for group in groups.values():
        ends = list(itertools.accumulate(len(x) for _, x in group))
        whole = function(jnp.concatenate([x for _, x in group]))
        for (i, _), result in zip(group, jnp.split(whole, ends[:-1]), strict=True):
            results[i] = result
    return results


NORMS = {
    "network": Norm(shared=True, directions=scaled),  # the z of the paper's algorithms
    "neuron": Norm(shared=False, directions=scaled),
    "spectral": Norm(False, orthogonal, lambda neuron: True),
    "auto": Norm(False, orthogonal, is_orthogonalized),
}


def _scale(scalar: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: scalar.astype(x.dtype) * x, tree)
