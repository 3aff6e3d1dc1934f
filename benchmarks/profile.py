"""Where a boosted step's extra time goes, neuron by neuron."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import lnb
from lnb._backprop import Due, find_nodes
from lnb._cost import is_wide
from lnb._inverse import invert
from lnb._norms import Boosted as Part
from lnb._norms import orthogonal
from lnb._packed import halves, is_packed, pack
from lnb._parameters import split

from .contenders import Boosted
from .workloads import WORKLOADS

ROUNDS = 7


def profile(name: str, console: Console) -> None:
    """Prints the milliseconds a step of each neuron, on average over turns."""
    workload = WORKLOADS[name][0]()
    contender = Boosted(lnb.lnb)
    neurons = [n for n in contender.neurons(workload) if n.has_gram and n.kind != "identity"]
    statistics = statistics_seconds(workload, contender, neurons)
    thetas, _ = split(contender.neurons(workload), workload.params)
    solver = lnb.Cholesky()
    table = Table(
        *("neuron", "statistics", "inverse", "direction", "orthogonalize"),
        title=f"{name}: ms a step, statistics and inverse on average over turns",
        title_justify="left",
    )
    plain = f"{1e3 * statistics.pop(''):.1f}"
    totals = [0.0] * 4
    for neuron in neurons:
        theta = thetas[neuron.name]
        state = solver.init(neuron, theta)
        shared = neuron.gram != neuron.name  # its statistics and inverse are another's
        inverse = 0.0 if shared else seconds(invert, _as_metric(state.matrix))
        spectral = solver.factored() if is_wide(neuron) else solver
        row = (
            0.0 if shared else statistics[neuron.name] / solver.every,
            inverse / solver.every,
            seconds(lambda g, inverse: inverse.solve(g), theta, solver.inverse(neuron, state)),
            seconds(_orthogonalize, theta, theta, spectral.inverse(neuron, state)),
        )
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        table.add_row(neuron.name, *(f"{1e3 * x:.2f}" for x in row))
    table.add_section()
    table.add_row("all", *(f"{1e3 * x:.2f}" for x in totals))
    console.print(table)
    console.print(
        f"Backpropagation alone: {plain} ms. Orthogonalization is done only for those neurons that "
        'the norm asks for ("spectral": all; "auto": where it takes at most three '
        "quarters of backpropagation's flops).\n"
    )


def statistics_seconds(
    workload: Any, contender: Boosted, neurons: Sequence[lnb.Neuron]
) -> dict[str, float]:
    """What each neuron's moments add to backpropagation; under the name '', that by itself.

    One program, with only the flags of whose turn it is changed; the differences of medians.
    """
    everything = contender.neurons(workload)
    state = contender.init(workload)
    (due,) = find_nodes(state, Due)

    @jax.jit
    def run(params: Any, flags: Any, args: Any) -> Any:
        return lnb.backprop(workload.loss_fn, everything, opt_state=Due(flags))(params, *args)

    names = ["", *(n.name for n in neurons if n.gram == n.name)]
    turns = {n.name: n.turn for n in everything}
    flags = {
        name: {key: jnp.asarray(turns[key] == turns.get(name)) for key in due.flags}
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS + 1):
        for name in names:
            start = time.perf_counter()
            jax.block_until_ready(run(workload.params, flags[name], workload.args))
            times[name].append(time.perf_counter() - start)
    alone = median(times[""][1:])
    added = {name: max(0.0, median(t[1:]) - alone) for name, t in times.items() if name}
    return {"": alone, **added}


def _orthogonalize(gradient: Any, direction: Any, inverse: Any) -> Any:
    one = jnp.ones(())
    part = Part(gradient, direction, 1, inverse, orthogonalized=True)
    return orthogonal([part], [one], [one])


def _as_metric(matrix: jax.Array) -> Any:
    """A matrix in the form in which a solver holds it."""
    if matrix.ndim == 2:
        return matrix
    packed = pack(matrix)
    return halves(packed) if is_packed(packed) else packed


def seconds(function: Callable, *args: Any) -> float:
    """The median time of a compiled call."""
    program = jax.jit(function)
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return median(times)
