"""What a boosted step costs beyond backpropagation, in floating-point operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ._inverse import invert_flops
from ._orthogonalize import newton_schulz_flops

if TYPE_CHECKING:
    from ._neurons import Neuron

EVERY = 10  # steps from one turn of a neuron to the next, by default
CG_PRODUCTS = 3  # with M, in two steps of conjugate gradients
SMALL = 256  # the smaller side of a direction that is made orthogonal by default


class Cost(NamedTuple):
    """The flops of one neuron in one step, on average over turns.

    Attributes:
      statistics: of its second moment.
      inverse: of inverting that.
      direction: of the products with the inverse.
      orthogonalize: of `norm="spectral"`.
    """

    statistics: float
    inverse: float
    direction: float
    orthogonalize: float

    @property
    def total(self) -> float:
        return sum(self)


def predict(neuron: Neuron, spectral: bool = False) -> Cost:
    """The cost of a neuron with `lnb.Cholesky`, or of one that this leaves to `lnb.CG`."""
    if neuron.kind == "identity":
        return Cost(0.0, 0.0, 0.0, 0.0)
    blocks, inputs, outputs = _sizes(neuron)
    if not neuron.has_gram:
        return Cost(neuron.moment_flops, 0.0, CG_PRODUCTS * neuron.product_flops, 0.0)
    orthogonalize = orthogonalize_flops(neuron) if spectral else 0.0
    products = 2 if spectral and is_wide(neuron) else 1  # with L^-1 and L^-T, or with M^-1
    statistics = neuron.moment_flops / neuron.stride / EVERY
    if neuron.kind in {"lookup", "scale"}:
        return Cost(statistics, 0.0, products * blocks * inputs * outputs, orthogonalize)
    inverse = blocks * invert_flops(inputs) / EVERY if neuron.gram == neuron.name else 0.0
    return Cost(statistics, inverse, products * 2.0 * blocks * inputs**2 * outputs, orthogonalize)


def backprop_flops(neuron: Neuron) -> float:
    """Of the forward and the backward pass."""
    blocks, inputs, outputs = _sizes(neuron)
    return 6.0 * neuron.n * blocks * (1 if neuron.kind == "lookup" else inputs) * outputs


def orthogonalize_flops(neuron: Neuron) -> float:
    """Of a root of the size of the direction's smaller side, and of two products for it."""
    blocks, inputs, outputs = _sizes(neuron)
    side = min(inputs, outputs)
    return blocks * (4.0 * inputs * outputs * side + newton_schulz_flops(side))


def is_orthogonalized(neuron: Neuron) -> bool:
    """Whether `norm="auto"` means `"spectral"` for a neuron: if its smaller side is small.

    By its shape alone, so that a step is the same however its batch is cut into smaller ones.
    """
    return neuron.has_gram and min(neuron.layout.inputs, neuron.layout.outputs) <= SMALL


def is_wide(neuron: Neuron) -> bool:
    """Whether its gradient has more columns than rows."""
    return neuron.layout.inputs < neuron.layout.outputs


def _sizes(neuron: Neuron) -> tuple[int, int, int]:
    return neuron.layout.blocks, neuron.layout.inputs, neuron.layout.outputs
