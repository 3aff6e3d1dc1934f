"""The arena's page: a table for each workload, a summary, performance profiles and curves."""

from math import inf
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ..folder import make_folder
from ..records import find_runs
from ..report.curves import align
from ..report.figures import Look
from ..report.table import Table
from .entries import BASELINE, CONTESTANTS, UNTUNED, WORKLOADS
from .published import publish, published
from .scores import (
    PARTS,
    Contest,
    Entrant,
    contests,
    geometric_mean,
    p_value,
    profile,
    speedup,
)

FACTORS = np.geomspace(1, 4, 61)
OURS = "lnb"


def report_arena(folder: Path, out: Path | None = None, known: Path | None = None) -> Path:
    """Writes `arena.md`, its figures and the runs themselves; returns the path of `arena.md`.

    Args:
      folder: where runs were made.
      out: where to write.
      known: an earlier report, whose runs are reported too.
    """
    runs = find_runs(folder) if any(folder.rglob("config.json")) or not known else []
    made = [run.config for run in runs]  # which may have been published since
    runs += [run for run in published(known) if run.config not in made] if known else []
    found = contests(runs)
    out = folder / "report" if out is None else out
    make_folder(out)
    publish(runs, out)
    look = Look([name.split()[0] for contest in found for name in contest.entrants])
    for name, figure in {
        "profiles": _profiles(found, look),
        "curves": _curves(found, look),
    }.items():
        figure.savefig(out / f"arena-{name}.png", dpi=120)
    parts = [
        "# The arena",
        _setting(found),
        "## Summary",
        _summary(found).markdown(),
        "![performance profiles](arena-profiles.png)",
        "![test loss by seconds](arena-curves.png)",
    ]
    for contest in found:
        first, last = contest.targets
        parts += [
            f"## {contest.workload}: {WORKLOADS[contest.workload].what}",
            f"Targets: a test loss of {first:.4g} and of {last:.4g}, which {BASELINE} reaches "
            f"after {PARTS[0]:.0%} and {PARTS[1]:.0%} of its steps.",
            _table(contest).markdown(),
        ]
    (out / "arena.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return out / "arena.md"


def _setting(found: list[Contest]) -> str:
    environments = {
        (run.environment["cores"], run.environment["device"], run.environment["versions"]["jax"])
        for contest in found
        for entrant in contest.entrants.values()
        for run in entrant.runs
    }
    seeds = sorted({len(e.runs) for contest in found for e in contest.entrants.values()})
    trials = sorted({len(e.trials) for c in found for e in c.entrants.values() if e.trials})
    machines = "; ".join(
        f"{cores} core{'s' * (cores != 1)} of a {device} a run, jax {version}"
        for cores, device, version in sorted(environments, key=str)
    )
    absent = [
        f"{name} on {contest.workload}"
        for contest in found
        for name in CONTESTANTS
        if name not in contest.entrants
    ]
    missing = f" Without finished runs: {', '.join(absent)}." if absent else ""
    return (
        f"{len(found)} workloads; {_range(trials)} trials of the learning rate for each optimizer, "
        f"chosen by held-out loss; {_range(seeds)} fresh seeds; {machines}.{missing} "
        "Numbers are medians over seeds, of training alone: compilation has a column of its own. "
        "A run that misses a target counts with its whole length in means, and as never there in "
        "profiles. Places are by medians: a first place may be a tie. "
        '"Untuned" is one learning rate for all workloads: '
        f"{', '.join(f'{name} {rate:g}' for name, rate in UNTUNED.items())}."
    )


def _range(numbers: list[int]) -> str:
    return " to ".join(dict.fromkeys(str(n) for n in (*numbers[:1], *numbers[-1:])))


def _summary(found: list[Contest]) -> Table:
    """Speed beside the baseline's, places, and our own beside each."""
    names = dict.fromkeys(name for contest in found for name in contest.entrants)
    rows = []
    for name in names:
        cells = [name]
        for number, _ in enumerate(PARTS):
            ratios = list(speedup(found, name, BASELINE, number, "seconds").values())
            steps = list(speedup(found, name, BASELINE, number, "step").values())
            cells.append(f"{geometric_mean(ratios):.2f} ({geometric_mean(steps):.2f})")
        places = [place(contest, name) for contest in found if name in contest.entrants]
        own = [(c.entrants[name], c.targets[-1]) for c in found if name in c.entrants]
        misses = sum(entrant.misses(target) for entrant, target in own)
        cells += [f"{places.count(1)} of {len(places)}", str(max(places)), str(misses)]
        ours = list(speedup(found, OURS, name, -1, "seconds").values())
        cells.append(
            "-"
            if name == OURS or not ours
            else f"{geometric_mean(ours):.2f} (p = {p_value(ours):.2g})"
        )
        rows.append(tuple(cells))
    columns = (
        "optimizer",
        *(f"times faster than {BASELINE} to {part:.0%}: seconds (steps)" for part in PARTS),
        "first",
        "worst place",
        "misses",
        f"times that {OURS} is faster",
    )
    return Table(columns, rows)


def place(contest: Contest, name: str) -> int:
    """By seconds to the last target among tuned entrants; last for all that miss it."""
    own = contest.entrants[name].cost(contest.targets[-1], "seconds")
    if own == inf:
        return len([entrant for entrant in contest.entrants.values() if entrant.trials])
    others = [
        entrant.cost(contest.targets[-1], "seconds")
        for other, entrant in contest.entrants.items()
        if other != name and entrant.trials
    ]
    return 1 + sum(cost < own for cost in others)


def _table(contest: Contest) -> Table:
    def row(entrant: Entrant) -> tuple[str, ...]:
        losses = sorted(entrant.losses)
        reached = [
            _number(entrant.cost(target, axis))
            for target in contest.targets
            for axis in ("step", "seconds")
        ]
        spread = f"{np.median(losses):.4g} ({losses[0]:.4g} to {losses[-1]:.4g})"
        sizes = f"{entrant.milliseconds:.3g}", f"{entrant.compile_seconds:.0f}"
        rate = f"{entrant.rate:g}" + " (edge)" * entrant.at_an_edge
        return (entrant.name, rate, spread, *reached, *sizes)

    ordered = sorted(
        contest.entrants.values(),
        key=lambda e: (e.cost(contest.targets[-1], "seconds"), np.median(e.losses)),
    )
    reached = (f"{what} to {part:.0%}" for part in PARTS for what in ("steps", "seconds"))
    columns = "optimizer", "rate", "lowest test loss", *reached, "ms a step", "s to compile"
    return Table(columns, [row(entrant) for entrant in ordered])


def _number(value: float) -> str:
    return f"{value:.3g}" if value < inf else "miss"


def _profiles(found: list[Contest], look: Look) -> Figure:
    """The part of the workloads on which an optimizer is within a factor of the fastest."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, len(PARTS), sharey=True)
    for number, (axes, part) in enumerate(zip(panels, PARTS, strict=True)):
        costs: dict[str, dict[str, float]] = {}
        for contest in found:
            for name, entrant in contest.entrants.items():
                if entrant.trials:
                    cost = entrant.cost(contest.targets[number], "seconds")
                    costs.setdefault(name, {})[contest.workload] = cost
        whole = {name: by for name, by in costs.items() if len(by) == len(found)}
        for name, shares in profile(whole, FACTORS).items():
            axes.step(FACTORS, shares, where="post", color=look[name][0], label=name)
        axes.set_xscale("log")
        axes.set_xticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        axes.minorticks_off()
        axes.set_xlabel(f"times slower than the fastest to {BASELINE}'s loss at {part:.0%}")
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("part of the workloads")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=8, frameon=False)
    return figure


def _curves(found: list[Contest], look: Look) -> Figure:
    """Test loss by seconds of training, the median over seeds; dotted: the targets."""
    columns = min(5, max(1, len(found)))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(4 * columns, 3.4 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, contest in zip(panels, found, strict=False):
        for name, entrant in contest.entrants.items():
            curve = align([run.evaluations for run in entrant.runs], "loss")
            style = {"color": _colour(look, name), "linestyle": "-" if entrant.trials else "--"}
            axes.plot(curve.seconds, curve.median, label=name, linewidth=1.3, **style)
        for target in contest.targets:
            axes.axhline(target, color="black", linestyle=":", linewidth=0.8)
        low = min(min(entrant.losses) for entrant in contest.entrants.values())
        first = contest.targets[0]
        axes.set_ylim(low - 0.1 * (first - low), first + 2 * (first - low))
        axes.set_title(contest.workload, fontsize="medium")
        axes.grid(alpha=0.25)
    for axes in panels[len(found) :]:
        axes.set_visible(False)
    named = {
        label: handle
        for axes in panels[: len(found)]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=9, frameon=False)
    figure.supxlabel("seconds of training")
    figure.supylabel("test loss")
    return figure


def _colour(look: Look, name: str) -> str:
    """An optimizer's, whether its rate was searched for or not."""
    return look[name.split()[0]][0]
