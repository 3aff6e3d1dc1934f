"""The cost of a step: time, flops, memory and compilation, as ratios to Adam's."""

import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from lnb_experiments.folder import environment

from .contenders import ADAM, CONTENDERS, NEURON
from .counts import compiled, flops, peak_bytes
from .workloads import WORKLOADS, Target, Workload

STEPS = 10  # of a block: from one refresh of a neuron's M to the next
COMPILATIONS = 3  # of which the fastest counts


@dataclass(frozen=True)
class Cost:
    """What one optimizer's step costs on one workload.

    Attributes:
      seconds: of a step, on average over a block; one number a block.
      compile_seconds: of tracing and compiling the step, from Python to a program that runs.
    """

    workload: str
    optimizer: str
    seconds: list[float]
    flops: float
    peak_bytes: int
    compile_seconds: float


class Runner:
    """A compiled step and its state, which it takes steps from."""

    def __init__(self, name: str, workload: Workload):
        contender = CONTENDERS[name]
        # Buffers of its own, as they are donated.
        self.state: Any = jax.tree.map(
            lambda x: x.copy() if isinstance(x, jax.Array) else x,
            (workload.params, contender.init(workload)),
        )
        self.args = workload.args
        self.step = contender.step(workload)
        self.compile_seconds = math.inf
        self.program = self.compile()
        self.seconds()  # a program's first call is slower

    def compile(self) -> Any:
        """Compiles the step, as if for the first time, and notes how long that took at best."""
        step = lambda *args: self.step(*args)  # which no cache knows
        jax.clear_caches()
        start = time.perf_counter()
        program = compiled(step, (*self.state, *self.args))
        self.compile_seconds = min(self.compile_seconds, time.perf_counter() - start)
        return program

    def seconds(self) -> float:
        """Takes a step; its time."""
        start = time.perf_counter()
        self.state = jax.block_until_ready(self.program(*self.state, *self.args))
        return time.perf_counter() - start


def interleaved(runners: dict[str, Runner], blocks: int) -> dict[str, list[float]]:
    """The mean time of a step in each block.

    Runners take turns step by step, in random order: who comes after a step that has filled the
    caches is slower.
    """
    order, rng = list(runners), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(blocks):
        total = dict.fromkeys(runners, 0.0)
        for _ in range(STEPS):
            rng.shuffle(order)
            for name in order:
                total[name] += runners[name].seconds()
        for name, seconds in total.items():
            times[name].append(seconds / STEPS)
    return times


def measure(name: str, optimizers: Sequence[str], blocks: int, console: Console) -> list[Cost]:
    """Costs on one workload; without blocks, no times."""
    workload = WORKLOADS[name][0]()
    console.print(f"{name} ...", style="dim")
    runners = {optimizer: Runner(optimizer, workload) for optimizer in optimizers}
    for _ in range(COMPILATIONS - 1):  # in turns, as the machine may be busier at times
        for runner in runners.values():
            runner.compile()
    times = interleaved(runners, blocks)
    return [
        Cost(
            name,
            optimizer,
            times[optimizer],
            flops(CONTENDERS[optimizer], workload, runner.program),
            peak_bytes(runner.program),
            runner.compile_seconds,
        )
        for optimizer, runner in runners.items()
    ]


@dataclass(frozen=True)
class Ratios:
    """A cost in units of Adam's; `None` where it was not measured."""

    time: float | None
    flops: float
    memory: float
    compile: float

    @classmethod
    def of(cls, cost: Cost, adam: Cost) -> "Ratios":
        pairs = list(zip(cost.seconds, adam.seconds, strict=True))
        return cls(
            median(own / adams for own, adams in pairs) if pairs else None,
            cost.flops / adam.flops,
            cost.peak_bytes / adam.peak_bytes,
            cost.compile_seconds / adam.compile_seconds,
        )


HEAD = ("optimizer", "ms a step", "time", "flops", "memory", "compile")


def rows(costs: Sequence[Cost], workload: str) -> list[tuple[str, ...]]:
    """Ratios, with the targets below the form of LNB that they are for."""
    own = {cost.optimizer: cost for cost in costs if cost.workload == workload}
    target = WORKLOADS[workload][1]
    found = []
    for optimizer, cost in own.items():
        ratios = Ratios.of(cost, own[ADAM])
        milliseconds = f"{1e3 * median(cost.seconds):.1f}" if cost.seconds else "-"
        numbers = (ratios.time, ratios.flops, ratios.memory, ratios.compile)
        texts = ("-" if x is None else f"{x:.2f}" for x in numbers)
        found.append((optimizer, milliseconds, *texts))
        if optimizer == NEURON:
            found.append(
                ("  its targets", "", f"{target.time:.2f}", "", f"{target.memory:.2f}", "")
            )
    return found


def print_table(costs: Sequence[Cost], workload: str, console: Console) -> None:
    table = Table(title=f"{workload}: in units of Adam's", title_justify="left")
    for column in HEAD:
        table.add_column(column, no_wrap=True)
    for row in rows(costs, workload):
        table.add_row(*row)
    console.print(table)


def draw(costs: Sequence[Cost], path: Any) -> None:
    """Bars: time and memory of each optimizer on each workload, and LNB's targets."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(cost.workload for cost in costs))
    optimizers = [o for o in dict.fromkeys(cost.optimizer for cost in costs) if o != ADAM]
    found = {(cost.workload, cost.optimizer): cost for cost in costs}
    figure, panels = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, layout="constrained")
    width = 0.8 / len(optimizers)
    for panel, quantity in zip(panels, Target._fields, strict=True):
        for i, optimizer in enumerate(optimizers):
            ratios = [
                getattr(Ratios.of(found[w, optimizer], found[w, ADAM]), quantity) or 0.0
                for w in workloads
            ]
            places = [x + (i - (len(optimizers) - 1) / 2) * width for x in range(len(workloads))]
            panel.bar(places, ratios, width, label=optimizer)
        for x, workload in enumerate(workloads):
            goal = getattr(WORKLOADS[workload][1], quantity)
            label = f"target of {NEURON}" if x == 0 else None
            panel.hlines(goal, x - 0.45, x + 0.45, "black", linestyles="dashed", label=label)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_yscale("log")
        panel.set_yticks([1, 1.5, 2, 4, 8], ["1", "1.5", "2", "4", "8"])
        panel.minorticks_off()
        panel.set_ylabel(f"{quantity}, x Adam's")
    panels[0].legend(fontsize=7, ncols=2)
    panels[-1].set_xticks(range(len(workloads)), workloads, rotation=15, ha="right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def to_json(costs: Sequence[Cost], blocks: int) -> dict[str, Any]:
    return {
        "environment": environment(),
        "steps_of_a_block": STEPS,
        "blocks": blocks,
        "costs": [asdict(cost) for cost in costs],
    }
