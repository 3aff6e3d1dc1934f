"""What the trials of an optimizer's learning rates came to."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .variants import Variant, entries


class Search(NamedTuple):
    """The trials of one optimizer.

    Attributes:
      rates: the learning rates that were tried, ascending.
      scores: the headline metric on held-out data at each of them, the mean over seeds and the best
        of several decays; NaN unless all trials there came to their end.
      diverged: how many trials diverged, at each rate.
      trials: how many there were.
      unfinished: how many of them have no result yet.
      best: the index of the winner among the rates; None if nothing can win yet.
    """

    rates: list[float]
    scores: list[float]
    diverged: list[int]
    trials: int
    unfinished: int
    best: int | None

    @property
    def edge(self) -> str | None:
        """Which end of the searched rates the winner is at: a better one may lie beyond."""
        if self.best is None:
            return None
        ends = {"lower": self.best == 0, "upper": self.best == len(self.rates) - 1}
        return " and ".join(name for name, there in ends.items() if there) or None


def search(variant: Variant, optimizer: str) -> Search:
    """Sums up the trials of an optimizer."""
    trials = [run for run in variant.trials if run.config["optimizer"] == optimizer]
    settings = entries(trials)
    rates = sorted({entry.rate for entry in settings})
    pick = max if variant.larger_is_better else min
    scores, diverged = [], []
    for rate in rates:
        here = [entry for entry in settings if entry.rate == rate]
        diverged.append(sum(run.status == "diverged" for entry in here for run in entry.runs))
        means = [
            float(np.mean([run.headline for run in entry.runs]))
            for entry in here
            if len(entry.done) == len(entry.runs)
        ]
        scores.append(pick((mean for mean in means if np.isfinite(mean)), default=float("nan")))
    return Search(
        rates,
        scores,
        diverged,
        len(trials),
        sum(run.status == "unfinished" for run in trials),
        _best(scores, pick),
    )


def _best(scores: Sequence[float], pick) -> int | None:
    """The index of the best score; of the smallest rate, if several are as good."""
    finite = [score for score in scores if np.isfinite(score)]
    return scores.index(pick(finite)) if finite else None
