"""Neurons: which parameters of a network form which linear function."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ._cost import EVERY, backprop_flops
from ._interpret import (
    Claim,
    Layout,
    Lineage,
    Trace,
    arrange,
    make_claims,
    path_name,
    trace_lineage,
    trace_loss,
)
from ._table import render

ROWS = 0.5  # positions for every input, at least, where they are thinned out: turns add to them

METRICS = ("auto", "matrix-free", "gram")
Exclude = str | Callable[[str], bool] | None


@dataclasses.dataclass(frozen=True)
class Neuron:
    """A function linear in its parameters: a weight, and a bias where there is one.

    Attributes:
      name: what the table and the diagnostics call it: the weight's key path, and which slice of
        it where slices of one weight are neurons of their own.
      weight: the key path of the weight.
      bias: the key path of the bias, or `None`.
      kind: `"dense"`, `"conv"`, `"lookup"`, `"scale"` or `"identity"` (M = I by definition).
      metric: how M is held: `"gram"`, `"matrix-free"` or `"identity"`.
      d_in: the number of inputs (of a convolution, filter taps times channels).
      d_out: the number of outputs.
      sites: at how many places in the program it is applied.
      n: the number of positions at which one output unit is computed.
      stride: with `backprop(..., opt_state=opt_state)`, M comes from every so many examples.
    """

    name: str
    weight: str
    bias: str | None
    kind: str
    metric: str
    d_in: int
    d_out: int
    sites: int
    n: int
    layout: Layout = dataclasses.field(repr=False)
    bias_layout: Layout | None = dataclasses.field(repr=False)
    has_gram: bool = dataclasses.field(repr=False)
    turn: int = dataclasses.field(default=0, repr=False)  # the same where fed by the same arrays
    gram: str = dataclasses.field(default="", repr=False)  # the neuron whose M is also this one's
    stride: int = 1
    moment_flops: float = dataclasses.field(default=0.0, repr=False)  # of all positions


@dataclasses.dataclass(frozen=True)
class Neurons:
    """The neurons of a network, as `find_neurons` found them: immutable and hashable.

    Attributes:
      unclaimed: (key path, reason) for each parameter that nothing could claim. They are trained
        all the same, with the identity for a metric.
    """

    neurons: tuple[Neuron, ...]
    unclaimed: tuple[tuple[str, str], ...]
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    def __iter__(self) -> Iterator[Neuron]:
        return iter(self.neurons)

    def __len__(self) -> int:
        return len(self.neurons)

    def __getitem__(self, name: str) -> Neuron:
        for neuron in self.neurons:
            if name in (neuron.name, neuron.weight):
                return neuron
        raise KeyError(f"no neuron has the weight {name!r}. There are: {[n.name for n in self]}")

    def __repr__(self) -> str:
        return render(self)

    def labels(self, params: Any) -> Any:
        """A label for each parameter, for `optax.partition`.

        `"lnb"` for the parameters of neurons that have a metric to solve for, `"identity"` for
        the others and for what is unclaimed.
        """
        solved = {n.weight for n in self if n.kind != "identity"}
        solved |= {n.bias for n in self if n.kind != "identity" and n.bias is not None}
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "lnb" if path_name(path) in solved else "identity", params
        )


def find_neurons(
    loss_fn: Callable[..., Any],
    params: Any,
    *args: Any,
    has_aux: bool = False,
    metric: str = "auto",
    exclude: Exclude = None,
    statistics_share: float = 0.02,
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
      metric: how to hold M. `"gram"` is the second moment of the features, `"matrix-free"` the
        features themselves, `"auto"` whichever is cheaper.
      exclude: parameters to leave unclaimed: a regular expression searched for in key paths, or a
        function of the key path.
      statistics_share: what second moments may cost, as a share of the flops of backpropagation.
        Where they would cost more, `backprop(..., opt_state=opt_state)` takes them from every
        `Neuron.stride`-th example; `math.inf` is all examples.
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
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {METRICS}, not {metric!r}.")
    if not statistics_share > 0:
        raise ValueError(f"statistics_share should be positive, such as 0.02: {statistics_share}.")
    trace = trace_loss(loss_fn, params, args, kwargs, has_aux)
    _, claims, unclaimed = claim(trace, exclude)
    groups: dict[Any, list[Claim]] = {}
    for c in claims:
        groups.setdefault(_sources(c), []).append(c)
    neurons = {
        id(c): neuron
        for turn, group in enumerate(groups.values())
        for c, neuron in zip(
            group, _fed_alike(group, trace, metric, turn, statistics_share), strict=True
        )
    }
    return Neurons(
        tuple(neurons[id(c)] for c in claims),
        tuple((trace.names[i], reason) for i, reason in sorted(unclaimed.items())),
        tuple(zip(trace.names, trace.shapes, strict=True)),
    )


def claim(trace: Trace, exclude: Exclude) -> tuple[Lineage, list[Claim], dict[int, str]]:
    """The static pass over a traced loss."""
    lineage = trace_lineage(trace.jaxpr.jaxpr, trace.jaxpr.consts, len(trace.parameters))
    excluded = [_is_excluded(exclude, name) for name in trace.names]
    if isinstance(exclude, str) and not any(excluded):
        raise ValueError(f"exclude={exclude!r} is found in none of {', '.join(trace.names)}.")
    complex_ = [jnp.issubdtype(leaf.dtype, jnp.complexfloating) for leaf in trace.parameters]
    claims, unclaimed = make_claims(lineage, trace.shapes, excluded, complex_)
    for c in claims:
        if c.n == 0:
            raise ValueError(
                f"the batch is empty: the neuron {trace.names[c.weight]!r} is fed no features at "
                "all. Leave empty batches out."
            )
    return lineage, claims, unclaimed


def _is_excluded(exclude: Exclude, name: str) -> bool:
    if exclude is None:
        return False
    return bool(re.search(exclude, name)) if isinstance(exclude, str) else bool(exclude(name))


def _sources(c: Claim) -> Any:
    """The arrays that feed a neuron; one without sites is on its own."""
    sites = c.feeding
    return frozenset(site.fed_by for site in sites) if sites else id(c)


def _fed_alike(
    claims: list[Claim], trace: Trace, metric: str, turn: int, statistics_share: float
) -> list[Neuron]:
    """The neurons that some arrays feed. What they share is computed for all at once."""
    neurons = [_neuron(c, trace, metric, turn) for c in claims]
    grams = [c for c, neuron in zip(claims, neurons, strict=True) if neuron.metric == "gram"]
    if not grams:
        return neurons
    arranged = [(site, arrange(site, c)) for c in grams for site in c.feeding]
    # The moments' share of the flops, were they taken at all positions.
    flops = max(neuron.moment_flops for neuron in neurons)
    share = flops / EVERY / max(1.0, sum(map(backprop_flops, neurons)))
    rows = min(int(neuron.n / (ROWS * neuron.layout.inputs)) for neuron in neurons)
    stride = min(
        math.ceil(share / statistics_share), rows, *(a.longest_stride() for _, a in arranged)
    )
    sharded = any(c.sharded for c in grams)
    stride = 1 if sharded else max(1, stride)
    first: dict[Any, str] = {}
    return [
        dataclasses.replace(
            neuron,
            stride=stride,
            moment_flops=neuron.moment_flops / len(grams),
            gram=first.setdefault(_moments(c, neuron), neuron.name),
        )
        for c, neuron in zip(claims, neurons, strict=True)
    ]


def _moments(c: Claim, neuron: Neuron) -> Any:
    """What a neuron's M is made of; the same for neurons that have the same."""
    if neuron.metric != "gram":
        return neuron.name
    sites = [(site.fed_by, arrange(site, c)) for site in c.feeding]
    return c.bias is None, frozenset(sites)


def _neuron(c: Claim, trace: Trace, metric: str, turn: int) -> Neuron:
    return Neuron(
        name=trace.names[c.weight] + c.suffix,
        weight=trace.names[c.weight],
        bias=None if c.bias is None else trace.names[c.bias],
        kind=c.kind,
        metric=_choose(c, metric),
        d_in=c.d_in,
        d_out=c.d_out,
        sites=len(c.sites),
        n=c.n,
        layout=c.layout,
        bias_layout=c.bias_layout,
        has_gram=c.has_gram,
        turn=turn,
        gram=trace.names[c.weight] + c.suffix,
        moment_flops=sum(_moment_flops(site, c) for site in c.feeding) if c.has_gram else 0.0,
    )


def _moment_flops(site: Any, c: Claim) -> float:
    return arrange(site, c).flops(site.features[0].aval.shape) * math.prod(site.loops)


def _choose(c: Claim, metric: str) -> str:
    """How M is held. A gram must pay off in time (n > d), and not dwarf the weight in memory."""
    if c.kind == "identity":
        return "identity"
    if not c.has_gram:
        return "matrix-free"
    if c.sharded:
        return "gram"
    if metric != "auto":
        return metric
    if c.kind in {"lookup", "scale"}:
        return "gram"
    layout = c.layout
    entries, weights = layout.blocks * layout.inputs**2, math.prod(layout.shape)
    fits = entries <= max(2**22, 20 * weights)
    return "gram" if fits and c.n >= layout.inputs else "matrix-free"
