"""The metric M = (1/n) J^T J of a neuron, as an operator on its parameters.

M comes from the rows that the neuron was fed: by its Gram matrix, or by products with the rows
themselves, whichever is cheaper. A neuron without a matrix form has its map from parameters to
outputs differentiated instead (the paper's matrix-vector product, section "Optimization").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._features import Layout, Residuals, Rows, SiteRows, Sums, accumulator

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)

Features = Rows | Residuals


class Theta(NamedTuple):
    """A neuron's parameters, gradient or direction, as blocks of matrices."""

    weight: Array  # [blocks, inputs, outputs]
    bias: Array | None  # [blocks, outputs]


class Moments(NamedTuple):
    """Means over positions.

    Attributes:
      first: of x, [blocks, inputs]; `None` where x is not known.
      second: of x x^T, [blocks, inputs, inputs], or of x * x, [blocks, inputs].
    """

    first: Array | None
    second: Array

    @property
    def square(self) -> Array:
        """The mean of x * x, [blocks, inputs]."""
        second = self.second
        return second if second.ndim == 2 else jnp.diagonal(second, axis1=1, axis2=2)


def moments(features: Rows) -> Moments:
    """The means of x and x x^T, of a neuron with a matrix form."""
    sums = [site.arrangement.sums(x) for site, x, _ in features]
    total = functools.reduce(lambda a, b: Sums(a.second + b.second, a.first + b.first), sums)
    return Moments(*_mean(features, (total.first, total.second)))


def diagonal_moments(features: Features, layout: Layout) -> Moments:
    """The means of x and x * x, for any neuron; the layout is the neuron's own."""
    if isinstance(features, Rows) and all(site.layout == layout for site in features.sites):
        sums = [_diagonal_sums(site, x) for site, x, _ in features]
        first, square = (functools.reduce(jnp.add, parts) for parts in zip(*sums, strict=True))
        return Moments(*_mean(features, (first, square)))
    return Moments(None, _mean(features, _diagonal(features, layout)))


def product(features: Features, theta: Theta, layout: Layout, bias: Layout | None) -> Theta:
    """M theta, exactly, for any neuron; the layouts are the neuron's own."""
    if isinstance(features, Residuals):
        outputs = lambda theta: features.outputs(*theta)
        _, jacobian = jax.linearize(outputs, jax.tree.map(jnp.zeros_like, theta))
        return _mean(features, jax.linear_transpose(jacobian, theta)(jacobian(theta))[0])
    total = jax.tree.map(jnp.zeros_like, theta)
    for site, x, n in features:
        image = _site_product(site, x, n, _seen_by(site, theta, layout, bias))
        weight = _moved(image.weight, site.layout, layout)
        total = total._replace(weight=total.weight + weight)
        if image.bias is not None and total.bias is not None:
            total = total._replace(
                bias=total.bias + _moved_bias(image.bias, site.bias_layout, bias)
            )
    return _mean(features, total)


def _seen_by(site: SiteRows, theta: Theta, layout: Layout, bias: Layout | None) -> Theta:
    """A neuron's parameters as one of its sites sees them."""
    weight = _moved(theta.weight, layout, site.layout)
    if theta.bias is None or site.bias_layout is None:
        return Theta(weight, None)
    return Theta(weight, _moved_bias(theta.bias, bias, site.bias_layout))


def _moved(matrix: Array, source: Layout, target: Layout) -> Array:
    return matrix if source == target else target.to_matrix(source.from_matrix(matrix))


def _moved_bias(bias: Array, source: Layout | None, target: Layout | None) -> Array:
    assert source is not None
    assert target is not None
    return _moved(bias[:, None, :], source, target)[:, 0, :]


def _site_product(site: SiteRows, x: Array, n: Array, theta: Theta) -> Theta:
    """n M theta of one site: (X^T X) theta or X^T (X theta), whichever is cheaper."""
    arrangement, dtype = site.arrangement, theta.weight.dtype
    blocks, inputs, outputs = theta.weight.shape
    positions = arrangement.shape[1]
    by_gram = arrangement.flops() + 2.0 * blocks * inputs**2 * outputs
    if arrangement.kind == "lookup" or by_gram < 4.0 * blocks * positions * inputs * outputs:
        second, first = (part.astype(dtype) for part in arrangement.sums(x))
        is_diagonal = second.ndim == 2
        weight = second[:, :, None] * theta.weight if is_diagonal else matmul(second, theta.weight)
    else:
        rows = arrangement.rows(x).astype(dtype)
        first = arrangement.weight * jnp.sum(rows, axis=1)
        weight = arrangement.weight * matmul(rows.mT, matmul(rows, theta.weight))
    if theta.bias is None:
        return Theta(weight, None)
    weight += first[:, :, None] * theta.bias[:, None, :]
    return Theta(weight, matmul(first[:, None], theta.weight)[:, 0] + n.astype(dtype) * theta.bias)


def _diagonal_sums(site: SiteRows, x: Array) -> tuple[Array, Array]:
    if site.arrangement.kind == "lookup":
        sums = site.arrangement.sums(x)
        return sums.first, sums.second
    rows, weight = site.arrangement.rows(x), site.arrangement.weight
    return weight * jnp.sum(rows, axis=1), weight * jnp.sum(rows * rows, axis=1)


def _diagonal(features: Features, layout: Layout) -> Array:
    """The diagonal of J^T J, [blocks, inputs], of a neuron whose sites see it differently."""
    if isinstance(features, Rows):
        parts = []
        for site, x, _ in features:
            _, square = _diagonal_sums(site, x)
            spread = jnp.broadcast_to(square[:, :, None], site.layout.matrix)
            parts.append(_moved(spread, site.layout, layout))
        return functools.reduce(jnp.add, parts)[:, :, 0]
    # Every output is a sum of features times elements, each element once. So with the features
    # squared, what flows back from ones is the sum of squares.
    dtype = max(
        (accumulator(x.dtype) for x in jax.tree.leaves(features.arrays)),
        key=lambda dtype: dtype.itemsize,
        default=jnp.dtype(jnp.float32),
    )
    zeros = jnp.zeros(layout.matrix, dtype)
    squared = features.squared()
    outputs, backward = jax.vjp(lambda weight: squared.outputs(weight, None), zeros)
    return backward(jax.tree.map(jnp.ones_like, outputs))[0][:, :, 0]


def _mean(features: Features, sums: Any) -> Any:
    """Sums over n positions divided by n, or 0 where n is 0; averaged over devices."""
    n = features.count
    share = lambda dtype: jnp.where(n > 0, 1 / jnp.maximum(n, 1).astype(dtype), 0)
    means = jax.tree.map(lambda leaf: leaf * share(leaf.dtype), sums)
    return lax.pmean(means, features.devices) if features.devices else means


# -- damping ---------------------------------------------------------------------------------------


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Absolute:
    r"""Damping that is added to M as it is: the :math:`\gamma` of the paper, in the units of M.

    Without this, damping is relative: a multiple of the features' mean variance.

    Attributes:
      value: a number, possibly traced.
    """

    value: ArrayLike


Damping = ArrayLike | Absolute


def damping_constant(damping: Damping, kind: str, moments: Moments, bias: bool) -> Array:
    r"""The :math:`\gamma` to add to a neuron's diagonal, [g, 1], or [1, 1] where blocks share it.

    Paper, section "Positive Semi-definite Metrics". Relative damping is a multiple of the
    features' mean variance (with a bias: trace of the covariance / d) or mean power (without: trace
    of M / d). The rounding error of the diagonal is included, so that a metric without full rank
    can be factorised; the constant is zero only where the features are.
    """
    diagonal, rounding = variances(kind, moments, bias)
    if isinstance(damping, Absolute):
        return jnp.asarray(damping.value, rounding.dtype) + rounding
    return jnp.asarray(damping, rounding.dtype) * diagonal + rounding


def variances(kind: str, moments: Moments, bias: bool) -> tuple[Array, Array]:
    """The mean variance of the features (without a bias, their mean power), and its rounding."""
    power = moments.square
    mean = moments.first if bias else None
    diagonal = power if mean is None else jnp.maximum(power - mean**2, 0)
    rounding = jnp.finfo(power.dtype).eps * power.shape[1] * power
    return block_mean(kind, diagonal), block_mean(kind, rounding)


def damped_product(
    features: Features, gamma: Array, layout: Layout, bias: Layout | None
) -> Callable[[Theta], Theta]:
    r""":math:`\theta \mapsto (M + \gamma I)\theta`, with nothing added for the bias."""

    def apply(theta: Theta) -> Theta:
        image = product(features, theta, layout, bias)
        return image._replace(weight=image.weight + gamma[..., None] * theta.weight)

    return apply


def block_mean(kind: str, diagonal: Array) -> Array:
    """The mean of a diagonal [g, d] over the inputs that share a scale, with the axes kept.

    These are the inputs of a block. A scale has one input a block, so there all blocks count.
    """
    return jnp.mean(diagonal, axis=(0, 1) if kind == "scale" else 1, keepdims=True)
