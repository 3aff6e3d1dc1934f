"""Linear Neuron Boosting beside AdamW and Muon, on four small tasks: `make demo`.

Each optimizer tries three learning rates with one seed. The rate with the lowest validation loss is
run again with three other seeds, and what is shown is the loss on test data. All have the same
steps, the same batches, and rates that warm up and then fall along a cosine. LNB has its defaults;
Muon trains the hidden matrices, with Adam at the same rate for everything else.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from demo_tasks import Network, Task, make_tasks
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import lnb

LEARNING_RATES = {
    "LNB": (0.003, 0.01, 0.03),
    "AdamW": (0.003, 0.01, 0.03),
    "Muon": (0.003, 0.01, 0.03),
}
TRIAL_SEED, SEEDS = 0, (1, 2, 3)  # one to choose the rate with, others for the results
STEPS, WARM_UP, EVALUATE_EVERY = 128, 16, 8
WEIGHT_DECAY = 0.1  # of AdamW and Muon, as is LNB's own: of matrices, not of biases
COLORS = {"LNB": "tab:red", "AdamW": "tab:blue", "Muon": "tab:green"}
FIGURE = Path("demo.png")


# Optimizers: from a loss, parameters, a batch and a schedule to an optax transformation, and a
# function that returns the loss, the gradients, and what else the transformation wants to know.


def with_lnb(loss_fn, params, batch, schedule):
    neurons = lnb.find_neurons(loss_fn, params, batch)
    backprop = lnb.backprop(loss_fn, neurons)

    def value_and_grad(params, batch):
        loss, grads, features = backprop(params, batch)
        return loss, grads, {"features": features}

    return lnb.lnb(schedule, neurons), value_and_grad


def plain(loss_fn):
    return lambda params, batch: (*jax.value_and_grad(loss_fn)(params, batch), {})


def with_adamw(loss_fn, params, batch, schedule):
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.adamw(schedule, weight_decay=WEIGHT_DECAY, mask=matrices), plain(loss_fn)


def with_muon(loss_fn, params, batch, schedule):
    """Muon for hidden matrices, Adam for all else, with steps of the same size in both."""

    def dimensions(params):
        hidden = lambda path, x: path[0].key == "hidden" and x.ndim == 2
        chosen = lambda path, x: optax.contrib.MuonDimensionNumbers() if hidden(path, x) else None
        return jax.tree_util.tree_map_with_path(chosen, params)

    optimizer = optax.contrib.muon(
        schedule,
        weight_decay=WEIGHT_DECAY,
        adam_weight_decay=WEIGHT_DECAY,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dimensions,
    )
    return optimizer, plain(loss_fn)


OPTIMIZERS = {"LNB": with_lnb, "AdamW": with_adamw, "Muon": with_muon}


# Training


def make(network: Network, optimizer: str, rate, params, batch):
    """An optimizer of that name. The rate is traced, so that one program serves all rates."""
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, WARM_UP, STEPS)
    return OPTIMIZERS[optimizer](network.loss, params, batch, lambda step: rate * shape(step))


@partial(jax.jit, static_argnums=0)
def init_params(network: Network, seed):
    return network.init(jax.random.key(seed))


@partial(jax.jit, static_argnums=(0, 1))
def init_optimizer(network: Network, optimizer: str, params, batch):
    return make(network, optimizer, 0.0, params, batch)[0].init(params)


def init(network: Network, optimizer: str, seed: int, batch):
    params = init_params(network, seed)
    return params, init_optimizer(network, optimizer, params, batch)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def train_step(network: Network, optimizer: str, rate, state, batch):
    params, opt_state = state
    transformation, value_and_grad = make(network, optimizer, rate, params, batch)
    _, grads, extra = value_and_grad(params, batch)
    updates, opt_state = transformation.update(grads, opt_state, params, **extra)
    return optax.apply_updates(params, updates), opt_state


@partial(jax.jit, static_argnums=0)
def evaluate(network: Network, params, data):
    return network.loss(params, data)


class Run(NamedTuple):
    """One training run: the loss at each evaluation, and the seconds spent until then."""

    rate: float
    loss: list[float]
    seconds: list[float]


def train(task: Task, optimizer: str, rate: float, seed: int, data: Any, every: int) -> Run:
    """Trains, and evaluates on `data` every so many steps. Only training steps are timed."""
    rng = np.random.default_rng(seed)
    network = task.network
    state = init(network, optimizer, seed, task.sample(rng))
    run = Run(rate, [float(evaluate(network, state[0], data))], [0.0])
    for _ in range(STEPS // every):
        batches = jax.device_put([task.sample(rng) for _ in range(every)])
        start = time.perf_counter()
        for batch in batches:
            state = train_step(network, optimizer, rate, state, batch)
        jax.block_until_ready(state)
        run.seconds.append(run.seconds[-1] + time.perf_counter() - start)
        run.loss.append(float(evaluate(network, state[0], data)))
    return run


def compile_programs(task: Task, optimizer: str) -> None:
    """Takes two steps, so that no run's seconds include compiling."""
    batch = jax.device_put(task.sample(np.random.default_rng(0)))
    state = init(task.network, optimizer, 0, batch)
    for _ in range(2):
        state = train_step(task.network, optimizer, 0.0, state, batch)
    jax.block_until_ready(state)


def best_rate(task: Task, optimizer: str, report: Callable) -> float:
    losses = {}
    for rate in LEARNING_RATES[optimizer]:
        run = train(task, optimizer, rate, TRIAL_SEED, task.validation, every=STEPS)
        losses[rate] = np.nan_to_num(run.loss[-1], nan=np.inf)
        report(f"{optimizer}, rate {rate:g}: validation loss {losses[rate]:.3f}")
    return min(losses, key=lambda rate: losses[rate])


def compare(task: Task, report: Callable) -> dict[str, list[Run]]:
    """The runs of each optimizer at its best rate, one a seed. `report` is told of each run."""
    rates = {}
    for optimizer in OPTIMIZERS:
        report(f"{optimizer}: compiling", advance=0)
        compile_programs(task, optimizer)
        rates[optimizer] = best_rate(task, optimizer, report)
    runs = {optimizer: [] for optimizer in OPTIMIZERS}
    for seed in SEEDS:  # the optimizers take turns: whatever else the machine does meets them all
        for optimizer, rate in rates.items():
            run = train(task, optimizer, rate, seed, task.test, EVALUATE_EVERY)
            runs[optimizer].append(run)
            report(f"{optimizer}, seed {seed}: test loss {run.loss[-1]:.3f}")
    return runs


def compare_all(tasks: list[Task], console: Console) -> list[dict[str, list[Run]]]:
    columns = BarColumn(), TextColumn("{task.completed}/{task.total} runs"), TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        runs_each = sum(len(rates) + len(SEEDS) for rates in LEARNING_RATES.values())
        bar = progress.add_task("", total=len(tasks) * runs_each)

        def report(task, text, advance=1):
            progress.update(bar, advance=advance, description=f"{task.title}: {text}")

        return [compare(task, partial(report, task)) for task in tasks]


# Results


class Curve(NamedTuple):
    """Medians over seeds, at each evaluation."""

    loss: np.ndarray
    seconds: np.ndarray

    @property
    def steps(self) -> np.ndarray:
        return EVALUATE_EVERY * np.arange(len(self.loss))

    def reach(self, target: float) -> tuple[str, str]:
        """Steps and seconds to a loss, "-" where it is never reached."""
        reached = np.flatnonzero(self.loss <= target)
        if not reached.size:
            return "-", "-"
        return str(self.steps[reached[0]]), f"{self.seconds[reached[0]]:.2f}"


def median(runs: list[Run]) -> Curve:
    over_seeds = partial(np.median, axis=0)
    return Curve(over_seeds([run.loss for run in runs]), over_seeds([run.seconds for run in runs]))


def make_table(tasks: list[Task], results: list[dict[str, list[Run]]]) -> Table:
    table = Table(title=f"Loss on test data after {STEPS} steps, medians of {len(SEEDS)} seeds")
    for name in ("task", "optimizer"):
        table.add_column(name, no_wrap=True)
    for name in ("rate", "test loss", "ms a step", "steps to AdamW's", "seconds to AdamW's"):
        table.add_column(name, justify="right")
    for task, runs in zip(tasks, results, strict=True):
        target = median(runs["AdamW"]).loss[-1]
        for optimizer, own in runs.items():
            curve = median(own)
            numbers = f"{curve.loss[-1]:.3f}", f"{1000 * curve.seconds[-1] / STEPS:.1f}"
            table.add_row(task.title, optimizer, f"{own[0].rate:g}", *numbers, *curve.reach(target))
        table.add_section()
    return table


def draw(axis: Axes, x: np.ndarray, runs: list[Run], optimizer: str) -> None:
    """A line for the median of the seeds, a band from the lowest to the highest."""
    losses, color = [run.loss for run in runs], COLORS[optimizer]
    front = 3 if optimizer == "LNB" else 2
    axis.fill_between(x, np.min(losses, 0), np.max(losses, 0), color=color, alpha=0.15, lw=0)
    label = f"{optimizer}, rate {runs[0].rate:g}"
    axis.semilogy(x, median(runs).loss, color=color, lw=2, zorder=front, label=label)


def finish(axis: Axes, target: float) -> None:
    """A dotted line at AdamW's last loss, and numbers rather than powers of ten beside the axis."""
    axis.axhline(target, color=COLORS["AdamW"], ls=":", lw=1.2)
    axis.set_xlim(0)
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
    axis.grid(alpha=0.25)


def save_figure(tasks: list[Task], results: list[dict[str, list[Run]]]) -> None:
    """One column a task: test loss by steps above, by seconds below."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    columns = figure.subplots(2, len(tasks)).T
    for (above, below), task, runs in zip(columns, tasks, results, strict=True):
        for optimizer, own in runs.items():
            draw(above, median(own).steps, own, optimizer)
            draw(below, median(own).seconds, own, optimizer)
        for axis, name in ((above, "steps"), (below, "seconds")):
            finish(axis, median(runs["AdamW"]).loss[-1])
            axis.set_xlabel(name)
        above.set_title(f"{task.title}: {task.unit}")
        above.legend()
    columns[0, 0].set_ylabel("test loss by step")
    columns[0, 1].set_ylabel("test loss by time")
    figure.savefig(FIGURE, dpi=110)


def main() -> None:
    start = time.perf_counter()
    console = Console()
    console.print(" ".join((__doc__ or "").split()))
    tasks = make_tasks()
    results = compare_all(tasks, console)
    save_figure(tasks, results)
    console.print(make_table(tasks, results))
    console.print(
        "The last two columns: when each had the loss that AdamW ends with (- is never). Seconds "
        "are those of training steps, without compiling and evaluating."
    )
    console.print(f"Curves: {FIGURE}. All of it took {time.perf_counter() - start:.0f} seconds.")


if __name__ == "__main__":
    main()
