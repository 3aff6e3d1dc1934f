"""Figures of an experiment: its curves, and its search for learning rates."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .curves import Curve, headline, shown, training_loss
from .search import search
from .variants import Entry, Variant

# Okabe and Ito's colours and some of Tol's: told apart with colour-blind eyes.
FIXED = {
    "lnb": "tab:red",
    "adam": "#0072b2",
    "algorithm2": "#009e73",
    "muon": "#e69f00",
    "sgd": "#222222",
    "algorithm1": "#56b4e9",
    "levenberg-marquardt": "#332288",
    "adamw": "#cc79a7",
}
PALETTE = "#999933 #8c6d46 #aaaaaa #882255 #44aa99 #ddcc77 #117733 #6699cc #aa4466".split()
MARKERS = "osD^vPX<>ph*"
DASHES = ("-", "--", ":", "-.")
SMOOTHED = 50  # the running mean's window is this part of a run


class Look(dict[str, tuple[str, str]]):
    """A colour and a marker for each optimizer, the same in all figures of a report."""

    def __init__(self, optimizers: Sequence[str]):
        others = [name for name in sorted(set(optimizers)) if name not in FIXED]
        colours = FIXED | {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(others)}
        super().__init__(
            {name: (colours[name], MARKERS[i % len(MARKERS)]) for i, name in enumerate(colours)}
        )


def curves_figure(variant: Variant, look: Mapping[str, tuple[str, str]]) -> Figure:
    """Training loss and headline metric, by epochs and by seconds of training."""
    entries = variant.entries
    longest = max(run.last_step for run in variant.runs)
    window = max(1, longest // SMOOTHED)
    figure = Figure(figsize=(10, 7.2), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for entry, dashes in _with_dashes(entries):
        loss, score = training_loss(shown(entry), window), headline(shown(entry))
        colour, marker = look[entry.optimizer]
        for column, axis in enumerate(("epoch", "seconds")):
            style = {"color": colour, "linestyle": dashes, "label": _label(entry)}
            _draw(panels[0, column], axis, loss, **style)
            marks = {"marker": marker, "markersize": 4, "markevery": 1 + len(score.step) // 20}
            _draw(panels[1, column], axis, score, **marks, **style)
    evaluated_on = " and ".join(sorted({run.config["evaluated_on"] for run in variant.runs}))
    smoothed = f"\n(running mean of {window} steps)" if window > 1 else ""
    panels[0, 0].set_ylabel(f"training loss{smoothed}")
    panels[1, 0].set_ylabel(f"{variant.headline} on {evaluated_on} data")
    panels[1, 0].set_xlabel("epochs")
    panels[1, 1].set_xlabel("seconds of training, without compilation and evaluation")
    _scale(panels[0, 0])
    if not variant.larger_is_better:
        _scale(panels[1, 0])
    several = any(len(shown(entry)) > 1 for entry in entries)
    lines = "Lines: medians over seeds; bands: smallest to largest" if several else "One seed each"
    return _finish(figure, f"{variant.title}\n{lines}", panels[1, 0])


def search_figure(variant: Variant, look: Mapping[str, tuple[str, str]]) -> Figure:
    """The headline metric on held-out data, by learning rate."""
    names = sorted({run.config["optimizer"] for run in variant.trials})
    searches = {name: search(variant, name) for name in names}
    diverged = [name for name in names if any(searches[name].diverged)]
    figure = Figure(figsize=(10, 5.4), layout="constrained")
    # A diverged trial has no score: below the axes of those that have, a line an optimizer.
    strip = 0.02 + 0.05 * len(diverged)
    axes, foot = figure.subplots(2, 1, sharex=True, height_ratios=(1, strip))
    for name, found in searches.items():
        colour, marker = look[name]
        axes.plot(found.rates, found.scores, color=colour, marker=marker, label=name)
        if found.best is not None:
            best = (found.rates[found.best], found.scores[found.best])
            axes.plot(*best, marker="o", markersize=15, color=colour, fillstyle="none")
        bad = [rate for rate, count in zip(found.rates, found.diverged, strict=True) if count]
        foot.plot(bad, [name] * len(bad), "x", color=colour)
    axes.set_xscale("log")
    axes.margins(y=0.12)
    axes.set_ylabel(f"{variant.headline} on held-out data")
    if not variant.larger_is_better:
        _scale(axes)
    foot.set_visible(bool(diverged))
    foot.margins(y=0.5 / max(1, len(diverged)))
    foot.tick_params(axis="y", length=0, labelsize="small")
    (foot if diverged else axes).set_xlabel("learning rate")
    axes.tick_params(axis="x", labelbottom=not diverged)
    signs = "Circles: the best of each" + ("; crosses: diverged" if diverged else "")
    title = f"{variant.title}: search for learning rates\n{signs}"
    return _finish(figure, title, axes)


def _with_dashes(entries: Sequence[Entry]) -> list[tuple[Entry, str]]:
    """Several learning rates of an optimizer share its colour, but not its dashes."""
    seen: dict[str, int] = {}
    result = []
    for entry in entries:
        number = seen[entry.optimizer] = seen.get(entry.optimizer, -1) + 1
        result.append((entry, DASHES[number % len(DASHES)]))
    return result


def _label(entry: Entry) -> str:
    runs = len(shown(entry))
    counts = {run.status for run in entry.runs} - {"done"}
    troubles = [
        f"{sum(run.status == status for run in entry.runs)} {status}" for status in sorted(counts)
    ]
    seeds = ", ".join([f"{runs} seed" + "s" * (runs != 1), *troubles])
    return f"{entry.optimizer}, rate {entry.rate_label} ({seeds})"


def _draw(axes: Axes, axis: str, curve: Curve, **style) -> None:
    x = getattr(curve, axis)
    axes.plot(x, curve.median, linewidth=1.5, **style)
    if len(curve.values) > 1:
        low, high = curve.values.min(axis=0), curve.values.max(axis=0)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _scale(axes: Axes) -> None:
    """A logarithmic scale where positive values span more than a factor of ten."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.get_lines()])
    values = values[np.isfinite(values)]
    if values.size and values.min() > 0 and values.max() > 10 * values.min():
        axes.set_yscale("log")


def _finish(figure: Figure, title: str, labelled: Axes) -> Figure:
    """Adds what all figures have; the legend is that of one of their axes."""
    for axes in figure.axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = labelled.get_legend_handles_labels()
    columns = max(1, min(len(labels), 120 // (9 + max(map(len, labels), default=0))))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize="medium")
    return figure
