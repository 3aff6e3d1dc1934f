"""The commands: run, sweep, arena, report, list."""

import logging
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg, subcommand

from .arena import Arena, report_arena
from .data import DataError, Source
from .experiment import Experiment
from .experiments import EXPERIMENTS
from .folder import RunError
from .method import MethodError
from .optimizers import (
    NORMS,
    OPTIMIZERS,
    SOLVERS,
    check_optimizer,
    rate_range,
    search_rates,
    with_settings,
)
from .records import RecordError
from .report import report
from .runner import Runner
from .sweep import sweep
from .training import Plan

NAMES = tyro.extras.literal_type_from_choices(list(EXPERIMENTS))


NOTES = (
    "Presets: `tiny` takes seconds on anything, `arena` half a minute on one CPU core, `laptop` "
    "minutes on two, `paper` is the paper's own size, for a GPU. Real data is looked for in "
    "--data-dir, then in $LNB_DATA, then downloaded; --data synthetic needs none. `lnb:cg`, "
    "`lnb:neuron` or `lnb:cg:neuron` name a solver (%s), a norm (%s) or both."
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `run` and `sweep` have in common."""

    experiment: Positional[Annotated[str, arg(constructor=NAMES)]]
    """See `lnb list`."""
    preset: Literal["laptop", "arena", "paper", "tiny"] = "laptop"
    """Sizes: minutes on two CPU cores; half a minute on one; the paper's own, for a GPU; seconds,
    to try things out."""
    optimizer: tuple[str, ...] = ()
    """See `lnb list`; by default those that the experiment compares."""
    steps: int | None = None
    """Number of training steps, instead of the preset's."""
    batch_size: int | None = None
    """Examples a step, instead of the preset's."""
    evaluate_every: int | None = None
    """Steps between two evaluations, instead of the preset's."""
    depth: int | None = None
    """mnist: number of layers, instead of 2."""
    inverted: bool = False
    """mnist: train and test on 1 - x."""
    text: Path | None = None
    """char-lm: the text file to learn."""
    damping: float | None = None
    """lnb, algorithm1, algorithm2: instead of their own."""
    clip: float | None = None
    """lnb, algorithm1, algorithm2: gradients are clipped to this norm."""
    data: Literal["real", "synthetic"] = "real"
    """The real data, or a seeded stand-in that needs no files."""
    data_dir: Path | None = None
    """Folder of the official files; by default $LNB_DATA, then a download."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning rate: as given, or with a linear warm-up and half a cosine down to zero."""
    out: Path = Path("runs")
    """Folder of all runs."""
    resume: bool = False
    """Go on with the runs that are there."""
    checkpoint_seconds: float = 30.0
    """Time between two checkpoints of a run."""

    def runner(self, console: Console) -> Runner:
        return Runner(self.out, self.resume, self.checkpoint_seconds, console)

    def plans(self) -> Iterator[Plan]:
        """One for each optimizer, at its default learning rate."""
        experiment = self._experiment()
        source = Source(self.data, str(self.data_dir) if self.data_dir else None)
        for name, value in {"damping": self.damping, "clip": self.clip}.items():
            if value is not None and not 0 < value < math.inf:
                raise RunError(f"--{name} should be positive and finite, not {value}.")
        names = [
            with_settings(name, damping=self.damping, clip=self.clip)
            for name in dict.fromkeys(self.optimizer or experiment.optimizers)
        ]
        for name in names:
            check_optimizer(name)
        for name in names:
            (rate,) = search_rates(rate_range(experiment, name), 1)
            yield Plan(experiment, self.preset, name, rate, schedule=self.schedule, source=source)

    def _experiment(self) -> Experiment:
        kind = EXPERIMENTS[self.experiment]
        common = "steps", "batch_size", "evaluate_every"
        special = {"depth": self.depth, "inverted": self.inverted, "text": self.text}
        changes: dict[str, Any] = {name: getattr(self, name) for name in common}
        for name, value in special.items():
            if value not in (None, False) and name not in kind.options:
                owner = next(e.name for e in EXPERIMENTS.values() if name in e.options)
                raise RunError(f"--{name} is an option of {owner}, not of {kind.name}.")
            changes[name] = str(value) if isinstance(value, Path) else value
        changes = {k: v for k, v in changes.items() if v is not None and v is not False}
        for name, value in changes.items():
            if type(value) is int and value < 1:
                raise RunError(f"--{name.replace('_', '-')} should be at least 1, not {value}.")
        if self.text and self.data == "synthetic":
            raise RunError("--text is real data: leave --data synthetic out.")
        return kind.preset(self.preset, **changes)


@dataclass(frozen=True, kw_only=True)
class Run(Options):
    """Train with one or several optimizers, at one or several learning rates."""

    seeds: int = 1
    """How many seeds: 0, 1, and so on."""
    held_out: bool = False
    """Train and test as a sweep's trials do, without the test data: to choose settings by."""
    learning_rate: tuple[float, ...] = ()
    """Learning rates, instead of the middle of each optimizer's range."""

    def __call__(self, console: Console) -> None:
        if self.seeds < 1:
            raise RunError(f"--seeds should be at least 1, not {self.seeds}.")
        for rate in self.learning_rate:
            if not 0 < rate < math.inf:
                raise RunError(f"--learning-rate should be positive and finite, not {rate}.")
        runner = self.runner(console)
        runner.run(
            replace(plan, learning_rate=rate, seed=seed, role="trial" if self.held_out else "run")
            for plan in self.plans()
            for rate in self.learning_rate or (plan.learning_rate,)
            for seed in range(self.seeds)
        )
        if not self.learning_rate:
            console.print(
                "Each optimizer had the middle of its range of learning rates, which may be far "
                "from its best: `lnb sweep` searches."
            )
        console.print(f"Done. Figures and tables: lnb report {self.out}")


@dataclass(frozen=True, kw_only=True)
class Sweep(Options):
    """Search learning rates with equal trials for all, then rerun each winner on fresh seeds."""

    trials: int | None = None
    """Trials of every optimizer, over its range of learning rates, instead of the experiment's."""
    seeds: int = 3
    """How many fresh seeds the winner is rerun with."""
    judge: Literal["headline", "loss"] = "headline"
    """What chooses the winner on held-out data: the experiment's own metric, or the loss."""

    def __call__(self, console: Console) -> None:
        if self.seeds < 1:
            raise RunError(f"--seeds should be at least 1, not {self.seeds}.")
        if self.trials is not None and self.trials < 2:
            raise RunError(f"--trials should be at least 2, not {self.trials}.")
        runner = self.runner(console)
        for plan in self.plans():
            judge = None if self.judge == "headline" else self.judge
            sweep(runner, plan, self.trials or plan.experiment.trials, self.seeds, judge)
        console.print(f"Done. Figures and tables: lnb report {self.out}")


@dataclass(frozen=True)
class Report:
    """Draw the figures and tables of all runs in a folder: PNG, Markdown, one HTML page."""

    folder: Positional[Path]
    """What --out was."""
    out: Path | None = None
    """Where to write; by default FOLDER/report."""

    arena: bool = False
    """As an arena: by the time to AdamW's loss."""
    known: Path | None = None
    """With --arena: an earlier report, whose runs are reported too."""

    def __call__(self, console: Console) -> None:
        if self.known and not self.arena:
            raise RunError("--known goes with --arena.")
        if self.arena:
            written = report_arena(self.folder, self.out, self.known)
        else:
            written = report(self.folder, self.out)
        console.print(f"Written: {written}")


@dataclass(frozen=True)
class List:
    """Show the experiments, optimizers and presets, and what each needs."""

    verbose: bool = False
    """Say where each optimizer's settings come from."""

    def __call__(self, console: Console) -> None:
        for name, kind in EXPERIMENTS.items():
            console.print(f"[bold]{name}[/bold]: {kind.summary}")
            console.print(f"  data: {kind.dataset}")
            console.print(f"  compares: {', '.join(kind.optimizers)}")
            for preset in kind.presets:
                sizes = kind.preset(preset)
                console.print(f"  {preset}: {sizes.steps:,} steps of {sizes.batch_size:,} examples")
            if kind.rates:
                ranges = [f"{name} {low:g} to {high:g}" for name, (low, high) in kind.rates.items()]
                console.print(f"  learning rates of its own: {', '.join(ranges)}")
        table = Table("optimizer", "what", "learning rates", title="Optimizers")
        for name, optimizer in OPTIMIZERS.items():
            if {":", "+"} & {*name}:
                continue
            low, high = optimizer.rates
            table.add_row(name, optimizer.summary, f"{low:g} to {high:g}")
        console.print(table)
        for name, optimizer in OPTIMIZERS.items():
            if self.verbose and optimizer.advice:
                console.print(f"[bold]{name}[/bold]: {optimizer.advice}", highlight=False)
        console.print(NOTES % (", ".join(SOLVERS), ", ".join(NORMS)))


Command = (
    Annotated[Run, subcommand("run")]
    | Annotated[Sweep, subcommand("sweep")]
    | Annotated[Arena, subcommand("arena")]
    | Annotated[Report, subcommand("report")]
    | Annotated[List, subcommand("list")]
)


def main() -> None:
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every checkpoint
    command = tyro.cli(
        Command,
        prog="lnb",
        description="The experiments of Linear Neuron Boosting; `lnb bench`: what a step costs.",
    )
    console = Console()
    try:
        command(console)
    except (DataError, MethodError, RecordError, RunError) as error:
        sys.exit(f"lnb: {error}")
    except KeyboardInterrupt:
        same = "The same command" + ("" if isinstance(command, Arena) else " with --resume")
        sys.exit(f"lnb: stopped. {same} goes on from the last checkpoint.")
