"""Linear Neuron Boosting beside Adam, on scikit-learn's handwritten digits.

Two networks, two optimizers, three learning rates for each, three seeds; every run has the same
number of epochs. Learning rates are chosen on validation images, results are those of test images.

    make demo
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import lnb

EPOCHS = 40
BATCH_SIZE = 128
SEEDS = (0, 1, 2)
TARGET = 0.97  # test accuracy
LEARNING_RATES = {"lnb": (3e-3, 1e-2, 3e-2), "adam": (3e-3, 1e-2, 3e-2)}
FIGURE = Path("demo.png")


# Data


class Data(NamedTuple):
    images: Any  # [n, 1, 8, 8]
    labels: Any  # [n]


def load_data() -> list[Data]:
    """The digits as training, validation and test data: 60%, 20%, 20%."""
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, random_state=0)
    train, validation = train_test_split(rest, test_size=0.25, random_state=0)
    return [Data(images[rows], labels[rows]) for rows in (train, validation, test)]


# Networks


def mlp(key: jax.Array) -> eqx.nn.Sequential:
    keys = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(64, 128, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(128, 128, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Linear(128, 10, key=keys[2]),
        ]
    )


def cnn(key: jax.Array) -> eqx.nn.Sequential:
    keys = jax.random.split(key, 3)
    return eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 16, 3, padding=1, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Conv2d(16, 32, 3, stride=2, padding=1, key=keys[1]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(512, 10, key=keys[2]),
        ]
    )


NETWORKS = {"MLP": mlp, "CNN": cnn}


# Optimizers: each is a function from a learning rate to an optax transformation, and a function
# that returns the loss, the gradients and what else the transformation wants to know.


def with_lnb(loss_fn, params, batch):
    neurons = lnb.find_neurons(loss_fn, params, batch)

    def backprop(opt_state, params, batch):
        return lnb.backprop(loss_fn, neurons, opt_state=opt_state)(params, batch)

    return partial(lnb.lnb, neurons=neurons), backprop


def with_adam(loss_fn, params, batch):
    del params, batch

    def backprop(opt_state, params, batch):
        del opt_state
        return *jax.value_and_grad(loss_fn)(params, batch), None

    return lambda rate: optax.with_extra_args_support(optax.adam(rate)), backprop


OPTIMIZERS = {"lnb": with_lnb, "adam": with_adam}


# Training


class Programs(NamedTuple):
    """The compiled programs of one network with one optimizer."""

    init: Callable  # (learning_rate, seed) -> state
    step: Callable  # (learning_rate, state, batch) -> state, loss
    accuracy: Callable  # (state, data) -> accuracy


def compile_programs(network: str, optimizer: str, data: Data) -> Programs:
    """Compiles once for all learning rates and seeds, so that no run's seconds include it."""

    def init_model(seed):
        return NETWORKS[network](jax.random.key(seed))

    params, static = eqx.partition(init_model(0), eqx.is_inexact_array)

    def predict(params, images):
        return jax.vmap(eqx.combine(params, static))(images)

    def loss_fn(params, batch):
        logits = predict(params, batch.images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    batch = jax.tree.map(lambda x: x[:BATCH_SIZE], data)
    make_optimizer, backprop = OPTIMIZERS[optimizer](loss_fn, params, batch)

    @jax.jit
    def init(learning_rate, seed):
        params = eqx.filter(init_model(seed), eqx.is_inexact_array)
        return params, make_optimizer(learning_rate).init(params)

    @jax.jit
    def step(learning_rate, state, batch):
        params, opt_state = state
        loss, grads, features = backprop(opt_state, params, batch)
        optimizer = make_optimizer(learning_rate)
        updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
        return (optax.apply_updates(params, updates), opt_state), loss

    @jax.jit
    def accuracy(state, data):
        return (predict(state[0], data.images).argmax(-1) == data.labels).mean()

    compiled = step.lower(0.1, init(0.1, 0), batch).compile()
    jax.block_until_ready(compiled(0.1, init(0.1, 0), batch))  # a program's first call is slower
    return Programs(init, compiled, accuracy)


@dataclass
class Run:
    """One training run, epoch by epoch."""

    learning_rate: float
    seed: int
    seconds: list[float] = field(default_factory=list)  # spent in training steps so far
    loss: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)

    def first(self, values) -> float:
        """The first of `values`, one an epoch, at which test accuracy has reached the target."""
        return next((v for v, a in zip(values, self.test, strict=True) if a >= TARGET), inf)


def batches(data: Data, rng: np.random.Generator) -> list[Data]:
    """One epoch in random order; the last, smaller batch is left out."""
    count = len(data.labels) // BATCH_SIZE
    order = rng.permutation(len(data.labels))[: count * BATCH_SIZE]
    return [Data(data.images[i], data.labels[i]) for i in order.reshape(count, BATCH_SIZE)]


def train(programs: Programs, learning_rate: float, seed: int, data: list[Data]):
    """Yields the run after every epoch."""
    training, validation, test = data
    run = Run(learning_rate, seed)
    rng = np.random.default_rng(seed)
    state = programs.init(learning_rate, seed)
    seconds = 0.0
    for _ in range(EPOCHS):
        losses = []
        start = time.perf_counter()
        for batch in batches(training, rng):
            state, loss = programs.step(learning_rate, state, batch)
            losses.append(loss)
        jax.block_until_ready(state)
        seconds += time.perf_counter() - start
        run.seconds.append(seconds)
        run.loss.append(mean(map(float, losses)))
        run.validation.append(float(programs.accuracy(state, validation)))
        run.test.append(float(programs.accuracy(state, test)))
        yield run


def train_all(data: list[Data], console: Console) -> dict[tuple[str, str], list[Run]]:
    """All runs, by network and optimizer."""
    runs = {}
    total = len(NETWORKS) * EPOCHS * len(SEEDS) * sum(map(len, LEARNING_RATES.values()))
    columns = BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeRemainingColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=total)
        for network, optimizer in product(NETWORKS, OPTIMIZERS):
            title = f"{network} with {optimizer}"
            progress.update(task, description=f"{title}: compiling")
            programs = compile_programs(network, optimizer, data[0])
            runs[network, optimizer] = []
            for learning_rate, seed in product(LEARNING_RATES[optimizer], SEEDS):
                for run in train(programs, learning_rate, seed, data):
                    status = f"rate {learning_rate:g}, seed {seed}: {run.validation[-1]:.1%}"
                    progress.update(task, advance=1, description=f"{title}, {status}")
                runs[network, optimizer].append(run)
    return runs


# Results


def best(runs: list[Run]) -> list[Run]:
    """The runs, one a seed, with the learning rate whose validation accuracy is best.

    The mean is over epochs and seeds: a good rate is fast as well as accurate.
    """

    def at(rate):
        return [run for run in runs if run.learning_rate == rate]

    def score(rate):
        return mean(mean(run.validation) for run in at(rate))

    return at(max({run.learning_rate for run in runs}, key=score))


def make_table(results: dict[tuple[str, str], list[Run]]) -> Table:
    table = Table(title="Handwritten digits, test images: medians over seeds")
    for name in ("network", "optimizer", "learning rate"):
        table.add_column(name)
    for name in (f"epochs to {TARGET:.0%}", f"seconds to {TARGET:.0%}", "final accuracy"):
        table.add_column(name, justify="right")
    for (network, optimizer), runs in results.items():
        epochs = median(run.first(range(1, EPOCHS + 1)) for run in runs)
        seconds = median(run.first(run.seconds) for run in runs)
        table.add_row(
            network,
            optimizer,
            f"{runs[0].learning_rate:g}",
            f"{epochs:g}" if epochs < inf else "not reached",
            f"{seconds:.2f}" if seconds < inf else "not reached",
            f"{median(run.test[-1] for run in runs):.1%}",
        )
    return table


def save_figure(results: dict[tuple[str, str], list[Run]], path: Path) -> None:
    """Training loss by epoch and test accuracy by time, one line a seed."""
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = dict(zip(NETWORKS, figure.subplots(len(NETWORKS), 2), strict=True))
    colors = dict(zip(OPTIMIZERS, ("tab:red", "tab:blue"), strict=True))
    for (network, optimizer), runs in results.items():
        left, right = axes[network]
        for run in runs:
            style = {"color": colors[optimizer], "alpha": 0.7, "lw": 1.2}
            style["label"] = None if run is not runs[0] else f"{optimizer}({run.learning_rate:g})"
            left.semilogy(range(1, EPOCHS + 1), run.loss, **style)
            right.plot(run.seconds, run.test, **style)
        left.set(title=f"{network}: training loss", xlabel="epoch")
        right.set(title=f"{network}: test accuracy", xlabel="seconds of training", ylim=(0.9, 1))
        right.axhline(TARGET, color="gray", ls=":", lw=1)
        left.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    console = Console()
    console.print(
        f"Seeds {SEEDS}, {EPOCHS} epochs of batches of {BATCH_SIZE} a run. "
        f"Learning rates tried: {LEARNING_RATES}."
    )
    runs = train_all(load_data(), console)
    results = {key: best(value) for key, value in runs.items()}
    console.print(make_table(results))
    console.print(
        "The learning rate has the best mean validation accuracy over epochs and seeds. "
        "Seconds are those of training steps, without compiling and evaluating."
    )
    save_figure(results, FIGURE)
    console.print(f"Curves: {FIGURE.resolve()}")


if __name__ == "__main__":
    main()
