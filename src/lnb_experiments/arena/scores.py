"""How soon each optimizer reached the targets, and who is ahead of whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np

from ..records import Record, RecordError
from .entries import BASELINE, UNTUNED, WORKLOADS

SHARED = ("preset", "sizes", "schedule", "data")  # what all runs of a workload have in common
PARTS = (0.6, 1.0)  # of the baseline's steps: its lowest test loss until then is a target


@dataclass(frozen=True)
class Entrant:
    """An optimizer's final runs on a workload, one a seed.

    Attributes:
      name: the optimizer's, and "untuned" where no search chose its rate.
      trials: the runs that chose the learning rate.
    """

    name: str
    runs: list[Record]
    trials: list[Record]

    @property
    def rate(self) -> float:
        return self.runs[0].config["learning_rate"]

    @property
    def losses(self) -> list[float]:
        """The lowest test loss of each run."""
        return [lowest(run) for run in self.runs]

    @property
    def milliseconds(self) -> float:
        """Of a step, the median over seeds."""
        return float(np.median([1e3 * run.steps.seconds[-1] / run.last_step for run in self.runs]))

    @property
    def compile_seconds(self) -> float:
        results = [run.result or {} for run in self.runs]
        return float(np.median([result.get("compile_seconds", nan) for result in results]))

    @property
    def at_an_edge(self) -> bool:
        """Whether the best rate is the lowest or the highest of those tried."""
        rates = [run.config["learning_rate"] for run in self.trials]
        return bool(rates) and self.rate in (min(rates), max(rates))

    def reach(self, target: float, axis: str) -> list[float]:
        """Steps or seconds until each run is at a target."""
        return [reach(run, target, axis) for run in self.runs]

    def cost(self, target: float, axis: str) -> float:
        """The median over seeds of steps or seconds to a target. A miss is infinite."""
        return float(np.median(self.reach(target, axis)))

    def misses(self, target: float) -> bool:
        return self.cost(target, "step") == inf

    def least_cost(self, target: float, axis: str) -> float:
        """The same, but a run that misses counts with its whole length: less than it would need."""
        reached = zip(self.reach(target, axis), self.runs, strict=True)
        return float(np.median([min(cost, whole(run, axis)) for cost, run in reached]))


def whole(run: Record, axis: str) -> float:
    """Steps or seconds of a run, had it come to its end: one that diverges stops before."""
    steps = run.config["sizes"]["steps"]
    return float(getattr(run.steps, axis)[-1]) * steps / run.last_step


class Contest(NamedTuple):
    """The entrants of a workload, and the losses that they are to reach."""

    workload: str
    entrants: dict[str, Entrant]
    targets: tuple[float, ...]


def contests(records: Sequence[Record]) -> list[Contest]:
    """What was run, by workload. A workload without finished runs of the baseline is left out."""
    by_workload: dict[str, dict[str, Entrant]] = {}
    first: dict[Any, Record] = {}
    for run in records:
        role, optimizer = run.config["role"], run.config["optimizer"]
        if run.config["experiment"] not in WORKLOADS:
            continue
        _check_alike(run, first.setdefault(run.config["experiment"], run), SHARED)
        if role == "final":
            finals = (run.config["experiment"], optimizer)
            _check_alike(run, first.setdefault(finals, run), ("learning_rate",))
        name = optimizer
        if role == "run":
            if run.config["learning_rate"] != UNTUNED.get(optimizer):
                continue
            name = f"{optimizer} untuned"
        entrants = by_workload.setdefault(run.config["experiment"], {})
        entrant = entrants.setdefault(name, Entrant(name, [], []))
        if role == "trial":
            entrant.trials.append(run)
        elif run.result:
            entrant.runs.append(run)
    found = []
    for workload, entrants in sorted(by_workload.items()):
        entrants = {name: entrant for name, entrant in entrants.items() if entrant.runs}
        if BASELINE in entrants:
            found.append(Contest(workload, entrants, targets(entrants[BASELINE].runs)))
    if not found:
        raise RecordError(f"There is no finished run of {BASELINE} yet: it sets the targets.")
    return found


def _check_alike(run: Record, other: Record, fields: Sequence[str]) -> None:
    for field in fields:
        if run.config.get(field) != other.config.get(field):
            raise RecordError(
                f"{run.folder} and {other.folder} differ in {field}: they cannot be compared. Move "
                "one of them away, or give every arena an --out of its own."
            )


def lowest(run: Record, part: float = 1.0) -> float:
    """The lowest test loss in the first part of a run; infinite if there is none."""
    until = run.evaluations.step <= part * run.config["sizes"]["steps"]
    losses = run.evaluations.values.get("loss", np.array([]))[until]
    return float(np.nanmin(losses, initial=inf)) if losses.size else inf


def targets(runs: Sequence[Record]) -> tuple[float, ...]:
    """The median over seeds of the lowest test loss, after each of `PARTS`.

    Of two in the middle it is the higher loss, which most of the seeds reach.
    """
    losses = [[lowest(run, part) for run in runs] for part in PARTS]
    return tuple(float(np.quantile(row, 0.5, method="higher")) for row in losses)


def reach(run: Record, target: float, axis: str) -> float:
    """Steps or seconds until the test loss is at the target; infinite if it never is.

    Between two evaluations the loss is taken to fall along a straight line.
    """
    losses = run.evaluations.values["loss"]
    below = np.flatnonzero(losses <= target)
    if not below.size:
        return inf
    last = int(below[0])
    when = getattr(run.evaluations, axis)
    before, after = (losses[last - 1], losses[last]) if last else (np.nan, np.nan)
    if not np.isfinite(before):
        return float(when[last])
    part = (before - target) / (before - after)
    return float(when[last - 1] + part * (when[last] - when[last - 1]))


def profile(costs: Mapping[str, Mapping[str, float]], factors: np.ndarray) -> dict[str, np.ndarray]:
    """Performance profiles (Dolan and More, 2002), as AlgoPerf draws them.

    Args:
      costs: by optimizer, by workload; infinite for a miss.
      factors: how many times slower than the best on a workload.

    Returns:
      For each optimizer and factor, the part of the workloads on which it is within that factor.
    """
    workloads = {name for by_workload in costs.values() for name in by_workload}
    best = {
        workload: min(by_workload.get(workload, inf) for by_workload in costs.values())
        for workload in workloads
    }
    return {
        name: np.array(
            [
                np.mean([by_workload.get(w, inf) <= f * best[w] < inf for w in sorted(workloads)])
                for f in factors
            ]
        )
        for name, by_workload in costs.items()
    }


def speedup(contests_: Sequence[Contest], ahead: str, behind: str, number: int, axis: str):
    """How many times faster one optimizer is to a target, on each workload that both ran.

    One that misses it is at most as fast as one that does not; two that miss it are even.
    """
    ratios = {}
    for contest in contests_:
        if not {ahead, behind} <= contest.entrants.keys():
            continue
        one, other = (contest.entrants[name] for name in (ahead, behind))
        target = contest.targets[number]
        ratio = other.least_cost(target, axis) / one.least_cost(target, axis)
        ratio = min(ratio, 1.0) if one.misses(target) else ratio
        ratios[contest.workload] = max(ratio, 1.0) if other.misses(target) else ratio
    return ratios


def geometric_mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


def p_value(ratios: Sequence[float]) -> float:
    """Chance of a geometric mean this far from 1 if neither is faster: exact, by flipping signs."""
    logs = np.log(ratios)
    means = [abs(np.mean(logs * signs)) for signs in product((-1, 1), repeat=len(logs))]
    return float(np.mean(np.array(means) >= abs(np.mean(logs)) - 1e-12))
