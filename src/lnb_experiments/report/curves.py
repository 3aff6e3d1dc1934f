"""Curves over several seeds."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from ..records import Record, Series
from .variants import Entry


class Curve(NamedTuple):
    """A measurement of several runs, at the steps that all of them have.

    Attributes:
      step: after how many training steps.
      epoch: the same, in passes over the training data.
      seconds: of training until then, the median over runs.
      values: [runs, steps].
    """

    step: np.ndarray
    epoch: np.ndarray
    seconds: np.ndarray
    values: np.ndarray

    @property
    def median(self) -> np.ndarray:
        return np.median(self.values, axis=0)


def shown(entry: Entry) -> list[Record]:
    """The runs that curves are drawn of: those that came to their end, or else all."""
    return entry.done or entry.runs


def training_loss(runs: Sequence[Record], window: int) -> Curve:
    """The loss of the training batches, as a running mean."""
    curve = align([run.steps for run in runs], "loss")
    return curve._replace(values=np.array([running_mean(row, window) for row in curve.values]))


def headline(runs: Sequence[Record]) -> Curve:
    """The headline metric at evaluations."""
    return align([run.evaluations for run in runs], runs[0].config["headline"])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean of each value with those before it, `window` in all, fewer at the beginning."""
    return np.array(
        [values[max(0, end - window) : end].mean() for end in range(1, len(values) + 1)]
    )


def align(series: Sequence[Series], name: str) -> Curve:
    """A measurement of several runs, at the steps that all of them have."""
    step = reduce(np.intersect1d, [one.step for one in series])
    rows = [np.isin(one.step, step) for one in series]
    seconds = [one.seconds[row] for one, row in zip(series, rows, strict=True)]
    values = [
        one.values.get(name, np.full(len(one.step), np.nan))[row]
        for one, row in zip(series, rows, strict=True)
    ]
    # Infinities would make means and axes of their own; a gap says the same.
    finite = np.where(np.isfinite(values), values, np.nan)
    return Curve(step, series[0].epoch[rows[0]], np.median(seconds, axis=0), finite)
