"""Trust regions: how long a step is, given every neuron's gradient and direction."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._cost import is_orthogonalized, is_wide
from ._inverse import Factor, Inverse
from ._kernels import dot
from ._metric import Theta
from ._neurons import Neuron
from ._orthogonalize import newton_schulz

_matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Boosted:
    """A neuron's part of the step, or that of a parameter whose metric is the identity.

    Attributes:
      gradient: g.
      direction: h, with M h = g.
      rank: how many singular values h has as a linear map.
      inverse: that of M, if the solver has it.
      orthogonalized: whether the direction is to be orthogonalized; then the inverse is a factor
        where g has more columns than rows.
    """

    gradient: Any
    direction: Any
    rank: int
    inverse: Inverse | None = None
    orthogonalized: bool = False

    @functools.cached_property
    def pair(self) -> tuple[Array, Array]:
        """Centred h and g, or L^-1 g twice: either way a product is that of L^-1 g with itself."""
        assert self.inverse is not None
        if isinstance(self.inverse, Factor):
            whitened = self.inverse.whiten(self.gradient)
            return whitened, whitened
        return self.direction.weight, self.inverse.centre(self.gradient)

    @property
    def norm(self) -> Array:
        """sqrt(h . g), the norm of the neuron's change as a function."""
        if self.inverse is None:
            z = sum(jax.tree.leaves(jax.tree.map(dot, self.direction, self.gradient)))
        else:  # centred, all that is left of the bias is the change of the mean output
            bias = self.gradient.bias
            z = dot(*self.pair) + (0 if bias is None else dot(bias, bias))
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

    def needs_factor(self, neuron: Neuron) -> bool:
        """Whether it needs M^-1 as a factor: where g has more columns than rows.

        The small product of h and g is not symmetric there; where M is ill-conditioned, single
        precision does not suffice for its root.
        """
        return self.orthogonalizes(neuron) and is_wide(neuron)

    def __call__(self, parts: Sequence[Boosted], min_norm: ArrayLike) -> Step:
        norms = [part.norm for part in parts]
        # Chains of scalars: to XLA one operation each, where an array of them would be several.
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
    r"""Steepest in the operator norm: :math:`h (h^T g)^{-1/2}`.

    With :math:`M = L L^T` that is :math:`L^{-T} orth(L^{-1} g)`: to features whitened by L the
    change is an orthogonal map, all singular values of its weight are 1. Where g has more columns
    than rows, the root is taken of the smaller :math:`L^{-1} g (L^{-1} g)^T`.

    The bias, which with L is the change of the mean output, is a part of its own, with a root mean
    square of 1 over the outputs. As one more row of the map it would share a norm of 1 among all of
    them: too little where outputs have a common offset to learn. A part without an inverse keeps
    its direction and gets the norm that such a map has, the square root of its rank. `min_norm`
    acts by the factor min(1, norm / min_norm).
    """
    roots = _together(root, [_square(part) for part in parts])

    def direction(part: Boosted, root: Array | None, norm: Array, inverse: Array) -> Any:
        if root is None or part.inverse is None:
            return _scale(inverse * part.rank**0.5, part.direction)
        (weight, _), bias = part.pair, part.gradient.bias
        weight = _matmul(weight, root) if _is_tall(weight) else _matmul(root, weight)
        if bias is not None:
            size = jnp.linalg.norm(bias, axis=-1, keepdims=True)
            bias = bias * (bias.shape[-1] ** 0.5 / jnp.where(size > 0, size, 1))
        theta = _scale(norm * inverse, Theta(weight, bias))
        held = part.inverse
        return held.unwhiten(theta) if isinstance(held, Factor) else held.uncentre(theta)

    return list(map(direction, parts, roots, norms, inverses))


def _square(part: Boosted) -> Array | None:
    """The product of L^-1 g with itself, on its smaller side."""
    if part.inverse is None or not part.orthogonalized:
        return None
    left, right = part.pair
    return _matmul(left.mT, right) if _is_tall(left) else _matmul(left, right.mT)


def _is_tall(matrix: Array) -> bool:
    return matrix.shape[-2] >= matrix.shape[-1]


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


def _scale(scalar: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: scalar.astype(x.dtype) * x, tree)
