"""The linear system of a neuron, for solvers that ask for products only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .._inverse import preconditioner
from .._metric import Damping, Features, Moments, Theta, damped_product, damping_constant
from .._neurons import Neuron


class System(NamedTuple):
    r"""Two functions from parameters to parameters.

    Attributes:
      product: :math:`\theta \mapsto (M + \gamma I) \theta`, with the M of one batch.
      precondition: the paper's P, which is about the inverse of that.
    """

    product: Callable[[Theta], Theta]
    precondition: Callable[[Theta], Theta]

    @classmethod
    def of(
        cls,
        neuron: Neuron,
        features: Features,
        moments: Moments,
        damping: Damping,
        in_p: Damping,
        shrinkage: float = 0.0,
    ) -> System:
        """Algorithm 2, lines 8 and 9; `in_p` is the damping that P has."""
        bias = neuron.bias is not None and neuron.has_matrix  # otherwise there is no mean
        gamma = damping_constant(damping, neuron.kind, moments, bias)
        return cls(
            damped_product(features, gamma, neuron.layout, neuron.bias_layout),
            preconditioner(neuron.kind, moments, bias, shrinkage, in_p).solve,
        )
