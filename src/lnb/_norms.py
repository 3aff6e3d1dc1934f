"""Trust regions: how long a step is, given every neuron's gradient and direction."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from ._factor import Factor
from ._metric import Theta

_matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)

# The quintic of Muon, as in `optax.contrib.muon`.
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Boosted(NamedTuple):
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

    @property
    def norm(self) -> Array:
        """sqrt(h . g), the norm of the neuron's change as a function."""
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
      unit: `(part, norm, inverse) -> direction` of a part, where `norm` is that of the trust
        region and `inverse` is 1 / max(min_norm, norm).
    """

    shared: bool
    unit: Callable[[Boosted, Array, Array], Any]

    def __call__(self, parts: list[Boosted], min_norm: ArrayLike) -> Step:
        norms = [part.norm for part in parts]
        total = jnp.sqrt(jnp.sum(jnp.array(norms) ** 2))
        regions = [total for _ in parts] if self.shared else norms
        longest = [jnp.maximum(norm, jnp.asarray(min_norm, norm.dtype)) for norm in regions]
        inverses = [jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1), 0) for x in longest]
        directions = [self.unit(*args) for args in zip(parts, regions, inverses, strict=True)]
        capped = jnp.any(jnp.array(regions) < jnp.array(longest))
        return Step(directions, norms, total, capped)


def scaled(part: Boosted, norm: Array, inverse: Array) -> Any:
    r"""The boosting update, :math:`h / \Vert h \Vert_F`."""
    del norm
    return _scale(inverse, part.direction)


def newton_schulz(matrix: Array, steps: int = 5) -> Array:
    """Moves the singular values of [..., d, o] matrices close to 1, and leaves 0 at 0."""
    if matrix.shape[-2] > matrix.shape[-1]:
        return newton_schulz(matrix.mT, steps).mT
    a, b, c = _NEWTON_SCHULZ
    size = jnp.sqrt(jnp.sum(matrix**2, (-2, -1), keepdims=True))
    matrix = matrix / jnp.where(size > 0, size, 1)
    for _ in range(steps):
        square = _matmul(matrix, matrix.mT)
        matrix = a * matrix + _matmul(b * square + c * _matmul(square, square), matrix)
    return matrix


def orthogonal(
    part: Boosted,
    norm: Array,
    inverse: Array,
    orthogonalize: Callable[[Array], Array] = newton_schulz,
) -> Any:
    r"""Steepest in the operator norm: :math:`L^{-T} orth(L^{-1} g)` with :math:`M = L L^T`.

    To features whitened by L the change is an orthogonal map: all singular values of its weight are
    1. The bias, which with L is the change of the mean output, is a part of its own, with a root
    mean square of 1 over the outputs. As one more row of the map it would share a norm of 1 among
    all of them: too little where outputs have a common offset to learn. A part without a factor
    keeps its direction and gets the norm that such a map has, the square root of its rank.
    `min_norm` acts by the factor min(1, norm / min_norm).
    """
    if part.factor is None:
        return _scale(inverse * part.rank**0.5, part.direction)
    weight, bias = part.factor.lower_solve(part.gradient)
    if bias is not None:
        size = jnp.linalg.norm(bias, axis=-1, keepdims=True)
        bias = bias * (bias.shape[-1] ** 0.5 / jnp.where(size > 0, size, 1))
    return part.factor.upper_solve(_scale(norm * inverse, Theta(orthogonalize(weight), bias)))


NORMS = {
    "network": Norm(shared=True, unit=scaled),  # the z of the paper's algorithms
    "neuron": Norm(shared=False, unit=scaled),
    "spectral": Norm(shared=False, unit=orthogonal),
}


def _scale(scalar: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: scalar.astype(x.dtype) * x, tree)
