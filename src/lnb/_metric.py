"""The metric M = (1/n) J^T J of a neuron, as an operator on its parameters.

M comes from the rows that the neuron was fed: by its Gram matrix, or by products with the rows
themselves, whichever is cheaper. A site without a matrix form has its map from parameters to
outputs differentiated instead (the paper's matrix-vector product, section "Optimization").
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from ._features import Features, Form, Layout, Moments, Program, SiteRows, accumulator

matmul = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Theta(NamedTuple):
    """A neuron's parameters, gradient or direction, as blocks of matrices."""

    weight: Array  # [blocks, inputs, outputs]
    bias: Array | None  # [blocks, outputs]


def moments(features: Features) -> Moments:
    """The means of x and x x^T, of a neuron with a matrix form."""
    sums = [site.arrangement.sums(x) for site, x in features.rows]
    return _mean(features, _sum(sums))


def diagonal_moments(features: Features, layout: Layout) -> Moments:
    """The means of x and x * x, for any neuron; the layout is the neuron's own."""
    sums = [_diagonal_sums(site, x) for site, x in features.rows if site.layout == layout]
    if len(sums) == len(features.sites):
        return _mean(features, _sum(sums))
    parts = [_moved(_diagonal(site, x), site.layout, layout) for site, x, _ in features]
    return Moments(None, _mean(features, _sum(parts)[:, :, 0]))


def product(features: Features, theta: Theta, layout: Layout, bias: Layout | None) -> Theta:
    """M theta, exactly, for any neuron; the layouts are the neuron's own."""
    images = []
    for site, x, n in features:
        see = functools.partial(_seen_by, site, layout, bias)
        images += jax.linear_transpose(see, theta)(_site_product(site, x, n, see(theta)))
    return _mean(features, _sum(images))


def _seen_by(site: Form, layout: Layout, bias: Layout | None, theta: Theta) -> Theta:
    """A neuron's parameters as one of its sites sees them."""
    weight = _moved(theta.weight, layout, site.layout)
    if theta.bias is None or site.bias_layout is None:
        return Theta(weight, None)
    assert bias is not None
    return Theta(weight, _moved(theta.bias[:, None, :], bias, site.bias_layout)[:, 0, :])


def _moved(matrix: Array, source: Layout, target: Layout) -> Array:
    return matrix if source == target else target.to_matrix(source.from_matrix(matrix))


def _site_product(site: Form, x: Any, n: Array, theta: Theta) -> Theta:
    """n M theta of one site: (X^T X) theta or X^T (X theta), whichever is cheaper."""
    if isinstance(site, Program):
        outputs = lambda theta: site(theta.weight, theta.bias, x)
        _, jacobian = jax.linearize(outputs, jax.tree.map(jnp.zeros_like, theta))
        return jax.linear_transpose(jacobian, theta)(jacobian(theta))[0]
    arrangement, dtype = site.arrangement, theta.weight.dtype
    blocks, inputs, outputs = theta.weight.shape
    positions = arrangement.shape[1]
    by_gram = arrangement.flops() + 2.0 * blocks * inputs**2 * outputs
    if arrangement.kind == "lookup" or by_gram < 4.0 * blocks * positions * inputs * outputs:
        first, second = jax.tree.map(lambda part: part.astype(dtype), arrangement.sums(x))
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


def _diagonal_sums(site: SiteRows, x: Any) -> Moments:
    """The sums of x and x * x."""
    if site.arrangement.kind == "lookup":
        return site.arrangement.sums(x)
    rows, weight = site.arrangement.rows(x), site.arrangement.weight
    return Moments(weight * jnp.sum(rows, axis=1), weight * jnp.sum(rows * rows, axis=1))


def _diagonal(site: Form, x: Any) -> Array:
    """The diagonal of J^T J of one site, [blocks, inputs, outputs]."""
    if isinstance(site, SiteRows):
        return jnp.broadcast_to(_diagonal_sums(site, x).square[:, :, None], site.layout.matrix)
    # Every output is a sum of features times elements, each element once. So with the features
    # squared, what flows back from ones is the sum of squares.
    dtypes = [accumulator(a.dtype) for a in x.values()]
    dtype = max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.dtype(jnp.float32))
    zeros = jnp.zeros(site.layout.matrix, dtype)
    square = lambda a: a * a if jnp.issubdtype(a.dtype, jnp.inexact) else a
    squared = jax.tree.map(square, x)
    outputs, backward = jax.vjp(lambda weight: site(weight, None, squared), zeros)
    return backward(jnp.ones_like(outputs))[0]


def _sum(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: functools.reduce(jnp.add, leaves), *trees)


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
