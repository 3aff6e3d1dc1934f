"""How `Neurons` print: a table that a person can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._neurons import Neuron, Neurons


def render(neurons: Neurons) -> str:
    """One row a neuron; below, what is unclaimed and why."""
    costs = {neuron.name: _cost(neuron) for neuron in neurons}
    whole = sum(_backprop(n) + costs[n.name] for n in neurons) or 1
    head = ("neuron", "kind", "d_in x d_out", "bias", "sites", "n", "metric", "cost")
    rows = [
        (
            neuron.name or "(the parameter)",
            neuron.kind,
            f"{neuron.d_in} x {neuron.d_out}" if neuron.sites else "-",
            neuron.bias or "-",
            str(neuron.sites) if neuron.sites else "-",
            str(neuron.n) if neuron.sites else "-",
            neuron.metric,
            f"{costs[neuron.name] / whole:.1%}",
        )
        for neuron in neurons
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    right = {2, 4, 5, 7}
    line = lambda cells: "  ".join(
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
    lines = [line(head), line(["-" * width for width in widths]), *map(line, rows)]
    if neurons.unclaimed:
        lines += ["", "unclaimed (identity metric):"]
        lines += [f"  {path}: {reason}" for path, reason in neurons.unclaimed]
    return "\n".join(lines)


def _backprop(neuron: Neuron) -> float:
    """The flops of the forward and backward pass."""
    if neuron.kind in {"dense", "conv"}:
        return 6.0 * neuron.n * _weights(neuron)
    return 6.0 * neuron.n * neuron.d_out


def _weights(neuron: Neuron) -> int:
    return neuron.layout.blocks * neuron.layout.inputs * neuron.layout.outputs


def _cost(neuron: Neuron) -> float:
    """The flops of its statistics at every step: a gram, or three products with M."""
    if neuron.kind == "identity":
        return 0.0
    if neuron.kind in {"lookup", "scale"} and neuron.has_gram:
        return 2.0 * neuron.n * (neuron.layout.blocks if neuron.kind == "scale" else 1)
    if neuron.metric == "gram":
        return 2.0 * neuron.n * neuron.layout.blocks * neuron.layout.inputs**2
    return 12.0 * neuron.n * _weights(neuron)
