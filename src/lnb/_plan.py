"""Every choice that is made by arithmetic: how many rows, which solver, what a step will cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ._features import SiteRows

if TYPE_CHECKING:
    from ._neurons import Neuron

EVERY = 10  # steps from one refresh of a neuron's M to the next, by default
ROWS = 4  # positions for every input that are enough for M
FEW = 512  # positions that are all kept, however few inputs there are
MANY = 4096  # positions that are enough, where there are thousands of inputs
EXAMPLES = 4  # the fewest examples that these positions may come from
LARGEST = 8192  # inputs of the largest M that is inverted
SMALL = 256  # the smaller side of a direction that is made orthogonal by default
CG_PRODUCTS = 3  # with M, in two steps of conjugate gradients


def thinned(sites: Sequence[SiteRows], rows: str) -> tuple[SiteRows, ...]:
    """The sites of a neuron, with as many of its positions as M needs: `rows` says how many."""
    if rows == "all":
        return tuple(sites)

    def thin(site: SiteRows) -> SiteRows:
        a = site.arrangement
        if a.kind == "lookup" or a.examples is None:
            return site
        alike = [s.arrangement for s in sites if s.layout == site.layout]
        enough = min(max(ROWS * a.inputs_count, FEW), max(a.inputs_count, MANY))
        enough *= 1 if a.experts is None else a.experts.count
        stride = sum(other.shape[1] for other in alike) // enough
        longest = a.sizes[a.examples] // EXAMPLES
        return site._replace(arrangement=a.thinned(max(1, min(stride, longest))))

    return tuple(map(thin, sites))


def is_inverted(neuron: Neuron) -> bool:
    """Whether M is held as a matrix and its inverse; if not, there are products with M only."""
    return neuron.has_matrix and (neuron.kind == "lookup" or neuron.layout.matrix[1] <= LARGEST)


def is_orthogonalized(neuron: Neuron) -> bool:
    """Whether `norm="auto"` means `"spectral"` for a neuron: if its smaller side is small.

    By its shape alone, so that a step is the same however its batch is cut into smaller ones.
    """
    return is_inverted(neuron) and min(neuron.layout.matrix[1:]) <= SMALL


class Cost(NamedTuple):
    """The flops of one neuron in one step, beyond backpropagation, on average over refreshes.

    Attributes:
      gram: of its Gram matrix.
      inverse: of inverting that.
      direction: of the products with the inverse, or with M.
      orthogonalize: of `norm="spectral"`.
    """

    gram: float = 0.0
    inverse: float = 0.0
    direction: float = 0.0
    orthogonalize: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


def predict(neuron: Neuron, spectral: bool = False, shares: bool = False) -> Cost:
    """The cost of a neuron with `lnb.Cholesky`; `shares` says that another one's M is also its."""
    if neuron.kind == "identity":
        return Cost()
    blocks, inputs, outputs = neuron.layout.matrix
    if not is_inverted(neuron):
        return Cost(gram=neuron.gram_flops, direction=CG_PRODUCTS * neuron.product_flops)
    side = min(inputs, outputs)
    # Eight products for the root, two to use it: see `_norms.newton_schulz`.
    root = blocks * (16.0 * side**3 + 4.0 * inputs * outputs * side) if spectral else 0.0
    gram = 0.0 if shares else neuron.gram_flops / EVERY
    if neuron.kind in {"lookup", "scale"}:
        return Cost(gram, 0.0, blocks * inputs * outputs, root)
    inverse = 0.0 if shares else blocks * invert_flops(inputs) / EVERY
    products = 2 if spectral and inputs < outputs else 1
    return Cost(gram, inverse, products * 2.0 * blocks * inputs**2 * outputs, root)


def invert_flops(size: int) -> float:
    """Of a factorisation, a triangular solve and a product."""
    return 10 / 3 * size**3


def backprop_flops(neuron: Neuron) -> float:
    """Of the forward and the backward pass."""
    blocks, inputs, outputs = neuron.layout.matrix
    return 6.0 * neuron.n * blocks * (1 if neuron.kind == "lookup" else inputs) * outputs


def gram_flops(sites: Sequence[SiteRows]) -> float:
    return sum(site.arrangement.flops() for site in sites)


def product_flops(sites: Sequence[SiteRows] | None, n: int, size: int) -> float:
    """Of a product with M: by Gram matrices, or through the program of a site."""
    if sites is None:
        return 4.0 * n * size
    product = lambda blocks, inputs, outputs: 2.0 * blocks * inputs * outputs * inputs
    return sum(
        float(math.prod(site.layout.matrix))
        if site.arrangement.kind in {"lookup", "scale"}
        else product(*site.layout.matrix)
        for site in sites
    )
