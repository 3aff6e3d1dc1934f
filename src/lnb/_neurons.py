"""Neurons: which parameters of a network form which linear function."""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

from . import _plan
from ._jaxpr import Claim, Lineage, Trace, make_claims, path_name, trace_lineage, trace_loss
from ._neuron import Neuron
from ._renamed import renamed

COSTLY = 1e9  # flops of a step that a user will notice

Exclude = str | Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class Neurons:
    """The neurons of a network, as `find_neurons` found them: immutable and hashable.

    Attributes:
      unclaimed: (key path, reason) for each parameter that nothing could claim. They are trained
        all the same, with the identity for a metric.
      shapes: (key path, shape) of each parameter.
      rows: `"auto"` or `"all"`, see `find_neurons`.
      has_aux: whether the loss returns a pair.
    """

    neurons: tuple[Neuron, ...]
    unclaimed: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    rows: str = "auto"
    has_aux: bool = False

    def __iter__(self) -> Iterator[Neuron]:
        return iter(self.neurons)

    def __len__(self) -> int:
        return len(self.neurons)

    def __getitem__(self, name: str) -> Neuron:
        found = [neuron for neuron in self if name in (neuron.name, neuron.weight)]
        if len(found) == 1:
            return found[0]
        if found:
            slices = [neuron.name for neuron in found]
            raise KeyError(f"slices of {name!r} are neurons of their own. Ask for one of {slices}")
        raise KeyError(f"no neuron has the weight {name!r}. There are: {[n.name for n in self]}")

    def __repr__(self) -> str:
        """A table, one row a neuron; below, what is unclaimed and why."""
        costs, whole = self.costs(), sum(map(_plan.backprop_flops, self)) or 1
        rows = [_HEAD, *(_cells(neuron, costs[neuron.name] / whole) for neuron in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        align = lambda head, cell, width: cell.ljust(width) if head in _TEXT else cell.rjust(width)
        lines = ["  ".join(map(align, _HEAD, row, widths)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = sum(costs.values()) / whole
        lines += ["", f"lnb.lnb adds about {total:.1%} to the flops of these layers."]
        if self.unclaimed:
            lines += ["", "unclaimed (identity metric):"]
            lines += [f"  {path}: {reason}" for path, reason in self.unclaimed]
        return "\n".join(lines)

    def costs(self, norm: str = "auto") -> dict[str, float]:
        """The flops that each neuron is predicted to add to a step of `lnb.lnb`, by name."""
        holders = _plan.holders(self)
        spectral = lambda neuron: norm == "auto" and _plan.is_orthogonalized(neuron)
        return {n.name: _plan.step_flops(n, spectral(n), holders[n.name] != n.name) for n in self}

    def labels(self, params: Any) -> Any:
        """A label for each parameter, for `optax.partition`.

        `"lnb"` for the parameters of neurons that have a metric to solve for, `"identity"` for
        the others and for what is unclaimed.
        """
        solved = {path for n in self if n.kind != "identity" for path in (n.weight, n.bias)}
        label = lambda path, _: "lnb" if path_name(path) in solved else "identity"
        return jax.tree_util.tree_map_with_path(label, params)

    def are_weights(self, params: Any) -> Any:
        """Which parameters are weights of layers or embeddings, for weight decay: a mask."""
        weights = {n.weight for n in self if n.kind in ("dense", "conv", "lookup")}
        is_weight = lambda path, _: path_name(path) in weights
        return jax.tree_util.tree_map_with_path(is_weight, params)


_HEAD = ("neuron", "kind", "d_in x d_out", "bias", "sites", "n", "rows", "cost")
_TEXT = ("neuron", "kind", "bias")  # the other columns are numbers


def _cells(neuron: Neuron, cost: float) -> tuple[str, ...]:
    """A row of the table."""
    name, share = neuron.name or "(the parameter)", f"{cost:.1%}"
    if not neuron.sites:
        return (name, neuron.kind, *"-----", share)
    size, bias, rows = f"{neuron.d_in} x {neuron.d_out}", neuron.bias or "-", neuron.rows or "-"
    return (name, neuron.kind, size, bias, str(neuron.sites), str(neuron.n), str(rows), share)


@renamed(statistics_share='rows="auto" keeps a sample, rows="all" keeps everything')
def find_neurons(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    rows: str = "auto",
    exclude: Exclude = None,
    **kwargs: Any,
) -> Neurons:
    """Finds the linear neurons of a network by following its parameters through the loss.

    The loss is traced once, abstractly: arrays and `jax.ShapeDtypeStruct` do alike. Nothing about
    the model is assumed: any pytree of parameters, any function that JAX can differentiate.

    Args:
      loss_fn: a function of parameters and batch that returns a scalar (or a scalar and auxiliary
        output, with `has_aux`), as for `jax.value_and_grad`.
      params: the parameters; the inexact arrays among its leaves are what is trained.
      *args: the other arguments of `loss_fn`, of the shapes that training will see.
      has_aux: whether `loss_fn` returns a pair.
      rows: how much of what a neuron is fed is kept for M. `"auto"`: examples that have about four
        positions for every input. `"all"`: everything, for exact metrics.
      exclude: parameters to leave unclaimed: a regular expression searched for in key paths, or a
        function of the key path.
      **kwargs: the other keyword arguments of `loss_fn`.

    Returns:
      The `Neurons`. Print it.

    >>> import jax, jax.numpy as jnp, lnb
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)
    >>> params = {"w": jnp.ones((3, 5)), "b": jnp.zeros((5,)), "v": jnp.ones((5, 2))}
    >>> neurons = lnb.find_neurons(loss_fn, params, jnp.ones((8, 3)), jnp.ones((8, 2)))
    >>> [(neuron.weight, neuron.bias, neuron.kind) for neuron in neurons]
    [('w', 'b', 'dense'), ('v', None, 'dense')]
    """
    if rows not in ("auto", "all"):
        raise ValueError(f'rows must be "auto" or "all", not {rows!r}.')
    trace = trace_loss(loss_fn, params, args, kwargs, has_aux)
    _, claims, unclaimed = claim(trace, exclude, rows)
    numbers: dict[Any, int] = {}
    fed = [numbers.setdefault(c.sources or id(c), len(numbers)) for c in claims]
    found = Neurons(
        tuple(dataclasses.replace(c.neuron, fed=k) for c, k in zip(claims, fed, strict=True)),
        tuple((trace.names[i], reason) for i, reason in sorted(unclaimed.items())),
        tuple(zip(trace.names, trace.shapes, strict=True)),
        rows,
        has_aux,
    )
    _warn(found)
    return found


def claim(trace: Trace, exclude: Exclude, rows: str) -> tuple[Lineage, list[Claim], dict[int, str]]:
    """The static pass over a traced loss."""
    lineage = trace_lineage(trace.body, len(trace.parameters))
    search = re.compile(exclude).search if isinstance(exclude, str) else exclude
    excluded = [search is not None and bool(search(name)) for name in trace.names]
    if isinstance(exclude, str) and not any(excluded):
        raise ValueError(f"exclude={exclude!r} is found in none of {', '.join(trace.names)}.")
    claims, unclaimed = make_claims(lineage, trace, excluded, rows)
    for c in claims:
        if c.neuron.n == 0:
            raise ValueError(
                f"the batch is empty: the neuron {c.neuron.weight!r} is fed no features at "
                "all. Leave empty batches out."
            )
    return lineage, claims, unclaimed


def _warn(neurons: Neurons) -> None:
    """Says what a user would otherwise find out by waiting."""
    single = [n.name for n in neurons if n.n == 1 and n.d_in > 1 and n.kind in {"dense", "conv"}]
    if single:
        warnings.warn(
            f"the neurons {', '.join(single)} see a single position. Call find_neurons on a batch "
            "as large as those of training. If that is one example, M is hard to estimate: use a "
            'larger batch, or norm="neuron".',
            stacklevel=4,
        )
    costs = neurons.costs()
    total, whole = sum(costs.values()), sum(map(_plan.backprop_flops, neurons))
    if total > max(whole, COSTLY):
        largest = max(costs, key=lambda name: costs[name])
        warnings.warn(
            f"a step is predicted to cost {total / whole:.0f} times the flops of backpropagation, "
            f"beside it, most of them for {largest!r}. Use a larger batch, or leave such neurons "
            f"out: find_neurons(..., exclude={largest!r}).",
            stacklevel=4,
        )
