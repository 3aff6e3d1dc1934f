"""How `Neurons` print: a table that a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._cost import backprop_flops, is_orthogonalized, predict

if TYPE_CHECKING:
    from ._neurons import Neurons


def render(neurons: Neurons) -> str:
    """One row a neuron; below, what is unclaimed and why."""
    costs = {neuron.name: predict(neuron, spectral=is_orthogonalized(neuron)) for neuron in neurons}
    whole = sum(map(backprop_flops, neurons)) or 1
    head = ("neuron", "kind", "d_in x d_out", "bias", "sites", "n", "metric", "stride", "cost")
    rows = [
        (
            neuron.name or "(the parameter)",
            neuron.kind,
            f"{neuron.d_in} x {neuron.d_out}" if neuron.sites else "-",
            neuron.bias or "-",
            str(neuron.sites) if neuron.sites else "-",
            str(neuron.n) if neuron.sites else "-",
            neuron.metric,
            str(neuron.stride) if neuron.metric == "gram" else "-",
            f"{costs[neuron.name].total / whole:.1%}",
        )
        for neuron in neurons
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    right = {2, 4, 5, 7, 8}
    line = lambda cells: "  ".join(
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
    lines = [line(head), line(["-" * width for width in widths]), *map(line, rows)]
    total = sum(cost.total for cost in costs.values()) / whole
    lines += ["", f"A step of lnb.lnb costs about {total:.1%} more flops than backpropagation."]
    if neurons.unclaimed:
        lines += ["", "unclaimed (identity metric):"]
        lines += [f"  {path}: {reason}" for path, reason in neurons.unclaimed]
    return "\n".join(lines)
