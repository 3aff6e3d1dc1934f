"""Runs plans one after the other, with what they share loaded and compiled once."""

from collections.abc import Iterable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .data import Data, Source
from .experiment import Experiment
from .folder import RunFolder
from .training import Plan, Programs, compile_programs, train


def run_folder(out: Path, plan: Plan) -> RunFolder:
    """Where a plan's run lives: the configuration can be read off the path."""
    rate = f"lr-{plan.learning_rate:g}" + (f"-decay-{plan.decay:g}" if plan.decay != 1 else "")
    name = f"{rate}-seed-{plan.seed}"
    optimizer = plan.optimizer.replace(":", "-")
    return RunFolder(out / plan.experiment.variant / plan.role / optimizer / name)


class Runner:
    """Runs plans and shows how far they are.

    Attributes:
      out: the folder of all runs.
      resume: whether to go on with runs that are there.
      checkpoint_seconds: the time between two checkpoints of a run.
      console: where to show progress.
    """

    def __init__(self, out: Path, resume: bool, checkpoint_seconds: float, console: Console):
        self.out, self.resume, self.console = out, resume, console
        self.checkpoint_seconds = checkpoint_seconds
        self._load = lru_cache(maxsize=1)(self._load)
        self._data = lru_cache(maxsize=2)(self._data)
        self._programs = lru_cache(maxsize=1)(self._compile)

    def run(self, plans: Iterable[Plan]) -> list[dict[str, Any]]:
        """The results of the plans, in order."""
        plans = list(plans)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            return [self._run(plan, progress) for plan in plans]

    def _run(self, plan: Plan, progress: Progress) -> dict[str, Any]:
        title = f"{plan.role} {plan.optimizer}({plan.learning_rate:g}) seed {plan.seed}"
        task = progress.add_task(title, total=plan.experiment.steps, status="compiling")

        def show(line: dict[str, Any]) -> None:
            progress.update(task, completed=line["step"], status=f"loss {line['loss']:.4g}")

        result = train(
            plan,
            partial(self._programs, plan.experiment, plan.optimizer, plan.source),
            self._data(plan.experiment, plan.source, plan.role == "trial"),
            run_folder(self.out, plan),
            resume=self.resume,
            checkpoint_seconds=self.checkpoint_seconds,
            on_step=show,
        )
        progress.update(task, completed=result["step"], status=_describe(plan, result))
        return result

    def _load(self, experiment: Experiment, source: Source) -> Data:
        data = experiment.load(source)
        if data.note:
            self.console.print(f"{experiment.name}: {data.note}")
        return data

    def _data(self, experiment: Experiment, source: Source, trial: bool) -> Data:
        data = self._load(experiment, source)
        return experiment.hold_out(data) if trial else data

    def _compile(self, experiment: Experiment, optimizer: str, source: Source) -> Programs:
        data = self._data(experiment, source, False)
        batch = data.train.take(slice(experiment.batch_size))
        programs = compile_programs(experiment, optimizer, batch)
        self.console.print(f"{optimizer}: compiled in {programs.compile_seconds:.0f} s")
        return programs


def _describe(plan: Plan, result: dict[str, Any]) -> str:
    headline = plan.experiment.headline
    value = result["evaluation"][headline]
    shown = "not finite" if value is None else f"{value:.4g}"
    return f"{result['status']}: {headline} {shown}, {result['seconds']:.0f} s"
