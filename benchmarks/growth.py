"""How a step's time grows with width, depth and batch, beside Adam's."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from lnb_experiments.experiments.layers import layer_norm, normal

from .contenders import ADAM, CONTENDERS, NEURON
from .counts import flops
from .steps import Runner, interleaved
from .workloads import Workload

WIDTHS = (64, 128, 256, 512, 1024)
DEPTHS = (2, 4, 8, 16, 24)
BATCHES = (32, 128, 512, 2048)
WIDTH, DEPTH, BATCH = 256, 4, 512


class Point(NamedTuple):
    """Medians over blocks: seconds a step, and flops a step, of Adam and LNB."""

    axis: str
    size: int
    adam_seconds: float
    lnb_seconds: float
    adam_flops: float
    lnb_flops: float


def residual_network(width: int = WIDTH, depth: int = DEPTH, batch: int = BATCH) -> Workload:
    """Blocks x + gelu(norm(x) W), all of one width."""
    keys = jax.random.split(jax.random.key(0), depth)
    params = [normal(key, (width, width), std=width**-0.5) for key in keys]
    x = np.random.default_rng(0).standard_normal((batch, width)).astype(np.float32)

    def loss_fn(params, x):
        for weight in params:
            x = x + jax.nn.gelu(layer_norm(x) @ weight)
        return jnp.mean(x**2)

    return Workload(loss_fn, params, (x,))


def grow(blocks: int, console: Console) -> list[Point]:
    """Measures all sizes, one dimension at a time."""
    series = {"width": WIDTHS, "depth": DEPTHS, "batch": BATCHES}
    points = []
    for axis, sizes in series.items():
        for size in sizes:
            console.print(f"{axis} {size} ...", style="dim")
            workload = residual_network(**{axis: size})
            times = interleaved({n: Runner(n, workload) for n in (ADAM, NEURON)}, blocks)
            counts = [flops(CONTENDERS[n], workload) for n in (ADAM, NEURON)]
            points.append(Point(axis, size, *(median(times[n]) for n in (ADAM, NEURON)), *counts))
    return points


def print_points(points: Sequence[Point], console: Console) -> None:
    table = Table("", "Adam, ms", "LNB, ms", "time, x Adam's", "flops, x Adam's")
    for p in points:
        table.add_row(
            f"{p.axis} {p.size}",
            f"{1e3 * p.adam_seconds:.2f}",
            f"{1e3 * p.lnb_seconds:.2f}",
            f"{p.lnb_seconds / p.adam_seconds:.2f}",
            f"{p.lnb_flops / p.adam_flops:.2f}",
        )
    console.print(f"{DEPTH} residual blocks of width {WIDTH}, a batch of {BATCH}, but for:")
    console.print(table)


def draw(points: Sequence[Point], path: Any) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for panel, axis in zip(panels, ("width", "depth", "batch"), strict=True):
        own = [p for p in points if p.axis == axis]
        sizes = [p.size for p in own]
        panel.plot(sizes, [1e3 * p.adam_seconds for p in own], "o-", label="Adam")
        panel.plot(sizes, [1e3 * p.lnb_seconds for p in own], "s-", label=NEURON)
        edge = {"width": BATCH, "batch": WIDTH}.get(axis)
        if edge:
            panel.axvline(edge, color="grey", linestyle="dashed", label="width = batch")
        panel.set(xscale="log", yscale="log", xlabel=axis)
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
    panels[0].set_ylabel("ms a step")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
