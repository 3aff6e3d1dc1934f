"""Trust regions: how long a step is, given every neuron's gradient and direction."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ._inverse import Inverse
from ._metric import Theta, matmul
from ._neurons import Neuron
from ._orthogonalize import newton_schulz
from ._plan import is_orthogonalized


@dataclasses.dataclass(frozen=True)
class Boosted:
    """A neuron's part of the step, or that of a parameter whose metric is the identity.

    Attributes:
      gradient: g.
      direction: h, with M h = g.
      rank: how many singular values h has as a linear map.
      inverse: that of M, if the solver has it.
      orthogonalized: whether the direction is to be orthogonalized.
    """

    gradient: Any
    direction: Any
    rank: int
    inverse: Inverse | None = None
    orthogonalized: bool = False

    @functools.cached_property
    def centred(self) -> Array:
        """The gradient of the weight, for centred features."""
        assert self.inverse is not None
        return self.inverse.centre(self.gradient)

    @functools.cached_property
    def whitened(self) -> Array:
        """K^T g, for centred features, where K K^T is the inverse of M."""
        assert self.inverse is not None
        return self.inverse.whiten(self.centred)

    @property
    def is_wide(self) -> bool:
        return self.gradient.weight.shape[-2] < self.gradient.weight.shape[-1]

    @property
    def norm(self) -> Array:
        """sqrt(h . g), the norm of the neuron's change as a function."""
        if self.inverse is None:
            z = sum(jax.tree.leaves(jax.tree.map(dot, self.direction, self.gradient)))
        else:  # centred, all that is left of the bias is the change of the mean output
            bias = self.gradient.bias
            z = dot(self.direction.weight, self.centred) + (0 if bias is None else dot(bias, bias))
        return jnp.sqrt(jnp.maximum(jnp.real(z), 0)).astype(jnp.result_type(float))


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
      orthogonalizes: whether it does so with a neuron's direction.
    """

    shared: bool
    directions: Callable[[Sequence[Boosted], Sequence[Array], Sequence[Array]], list[Any]]
    orthogonalizes: Callable[[Neuron], bool] = lambda neuron: False

    def __call__(self, parts: Sequence[Boosted], min_norm: ArrayLike) -> Step:
        norms = [part.norm for part in parts]
        total = jnp.sqrt(sum(norm**2 for norm in norms))
        regions = [total for _ in parts] if self.shared else norms
        longest = [jnp.maximum(norm, jnp.asarray(min_norm, norm.dtype)) for norm in regions]
        inverses = [jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0) for x in longest]
        capped = functools.reduce(
            jnp.logical_or, map(jnp.less, regions, longest), jnp.asarray(False)
        )
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
    root: Callable[[Array], Array] = newton_schulz,
) -> list[Any]:
    r"""Steepest in the operator norm: :math:`L^{-T} orth(L^{-1} g)`, where :math:`M = L L^T`.

    To features whitened by L the change is an orthogonal map: all singular values of its weight are
    1. Any root of :math:`M^{-1}` serves as :math:`L^{-T}`. Where g has at least as many rows as
    columns, none is needed: the change is :math:`h (h^T g)^{-1/2}`.

    The bias, which for whitened features is the change of the mean output, is a part of its own,
    with a root mean square of 1 over the outputs. As one more row of the map it would share a norm
    of 1 among all of them: too little where outputs have a common offset to learn. A part without
    an inverse keeps its direction and gets the norm that such a map has, the square root of its
    rank. `min_norm` acts by the factor min(1, norm / min_norm).
    """
    roots = _together(root, [_square(part) for part in parts])

    def direction(part: Boosted, root: Array | None, norm: Array, inverse: Array) -> Any:
        if root is None or part.inverse is None:
            return _scale(inverse * part.rank**0.5, part.direction)
        if part.is_wide:
            weight = part.inverse.unwhiten(matmul(root, part.whitened))
        else:
            weight = matmul(part.direction.weight, root)
        bias = part.gradient.bias
        if bias is not None:
            size = jnp.linalg.norm(bias, axis=-1, keepdims=True)
            bias = bias * (bias.shape[-1] ** 0.5 / jnp.where(size > 0, size, 1))
        return part.inverse.uncentre(_scale(norm * inverse, Theta(weight, bias)))

    return list(map(direction, parts, roots, norms, inverses))


def _square(part: Boosted) -> Array | None:
    """The product of L^-1 g with itself, on its smaller side."""
    if part.inverse is None or not part.orthogonalized:
        return None
    if part.is_wide:
        return matmul(part.whitened, part.whitened.mT)
    return matmul(part.direction.weight.mT, part.centred)


def _together(
    function: Callable[[Array], Array], arrays: Sequence[Array | None]
) -> list[Array | None]:
    """A function of matrices [g, m, m], called once for all that are of one size."""
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


def dot(left: Array, right: Array) -> Array:
    """The inner product of two arrays."""
    return jnp.sum(jnp.conj(left) * right)


def _scale(scalar: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: scalar.astype(x.dtype) * x, tree)
