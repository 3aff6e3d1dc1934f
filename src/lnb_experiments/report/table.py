"""The table of results: one row an optimizer, as text in cells."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..records import Record
from .curves import Curve, headline, shown
from .search import search
from .variants import Entry, Variant

NOTHING = "-"
LAST_PART = 0.05

NOTES = (
    "Numbers of several seeds are means, with the smallest and the largest in brackets; n counts "
    "the runs that came to their end, and only those are in it.",
    f"Training loss: the mean over the last {LAST_PART:.0%} of the steps.",
    "Steps to a target: the first evaluation at which the median over seeds is as good as the "
    "worst optimizer's at the end.",
    "Time a step: the median over steps and seeds, without compilation and evaluation. Loading: "
    "the loader's part of the training time.",
    "Trials: runs that chose the learning rate on held-out training data. A best rate at an edge "
    "of those tried is marked: a better one may lie beyond it.",
)


class Table(NamedTuple):
    """A table of text."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        rows = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows)


def table(variant: Variant) -> Table:
    """What an experiment's runs and trials came to."""
    entries = variant.entries
    target = common_target(entries, variant.larger_is_better)
    reach = "steps to target" if target is None else f"steps to {variant.headline} {target:.4g}"
    arrow = "↑" if variant.larger_is_better else "↓"
    columns: dict[str, Callable[[Entry], str]] = {
        "optimizer": lambda entry: entry.optimizer,
        "learning rate": lambda entry: entry.rate_label if entry.runs else NOTHING,
        "seeds": lambda entry: str(len(entry.seeds)),
        f"{variant.headline} {arrow}": lambda entry: _spread([run.headline for run in entry.done]),
        "training loss ↓": lambda entry: _spread([last_loss(run) for run in entry.done]),
        **{
            name: lambda entry, name=name: _spread([run.last(name) for run in entry.done])
            for name in variant.other_metrics
        },
        reach: lambda entry: _steps_to(entry, target, variant.larger_is_better),
        "ms a step": lambda entry: _number(milliseconds(shown(entry))),
        "x Adam's": lambda entry: _number(milliseconds(shown(entry)) / _adam(entries), "{:.2f}"),
        "loading": lambda entry: _number(loading(shown(entry)), "{:.1%}"),
        "trials": lambda entry: _trials(variant, entry.optimizer),
        "best rate": lambda entry: _best_rate(variant, entry.optimizer),
        "runs": _statuses,
    }
    there = {entry.optimizer for entry in entries}
    only_tried = [Entry(name, 0.0, 1.0, []) for name in variant.optimizers if name not in there]
    rows = [tuple(cell(entry) for cell in columns.values()) for entry in entries + only_tried]
    return Table(tuple(columns), rows)


def common_target(entries: Sequence[Entry], larger_is_better: bool) -> float | None:
    """The worst of the optimizers' final headline metrics (medians over seeds)."""
    finals = [headline(entry.done).median[-1:] for entry in entries if entry.done]
    finite = [float(final[0]) for final in finals if np.isfinite(final).any()]
    return (min if larger_is_better else max)(finite, default=None)


def reached(curve: Curve, target: float, larger_is_better: bool) -> int | None:
    """Where on a curve its median is as good as the target for the first time."""
    good = curve.median >= target if larger_is_better else curve.median <= target
    return int(np.argmax(good)) if good.any() else None


def last_loss(run: Record) -> float:
    """The training loss at the end of a run."""
    losses = run.steps.values.get("loss", np.array([np.nan]))
    return float(np.mean(losses[-max(1, round(LAST_PART * len(losses))) :]))


def milliseconds(runs: Sequence[Record]) -> float:
    """Training time of the median step; NaN if there is no step."""
    times = [np.diff(run.steps.seconds, prepend=0.0) for run in runs if run.last_step]
    return 1e3 * float(np.median(np.concatenate(times))) if times else float("nan")


def loading(runs: Sequence[Record]) -> float:
    """The loader's part of the training time."""
    parts = [
        run.steps.values["load_seconds"][-1] / run.steps.seconds[-1]
        for run in runs
        if run.last_step and "load_seconds" in run.steps.values and run.steps.seconds[-1] > 0
    ]
    return float(np.median(parts)) if parts else float("nan")


def _adam(entries: Sequence[Entry]) -> float:
    return milliseconds([run for e in entries if e.optimizer == "adam" for run in shown(e)])


def _steps_to(entry: Entry, target: float | None, larger_is_better: bool) -> str:
    if target is None or not entry.done:
        return NOTHING
    curve = headline(entry.done)
    at = reached(curve, target, larger_is_better)
    if at is None:
        return "not reached"
    return f"{curve.step[at]:.0f} ({curve.epoch[at]:.3g} epochs, {curve.seconds[at]:.3g} s)"


def _trials(variant: Variant, optimizer: str) -> str:
    found = search(variant, optimizer)
    if not found.trials:
        return "0"
    troubles = {"diverged": sum(found.diverged), "unfinished": found.unfinished}
    notes = [f"{number} {name}" for name, number in troubles.items() if number]
    return str(found.trials) + (f" ({', '.join(notes)})" if notes else "")


def _best_rate(variant: Variant, optimizer: str) -> str:
    found = search(variant, optimizer)
    if found.best is None:
        return NOTHING
    best, among = f"{found.rates[found.best]:g}", f"{found.rates[0]:g} to {found.rates[-1]:g}"
    if len(found.rates) == 1:
        return f"⚠ {best} (the only one tried)"
    return f"⚠ {best} ({found.edge} edge of {among})" if found.edge else f"{best} (of {among})"


def _statuses(entry: Entry) -> str:
    """How the runs ended."""
    others = [
        f"seed {run.config['seed']} {run.status} at {run.last_step} of "
        f"{run.config['sizes'].get('steps', '?')}"
        for run in entry.runs
        if run.status != "done"
    ]
    done = f"{len(entry.done)} done" + (f" ({'; '.join(others)})" if others else "")
    return done if entry.runs else NOTHING


def _spread(values: Sequence[float]) -> str:
    if not values:
        return NOTHING
    spread = f"{min(values):.4g} to {max(values):.4g}; " if len(values) > 1 else ""
    return f"{np.mean(values):.4g} ({spread}n = {len(values)})"


def _number(value: float, form: str | None = None) -> str:
    if not np.isfinite(value):
        return NOTHING
    return (form or ("{:,.0f}" if value >= 100 else "{:.3g}")).format(value)


def escape_markdown(text: str) -> str:
    """Text that does not turn into markup, nor ends a cell."""
    for sign in "\\|<`*_[":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")
