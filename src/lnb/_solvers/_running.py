"""Running moments of a neuron's features, for solvers that hold M as a matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .._damping import Damping
from .._metric import Moments, Theta, gram
from .._moments import Average
from .._neurons import Neuron
from .._packed import is_packed, pack, unpack


class Running(NamedTuple):
    """Running means over positions.

    Attributes:
      count: steps so far.
      missed: whether something was due in the last step, and there were no features.
      average: of x, [g, d] or None without a bias, and of x x^T, [g, d, d] packed or its diagonal
        [g, d].
    """

    count: Array
    missed: Array
    average: Average

    @classmethod
    def empty(cls, neuron: Neuron, theta: Theta) -> "Running":
        blocks, inputs, _ = theta.weight.shape
        first = jnp.zeros((blocks, inputs), theta.weight.dtype)
        diagonal = neuron.kind == "lookup" or inputs == 1
        second = first if diagonal else pack(jnp.zeros((blocks, inputs, inputs), first.dtype))
        average = Average.empty((None if theta.bias is None else first, second))
        return cls(jnp.zeros((), jnp.int32), jnp.zeros((), bool), average)

    @property
    def first(self) -> Array | None:
        return self.average.value[0]

    @property
    def is_diagonal(self) -> bool:
        return self.average.value[1].ndim == 2

    def due(self, neuron: Neuron, every: int) -> Array:
        """Whether the neuron has its turn: at every step at first, then more and more rarely.

        Neurons take turns, so that no step does the work of all of them.
        """
        interval = jnp.clip(1 + self.count // every, 1, every)
        return self.missed | ((self.count + neuron.turn) % interval == 0)

    def absorb(self, features: Any, decay: float) -> "Running":
        """With one more batch; one without positions changes nothing but the count."""
        batch = gram(features)
        assert batch is not None
        mean, square = self.average.value
        second, first, n = jax.tree.map(lambda x: x.astype(square.dtype), batch)
        if self.is_diagonal:
            second = second.reshape(square.shape)
        elif not is_packed(second):
            second = pack(second)
        means = (None if mean is None else first / n, second / n)
        average = self.average.absorb(means, decay, seen=n > 0)
        return Running(self.count + 1, n == 0, average)

    def metric(self, neuron: Neuron, damping: Damping) -> Array:
        r"""What is left of M without the bias, or its diagonal.

        :math:`E[x x^T] + \gamma I`, with the bias eliminated :math:`\Sigma + \gamma I`.
        """
        mean, second = self.average.value
        diagonal = self.is_diagonal
        second = second if diagonal else unpack(second)
        square = second if diagonal else jnp.diagonal(second, axis1=1, axis2=2)
        gamma = damping.gamma(neuron, Moments(mean, square), bias=mean is not None)
        if mean is not None:
            second = second - (mean**2 if diagonal else mean[:, :, None] * mean[:, None, :])
        if diagonal:
            return second + gamma
        return second + gamma[..., None] * jnp.eye(second.shape[-1], dtype=second.dtype)[None]
