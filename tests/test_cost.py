"""What a boosted step costs beside Adam's: XLA's counts, which do not move with the machine."""

from functools import cache
from itertools import pairwise
from typing import Any

import jax
import pytest

from benchmarks.contenders import ADAM, CONTENDERS, NEURON, Boosted
from benchmarks.counts import compiled, flops, peak_bytes
from benchmarks.steps import Cost, Ratios
from benchmarks.workloads import WORKLOADS, Workload

COUNTED = (
    "MLP 784-800-800-10",
    "ViT, width 96",
    "transformer LM, scan + remat",
    "UNet 96 x 96",
)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's own optimizers rely on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@cache
def make(workload: str) -> Workload:
    return WORKLOADS[workload][0]()


@cache
def compile_step(workload: str, optimizer: str) -> Any:
    contender, made = CONTENDERS[optimizer], make(workload)
    return compiled(contender.step(made), (made.params, contender.init(made), *made.args))


@cache
def cost(workload: str, optimizer: str) -> Cost:
    program = compile_step(workload, optimizer)
    counted = flops(CONTENDERS[optimizer], make(workload), program)
    return Cost(workload, optimizer, [], counted, peak_bytes(program), compile_seconds=1.0)


@pytest.mark.parametrize("workload", COUNTED)
def test_counts(workload):
    adam, boosted = cost(workload, ADAM), cost(workload, NEURON)
    # Releases of XLA differ by a few percent.
    assert Ratios.of(boosted, adam).memory <= 1.05 * WORKLOADS[workload][1].memory
    # What the table of neurons predicts, beside what XLA counts more than for Adam.
    contender = CONTENDERS[NEURON]
    assert isinstance(contender, Boosted)
    predicted = sum(contender.neurons(make(workload)).costs(norm="neuron").values())
    # Small costs are within 1% of a step: XLA also counts what it computes twice.
    counted = boosted.flops - adam.flops
    assert predicted == pytest.approx(counted, rel=0.25, abs=0.01 * adam.flops)


def test_flops_of_a_product():
    """Backpropagation by hand: the first layer needs no gradient of its input."""
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
