"""`lnb arena`: which optimizers meet on which workloads, and with how many runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from ..data import Source
from ..experiments import EXPERIMENTS
from ..folder import RunError, make_folder
from ..optimizers import check_optimizer
from .entries import BASELINE, CONTESTANTS, FEW_WORKLOADS, FURTHER, UNTUNED, WORKLOADS
from .jobs import Job, run_jobs
from .published import published
from .report import report_arena


@dataclass(frozen=True, kw_only=True)
class Arena:
    """Compare optimizers by the time they take to AdamW's loss; goes on from what is there.

    A full arena takes some hours. Stop it whenever you like: the same command goes on.
    """

    workload: tuple[str, ...] = ()
    """Which; all ten by default."""
    optimizer: tuple[str, ...] = ()
    """Which; by default those of the arena. AdamW always runs: it sets the targets."""
    preset: Literal["arena", "tiny"] = "arena"
    """`tiny` takes seconds, to try things out."""
    data: Literal["real", "synthetic"] = "real"
    """The real data, or a seeded stand-in that needs no files."""
    data_dir: Path | None = None
    """Folder of the official files; by default $LNB_DATA, then a download."""
    out: Path = Path("runs/arena")
    """Folder of all runs."""
    known: Path | None = None
    """A report of an earlier arena, such as docs/results/arena: its runs are not made again."""
    trials: int = 5
    """Trials of the learning rate, for each optimizer on each workload."""
    seeds: int = 3
    """Fresh seeds of each winner."""
    workers: int = 2
    """Runs side by side, each on one core."""
    longer: int = 1
    """Multiplies the steps of every workload; give it an --out of its own."""
    dry_run: bool = False
    """Only print the commands."""

    def __call__(self, console: Console) -> None:
        for name, least in {"workers": 1, "seeds": 1, "longer": 1, "trials": 3}.items():
            if getattr(self, name) < least:
                raise RunError(f"--{name} should be at least {least}, not {getattr(self, name)}.")
        known = published(self.known) if self.known else []
        jobs = [job for job in self.jobs() if not job.is_in(known)]
        if self.dry_run:
            for job in jobs:
                console.print(job.command, soft_wrap=True, highlight=False)
            return
        failures = run_jobs(jobs, self.workers, console)
        if failures:
            raise RunError(
                f"{len(failures)} of {len(jobs)} failed: {', '.join(failures)}. Their logs are in "
                f"{self.out / 'logs'}; the same command tries them again. `lnb report {self.out} "
                "--arena` reports on the others."
            )
        make_folder(self.out)  # which stays empty where every run is known
        console.print(f"Written: {report_arena(self.out, known=self.known)}")

    def jobs(self) -> Iterator[Job]:
        for name in self.workload:
            if name not in WORKLOADS:
                raise RunError(f"There is no workload {name!r}. There are {', '.join(WORKLOADS)}.")
        for name in self.optimizer:
            check_optimizer(name)
        source = Source(self.data, str(self.data_dir) if self.data_dir else None)
        for workload in self.workload or WORKLOADS:
            steps = EXPERIMENTS[workload].preset(self.preset).steps
            job = Job(
                workload,
                BASELINE,
                self.out,
                source,
                trials=self.trials,
                seeds=self.seeds,
                preset=self.preset,
                sizes=(("steps", self.longer * steps),) if self.longer > 1 else (),
            )
            further = FURTHER if workload in FEW_WORKLOADS else ()
            for optimizer in dict.fromkeys((BASELINE, *(self.optimizer or CONTESTANTS + further))):
                yield replace(job, optimizer=optimizer)
                if optimizer in UNTUNED:
                    yield replace(job, optimizer=optimizer, rate=UNTUNED[optimizer])
