"""Running moments of a neuron's features, for solvers that hold M as a matrix."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from .._damping import Damping
from .._kernels import finite_or_zero
from .._metric import Gram, Moments, Theta
from .._moments import Average, judge, no_sizes
from .._neurons import Neuron
from .._packed import Halves, diagonal, halves, is_packed, pack


class Running(NamedTuple):
    """Running means over positions.

    Attributes:
      average: of x, [g, d] or None without a bias, and of x x^T, [g, d, d] packed or its diagonal
        [g, d].
      recent: how large the features of the latest batches were.
    """

    average: Average
    recent: Array

    @classmethod
    def empty(cls, neuron: Neuron, theta: Theta) -> "Running":
        blocks, inputs, _ = theta.weight.shape
        first = jnp.zeros((blocks, inputs), theta.weight.dtype)
        is_diagonal = neuron.kind == "lookup" or inputs == 1
        second = first if is_diagonal else pack(jnp.zeros((blocks, inputs, inputs), first.dtype))
        return cls(Average.empty((None if theta.bias is None else first, second)), no_sizes())

    @property
    def first(self) -> Array | None:
        return self.average.value[0]

    @property
    def is_diagonal(self) -> bool:
        return self.average.value[1].ndim == 2

    def absorb(self, batch: Gram | None, decay: ArrayLike) -> "Running":
        """With one more batch, of at least one position, unless not finite or an outlier."""
        assert batch is not None
        mean, square = self.average.value
        second, first, n = jax.tree.map(lambda x: x.astype(square.dtype), batch)
        if self.is_diagonal:
            second = second.reshape(square.shape)
        elif not is_packed(second):
            second = pack(second)
        finite = jnp.isfinite(jnp.sum(second))
        means = (None if mean is None else first, second)
        means = jax.tree.map(lambda x: finite_or_zero(x) / n, means)
        square = means[1] if self.is_diagonal else diagonal(means[1])
        size = jnp.sqrt(jnp.sum(square)).astype(self.recent.dtype)
        recent, factor, stale = judge(self.recent, size, self.average.size)
        means = jax.tree.map(lambda x: x * factor.astype(x.dtype) ** 2, means)
        average = self.average.absorb(means, decay, finite, finite & stale, factor * size)
        return Running(average, jnp.where(finite, recent, self.recent))

    def metric(self, kind: str, damping: Damping) -> Array | Halves:
        r"""What is left of M without the bias, or its diagonal.

        :math:`E[x x^T] + \gamma I`, with the bias eliminated :math:`\Sigma + \gamma I`.
        """
        mean, second = self.average.value
        square = second if self.is_diagonal else diagonal(second)
        gamma = damping.gamma(kind, Moments(mean, square), bias=mean is not None)
        if self.is_diagonal:
            return second + gamma if mean is None else second - mean**2 + gamma
        if not is_packed(second):
            return _centred(second, mean, mean) + _multiple_of_identity(gamma, second)
        a, b, d = halves(second)
        parts = (None, None) if mean is None else (mean[:, : len(a[0])], mean[:, len(a[0]) :])
        return Halves(
            _centred(a, parts[0], parts[0]) + _multiple_of_identity(gamma, a),
            _centred(b, parts[1], parts[0]),
            _centred(d, parts[1], parts[1]) + _multiple_of_identity(gamma, d),
        )


def _centred(second: Array, rows: Array | None, columns: Array | None) -> Array:
    """A part of the covariance, from the same part of E[x x^T] and the means of its inputs."""
    if rows is None or columns is None:
        return second
    return second - rows[:, :, None] * columns[:, None, :]


def _multiple_of_identity(gamma: Array, like: Array) -> Array:
    return gamma[..., None] * jnp.eye(like.shape[-1], dtype=like.dtype)[None]
