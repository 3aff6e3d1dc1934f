"""What a boosted step costs beside Adam's: XLA's counts, which do not move with the machine."""

from functools import cache
from itertools import pairwise

import jax
import pytest

from benchmarks.contenders import ADAM, CONTENDERS, NEURON, Boosted
from benchmarks.counts import compiled, flops, peak_bytes
from benchmarks.steps import Cost, Ratios
from benchmarks.workloads import WORKLOADS, Workload
from lnb._cost import predict

# Each with the memory that it takes, in units of Adam's.
PINNED = {
    "MLP 784-800-800-10": 1.60,
    "autoencoder": 1.60,
    "ViT, width 96": 1.20,
    "transformer LM, scan + remat": 1.25,
}


@cache
def make(workload: str) -> Workload:
    return WORKLOADS[workload][0]()


@cache
def cost(workload: str, optimizer: str) -> Cost:
    contender, made = CONTENDERS[optimizer], make(workload)
    program = compiled(contender.step(made), (made.params, contender.init(made), *made.args))
    counted = flops(contender, made, program)
    return Cost(workload, optimizer, [], counted, peak_bytes(program), compile_seconds=1.0)


@pytest.mark.parametrize("workload", PINNED)
def test_ratios_to_adam(workload):
    ratios = Ratios.of(cost(workload, NEURON), cost(workload, ADAM))
    target = WORKLOADS[workload][1]
    assert 1 < ratios.flops <= target.flops
    assert 1 < ratios.memory <= PINNED[workload]


@pytest.mark.parametrize("workload", PINNED)
def test_prediction(workload):
    """The predicted cost of all neurons, beside what XLA counts more than for Adam."""
    contender = CONTENDERS[NEURON]
    assert isinstance(contender, Boosted)
    predicted = sum(predict(neuron).total for neuron in contender.neurons(make(workload)))
    counted = cost(workload, NEURON).flops - cost(workload, ADAM).flops
    assert predicted == pytest.approx(counted, rel=0.25)


def test_flops_of_a_product():
    """Backpropagation through two layers, by hand: the first needs no gradient of its input."""
    n, widths = 1000, (784, 800, 800, 10)
    first, *others = [2 * n * a * b for a, b in pairwise(widths)]
    by_hand = 2 * first + 3 * sum(others)
    assert cost("MLP 784-800-800-10", ADAM).flops == pytest.approx(by_hand, rel=0.02)


def test_flops_of_a_factorisation():
    """XLA counts neither this nor triangular solves."""
    from benchmarks.counts import _uncounted

    def solve(matrix, right):
        factor = jax.lax.linalg.cholesky(matrix)
        return jax.lax.linalg.triangular_solve(factor, right, left_side=True, lower=True)

    shapes = [jax.ShapeDtypeStruct((3, 60, n), "float32") for n in (60, 7)]
    program = jax.jit(solve).lower(*shapes).compile()
    assert _uncounted(program) == pytest.approx(3 * (60**3 / 3 + 60**2 * 7))
