"""Every choice by arithmetic: how many rows, which solver, who shares M, what a step costs."""

from collections.abc import Iterable, Sequence
from typing import Any

from ._features import Form, SiteRows
from ._neuron import Neuron

EVERY = 10  # steps from one refresh of a neuron's M to the next, by default
ROWS = 4  # positions for every input that are enough for M
FEW = 512  # positions that are all kept, however few inputs there are
MANY = 4096  # positions that are enough, where there are thousands of inputs
EXAMPLES = 16  # that these positions should come from, as those of one example are alike
LARGEST = 8192  # inputs of the largest M that is inverted
SMALL = 256  # the smaller side of a direction that is made orthogonal by default
CG_PRODUCTS = 3  # with M, in two steps of conjugate gradients


def thinned(sites: Sequence[Form], rows: str) -> tuple[Form, ...]:
    """The sites of a neuron, with as many of its positions as M needs: `rows` says how many."""
    if rows == "all":
        return tuple(sites)
    known = [site for site in sites if isinstance(site, SiteRows)]

    def thin(site: Form) -> Form:
        if not isinstance(site, SiteRows):
            return site
        a = site.arrangement
        if a.kind == "lookup" or a.examples is None:
            return site
        alike = [s.arrangement for s in known if s.layout == site.layout]
        enough = min(max(ROWS * a.inputs_count, FEW), max(a.inputs_count, MANY))
        enough *= 1 if a.experts is None else a.experts.count
        stride = sum(other.shape[1] for other in alike) // enough
        size = a.sizes[a.examples]
        longest = max(size // EXAMPLES, min(2, size // 4))  # half of a small batch will do
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


def holders(neurons: Iterable[Neuron]) -> dict[str, str]:
    """The neuron under whose name a neuron's M is held: the first of those fed the same rows."""
    first: dict[Any, str] = {}
    key = lambda n: (n.fed, n.bias is None) if n.has_matrix else n.name
    return {neuron.name: first.setdefault(key(neuron), neuron.name) for neuron in neurons}


def step_flops(neuron: Neuron, spectral: bool = False, shares: bool = False) -> float:
    """Of a neuron in one step with `lnb.Cholesky`, beyond backpropagation, averaged over refreshes.

    Args:
      neuron: the neuron.
      spectral: whether its direction is made orthogonal.
      shares: whether another neuron's M is also its own.
    """
    if neuron.kind == "identity":
        return 0.0
    blocks, inputs, outputs = neuron.layout.matrix
    size = float(blocks * inputs * outputs)
    if not is_inverted(neuron):  # products with M by its Gram matrix, or by rows: J^T (J v)
        product = min(4 * neuron.rows, 2 * neuron.d_in) if neuron.rows else 4 * neuron.n
        return neuron.gram_flops + CG_PRODUCTS * product * size
    is_diagonal, side = neuron.kind in {"lookup", "scale"}, min(inputs, outputs)
    # A factorisation and two triangular solves.
    inverse = 0.0 if is_diagonal else 7 / 3 * blocks * inputs**3
    refresh = 0.0 if shares else (neuron.gram_flops + inverse) / EVERY
    products = 2 if spectral and inputs < outputs else 1
    direction = size if is_diagonal else products * 2.0 * inputs * size
    # Eight products for the root, two to use it: see `_orthogonalize.newton_schulz`.
    root = 16.0 * blocks * side**3 + 4.0 * side * size if spectral else 0.0
    return refresh + direction + root


def backprop_flops(neuron: Neuron) -> float:
    """Of the forward and the backward pass."""
    blocks, inputs, outputs = neuron.layout.matrix
    return 6.0 * neuron.n * blocks * (1 if neuron.kind == "lookup" else inputs) * outputs
