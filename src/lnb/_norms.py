"""Trust regions: how long a step is, given every neuron's gradient and direction."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._inverse import Inverse
from ._metric import Theta, matmul
from ._neurons import Neuron
from ._numerics import ratio
from ._orthogonalize import newton_schulz
from ._plan import is_orthogonalized


class Boosted(NamedTuple):
    """A neuron's part of the step, or that of a parameter whose metric is the identity.

    Attributes:
      gradient: g.
      direction: h, with M h = g.
      rank: how many singular values h has as a linear map.
      inverse: that of M, if the direction is to be orthogonalized.
    """

    gradient: Any
    direction: Any
    rank: int = 1
    inverse: Inverse | None = None

    @property
    def norm(self) -> Array:
        """sqrt(h . g), the norm of the neuron's change as a function."""
        z = jnp.real(optax.tree.vdot(self.direction, self.gradient))
        return jnp.sqrt(jnp.maximum(z, 0)).astype(jnp.result_type(float))


class Step(NamedTuple):
    """A normalised step.

    Attributes:
      directions: that of each part, by name.
      norms: the norm of each part before normalisation, by name.
      norm: that of all parts together, sqrt(z).
      capped: whether `min_norm` made the step shorter.
    """

    directions: dict[str, Any]
    norms: dict[str, Array]
    norm: Array
    capped: Array


class Norm(NamedTuple):
    """A trust region.

    Attributes:
      shared: whether there is one for all parts, rather than one each.
      direction: the direction of a part that is then divided by the norm of its trust region.
      orthogonalizes: whether that is to be done with a neuron's direction.
    """

    shared: bool
    direction: Callable[[Boosted], Any]
    orthogonalizes: Callable[[Neuron], bool] = lambda neuron: False

    def __call__(self, parts: Mapping[str, Boosted], min_norm: ArrayLike) -> Step:
        norms = {name: part.norm for name, part in parts.items()}
        total = jnp.sqrt(sum(norm**2 for norm in norms.values()))
        regions = dict.fromkeys(norms, total) if self.shared else norms
        longest = {k: jnp.maximum(x, jnp.asarray(min_norm, x.dtype)) for k, x in regions.items()}
        directions = {
            name: _scale(ratio(1, longest[name]), self.direction(part))
            for name, part in parts.items()
        }
        capped = jnp.any(jnp.stack([regions[name] < longest[name] for name in parts]))
        return Step(directions, norms, total, capped)


def boosting(part: Boosted) -> Any:
    r"""The boosting update is :math:`h / \Vert h \Vert_F`."""
    return part.direction


def orthogonal(part: Boosted, root: Callable[[Array], Array] = newton_schulz) -> Any:
    r"""Steepest in the operator norm: :math:`L^{-T} orth(L^{-1} g)`, where :math:`M = L L^T`.

    To features whitened by L the change is an orthogonal map: all singular values of its weight are
    1. Any root of :math:`M^{-1}` serves as :math:`L^{-T}`. Where g has at least as many rows as
    columns, none is needed: the change is :math:`h (h^T g)^{-1/2}`.

    The bias, which for whitened features is the change of the mean output, is a part of its own,
    with a root mean square of 1 over the outputs. As one more row of the map it would share a norm
    of 1 among all of them: too little where outputs have a common offset to learn. A part without
    an inverse keeps its direction and gets the norm that such a map has, the square root of its
    rank. All this is times the norm of h, by which it will be divided unless `min_norm` is larger.
    """
    gradient, direction, rank, inverse = part
    if inverse is None:
        return _scale(jnp.asarray(rank**0.5), direction)
    centred, (_, inputs, outputs) = inverse.centre(gradient), gradient.weight.shape
    if inputs < outputs:
        whitened = inverse.whiten(centred)
        weight = inverse.unwhiten(matmul(root(matmul(whitened, whitened.mT)), whitened))
    else:
        weight = matmul(direction.weight, root(matmul(direction.weight.mT, centred)))
    bias = gradient.bias
    if bias is not None:
        bias = bias * ratio(outputs**0.5, jnp.linalg.norm(bias, axis=-1, keepdims=True))
    return _scale(part.norm, inverse.uncentre(Theta(weight, bias)))


NORMS = {
    "network": Norm(shared=True, direction=boosting),  # the z of the paper's algorithms
    "neuron": Norm(shared=False, direction=boosting),
    "spectral": Norm(False, orthogonal, lambda neuron: True),
    "auto": Norm(False, orthogonal, is_orthogonalized),
}


def rank(gradient: Any, neuron: Neuron | None = None) -> int:
    """How many singular values a gradient has as a linear map.

    A parameter of no neuron is seen as vectors along its last axis.
    """
    if neuron is None:
        *others, last = (1, *gradient.shape)
        return min(math.prod(others), last)
    if not neuron.has_matrix:
        return min(neuron.d_in, neuron.d_out)
    blocks, inputs, outputs = gradient.weight.shape
    return blocks * (min(inputs, outputs) + (0 if gradient.bias is None else outputs))


def _scale(scalar: Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: scalar.astype(x.dtype) * x, tree)
