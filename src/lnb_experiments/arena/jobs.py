"""Runs the arena: one process and one core for an optimizer on a workload."""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ..data import Source
from ..experiments import EXPERIMENTS
from ..folder import make_folder
from ..optimizers import check_optimizer
from ..records import Record
from ..runner import Runner
from ..sweep import sweep
from ..training import Plan


@dataclass(frozen=True)
class Job:
    """The search and the final runs of one optimizer on one workload.

    Attributes:
      rate: a learning rate to run at, without a search.
      sizes: fields of the experiment that differ from the preset's.
    """

    workload: str
    optimizer: str
    out: Path
    source: Source
    rate: float | None = None
    trials: int = 5
    seeds: int = 3
    preset: str = "arena"
    sizes: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        rate = "" if self.rate is None else f" at {self.rate:g}"
        return f"{self.workload} with {self.optimizer}{rate}"

    @property
    def command(self) -> str:
        """What does the same by hand."""
        verb, rates = "sweep", f"--judge loss --trials {self.trials}"
        if self.rate is not None:
            verb, rates = "run", f"--learning-rate {self.rate:g}"
        parts = [f"lnb {verb} {self.workload} --preset {self.preset} --optimizer {self.optimizer}"]
        parts += [f"--{name.replace('_', '-')} {value}" for name, value in self.sizes]
        parts += [rates, f"--seeds {self.seeds} --schedule cosine --resume --out {self.out}"]
        parts += ["--data synthetic"] if self.source.kind == "synthetic" else []
        parts += [f"--data-dir {self.source.folder}"] if self.source.folder else []
        return " ".join(parts)

    def is_in(self, runs: Sequence[Record]) -> bool:
        """Whether these are all of its final runs."""
        role = "final" if self.rate is None else "run"
        own = [
            run
            for run in runs
            if (run.config["experiment"], run.config["optimizer"], run.config["role"])
            == (self.workload, self.optimizer, role)
            and self.rate in (None, run.config["learning_rate"])
        ]
        return len(own) >= self.seeds

    def run(self, console: Console) -> None:
        """Goes on from whatever is there."""
        experiment = EXPERIMENTS[self.workload].preset(self.preset, **dict(self.sizes))
        runner = Runner(self.out, True, checkpoint_seconds=30.0, console=console)
        plan = Plan(
            experiment, self.preset, self.optimizer, 0.0, schedule="cosine", source=self.source
        )
        if self.rate is None:
            sweep(runner, plan, self.trials, self.seeds, judge="loss")
        else:
            plan = replace(plan, learning_rate=self.rate)
            runner.run(replace(plan, seed=seed) for seed in range(self.seeds))


def run_jobs(jobs: Sequence[Job], workers: int, console: Console) -> dict[str, str]:
    """Runs jobs side by side, each on one core; returns what went wrong, by job.

    What a job prints is in OUT/logs.
    """
    for job in jobs:
        check_optimizer(job.optimizer)
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for core in _cores()[:workers]:
        cores.put(core)
    failures = {}
    pool = ProcessPoolExecutor(
        workers, context, initializer=_prepare, initargs=(cores,), max_tasks_per_child=1
    )
    try:
        futures = {pool.submit(_work, job): job for job in jobs}
        for number, future in enumerate(as_completed(futures), 1):
            job, error = futures[future], future.exception()
            if error:
                failures[job.title] = f"{type(error).__name__}: {error}"
            status = failures.get(job.title, "done")
            console.print(f"[{number}/{len(jobs)}] {job.title}: {status}", markup=False)
    finally:
        pool.shutdown(cancel_futures=True)
    return failures


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(64)]


def _prepare(cores) -> None:
    """In a new process: remembers where cores come from, and ends when the arena is killed."""
    global _free
    _free = cores
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _work(job: Job) -> None:
    core = _free.get()
    if hasattr(os, "sched_setaffinity"):  # before JAX counts the cores and makes its threads
        os.sched_setaffinity(0, {core})
    logs = job.out / "logs"
    make_folder(logs)
    try:
        with (logs / f"{job.title.replace(' ', '-').replace(':', '-')}.txt").open("a") as file:
            console = Console(file=file, width=120)
            try:
                job.run(console)
            except Exception:
                console.print_exception()
                raise
    finally:
        _free.put(core)
