"""`python -m benchmarks`, which is also `lnb bench`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from lnb_experiments.data import DataError, Source

from . import convergence, growth, steps
from .contenders import ADAM, CONTENDERS
from .workloads import WORKLOADS

CHARTS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Bench:
    """What a step of LNB costs beside Adam's, with the targets, on six networks.

    Times are medians over blocks of ten steps that optimizers take in turns, as ratios to Adam's in
    the same block. Flops and memory are XLA's counts and do not depend on the machine's mood.
    """

    mode: Literal["steps", "growth", "convergence"] = "steps"
    """The cost of a step; how it grows with width, depth and batch; whether cheap statistics cost
    convergence (needs MNIST and CIFAR-10)."""
    workload: tuple[str, ...] = ()
    """Only these; parts of names will do. Of --mode growth: none."""
    optimizer: tuple[str, ...] = ()
    """Only these, and Adam (not of --mode growth). Of --mode convergence: only these norms."""
    blocks: int = 5
    """Blocks of ten steps of each optimizer; 0: no times."""
    seeds: int = 1
    """Of --mode convergence."""
    data_dir: Path | None = None
    """Of --mode convergence: folder of the official files; by default $LNB_DATA."""
    json: Path | None = None
    """Write all numbers to this file."""
    chart: Path | None = None
    """Draw a chart to this file (steps: bars; growth: curves)."""

    def __call__(self, console: Console) -> None:
        if self.chart and self.chart.suffix not in CHARTS:
            raise SystemExit(
                f"bench: --chart {self.chart} should end in one of {', '.join(CHARTS)}."
            )
        if self.mode == "convergence":
            return self._converge(console)
        if self.mode == "growth" and (self.workload or self.optimizer):
            raise SystemExit(
                "bench: --mode growth measures Adam and LNB on networks of its own: leave "
                "--workload and --optimizer out."
            )
        workloads = _known("workload", self.workload, WORKLOADS)
        optimizers = _known("optimizer", self.optimizer, CONTENDERS)
        if self.mode == "steps":
            optimizers = list(dict.fromkeys([ADAM, *optimizers]))
            costs = []
            for workload in workloads:
                costs += steps.measure(workload, optimizers, self.blocks, console)
                steps.print_table(costs, workload, console)
                self._write(steps.to_json(costs, self.blocks))
            if self.chart:
                steps.draw(costs, self.chart)
        else:
            points = growth.grow(max(1, self.blocks), console)
            growth.print_points(points, console)
            self._write([point._asdict() for point in points])
            if self.chart:
                growth.draw(points, self.chart)

    def _converge(self, console: Console) -> None:
        """Here workloads are experiments, and optimizers norms."""
        cases = {" ".join(case): case for case in convergence.CASES}
        names = set(_known("experiment", self.workload, cases))
        names &= set(_known("norm", self.optimizer, cases))
        source = Source("real", str(self.data_dir) if self.data_dir else None)
        chosen = [case for name, case in cases.items() if name in names]
        runs = convergence.converge(chosen, self.seeds, source, console)
        convergence.print_losses(runs, console)
        self._write([asdict(run) for run in runs])

    def _write(self, content: Any) -> None:
        if self.json:
            self.json.write_text(json.dumps(content, indent=1) + "\n")


def _known(what: str, names: tuple[str, ...], known: dict[str, Any]) -> list[str]:
    """The names asked for, or all; a part of a name will do."""
    chosen = []
    for name in names or known:
        found = [key for key in known if name.lower() in key.lower()]
        if not found:
            raise SystemExit(f"bench: no {what} is called {name!r}. There are: {'; '.join(known)}.")
        chosen += found if name not in known else [name]
    return list(dict.fromkeys(chosen))


def main(prog: str = "python -m benchmarks") -> None:
    bench = tyro.cli(Bench, prog=prog)
    try:
        bench(Console())
    except DataError as error:
        raise SystemExit(f"bench: {error}") from None
