"""Whether cheap statistics cost convergence: the defaults beside all rows at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import lnb
from lnb_experiments.data import Batches, Source, Split
from lnb_experiments.experiment import Experiment
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.method import Method, Problem
from lnb_experiments.optimizers import from_features

EPOCHS = (1, 2, 4)
EXAMPLES = {"autoencoder": 60_000, "vit": 10_000}  # of an epoch: all of MNIST, a part of CIFAR-10
CASES = {  # (experiment, norm): learning rate
    ("autoencoder", "neuron"): 0.3,
    ("autoencoder", "auto"): 0.03,
    ("vit", "neuron"): 0.1,
    ("vit", "auto"): 0.03,
}


@dataclass(frozen=True)
class Losses:
    """Of one run, over all of its training examples, after each number of epochs."""

    experiment: str
    norm: str
    full: bool
    seed: int
    losses: list[float]


def converge(
    cases: Sequence[tuple[str, str]], seeds: int, source: Source, console: Console
) -> list[Losses]:
    """Trains every case with full statistics and with the defaults."""
    runs = []
    for name, norm in cases:
        experiment, rate = EXPERIMENTS[name].preset("laptop"), CASES[name, norm]
        examples = experiment.load(source).train.take(slice(0, EXAMPLES[name]))
        for full in (True, False):
            console.print(f"{name}, norm={norm!r}, full statistics: {full} ...", style="dim")
            method = make_method(experiment, examples, norm, full)
            programs = method.init, jax.jit(partial(method.step, rate), donate_argnums=(0, 1))
            for seed in range(seeds):
                losses = train(experiment, examples, seed, programs)
                runs.append(Losses(name, norm, full, seed, losses))
    return runs


def make_method(experiment: Experiment, examples: Split, norm: str, full: bool) -> Method:
    batch = examples.take(slice(0, experiment.batch_size))
    params, key = jax.eval_shape(experiment.init, jax.random.key(0)), jax.random.key(0)
    solver = lnb.Cholesky(every=1) if full else lnb.Cholesky()
    rows = "all" if full else "auto"
    make = from_features(partial(lnb.lnb, norm=norm, solver=solver), rows=rows)
    return make(Problem(experiment.outputs, experiment.objective), params, batch, key)


def train(experiment: Experiment, examples: Split, seed: int, programs: Any) -> list[float]:
    init, step = programs
    key = jax.random.key(seed)
    params = experiment.init(key)
    state = init(params)
    batches = Batches(examples, experiment.batch_size, seed, experiment.augment)
    loss_of = jax.jit(lambda params, batch: experiment.loss(params, batch, None))
    losses = []
    for number in range(max(EPOCHS) * batches.per_epoch):
        batch_key = jax.random.fold_in(key, number)
        params, state, _ = step(params, state, batches.batch(number), batch_key)
        if number + 1 in {epoch * batches.per_epoch for epoch in EPOCHS}:
            size = experiment.batch_size
            parts = [
                loss_of(params, examples.take(slice(at, at + size)))
                for at in range(0, batches.per_epoch * size, size)
            ]
            losses.append(float(np.mean(parts)))
    return losses


def print_losses(runs: Sequence[Losses], console: Console) -> None:
    """Means over seeds, and how far the defaults are from full statistics."""
    table = Table("", *(f"after {epoch}" for epoch in EPOCHS), title="Loss after epochs")
    for name, norm in dict.fromkeys((run.experiment, run.norm) for run in runs):
        own = [run for run in runs if (run.experiment, run.norm) == (name, norm)]
        means = {
            full: np.mean([run.losses for run in own if run.full == full], axis=0)
            for full in (True, False)
        }
        table.add_row(f"{name}, {norm}: full", *(f"{x:.4g}" for x in means[True]))
        table.add_row("its defaults", *(f"{x:.4g}" for x in means[False]))
        change = means[False] / means[True] - 1
        table.add_row("difference", *(f"{x:+.1%}" for x in change), end_section=True)
    console.print(table)
