"""Neurons: which parameters of a network form which linear function."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ._cost import CG_PRODUCTS, EVERY, backprop_flops, predict
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
from ._packed import WHOLE
from ._table import render

ROWS = 0.5  # positions for every input, at least, where they are thinned out: turns add to them

COSTLY = 1e9  # flops of a step that a user will notice

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
      postponed: with that, whether a gram is left to the solver, at the neuron's turn, since the
        features take little more memory.
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
    postponed: bool = dataclasses.field(default=False, repr=False)
    moment_flops: float = dataclasses.field(default=0.0, repr=False)  # of all positions
    product_flops: float = dataclasses.field(default=0.0, repr=False)  # with M, without a gram


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
        found = [neuron for neuron in self if name in (neuron.name, neuron.weight)]
        if len(found) == 1:
            return found[0]
        if found:
            slices = [neuron.name for neuron in found]
            raise KeyError(f"slices of {name!r} are neurons of their own. Ask for one of {slices}")
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
    statistics_share: float = 0.025,
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
      statistics_share: what second moments may cost, as a share of the flops of backpropagation
        through the whole network. Where they would cost more, `backprop(..., opt_state=opt_state)`
        takes those that cost most from every `Neuron.stride`-th example; `math.inf` is all
        examples.
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
        raise ValueError(f"statistics_share should be positive, such as 0.025: {statistics_share}.")
    trace = trace_loss(loss_fn, params, args, kwargs, has_aux)
    _, claims, unclaimed = claim(trace, exclude)
    fed: dict[Any, list[Claim]] = {}
    for c in claims:
        fed.setdefault(_sources(c), []).append(c)
    groups = [_fed_alike(group, trace, metric, turn) for turn, group in enumerate(fed.values())]
    share = _largest_share(groups, statistics_share)
    neurons = {id(c): neuron for group in groups for c, neuron in group.thinned(share)}
    found = Neurons(
        tuple(neurons[id(c)] for c in claims),
        tuple((trace.names[i], reason) for i, reason in sorted(unclaimed.items())),
        tuple(zip(trace.names, trace.shapes, strict=True)),
    )
    _warn(found)
    return found


def _warn(neurons: Neurons) -> None:
    """Says what a user would otherwise find out by waiting."""
    single = [n.name for n in neurons if n.n == 1 and n.d_in > 1 and n.kind in {"dense", "conv"}]
    if single:
        warnings.warn(
            f"the neurons {', '.join(single)} see a single position. How M is held depends on how "
            "many there are: call find_neurons on a batch as large as those of training.",
            stacklevel=3,
        )
    costs = {neuron.name: predict(neuron).total for neuron in neurons}
    total, whole = sum(costs.values()), sum(map(backprop_flops, neurons))
    if total > max(whole, COSTLY):
        largest = max(costs, key=lambda name: costs[name])
        warnings.warn(
            f"a step is predicted to cost {total / whole:.0f} times the flops of backpropagation, "
            f"beside it, most of them for {largest!r}. Use a larger batch, or leave such neurons "
            f"out: find_neurons(..., exclude={largest!r}).",
            stacklevel=3,
        )


def claim(trace: Trace, exclude: Exclude) -> tuple[Lineage, list[Claim], dict[int, str]]:
    """The static pass over a traced loss."""
    lineage = trace_lineage(trace.body, len(trace.parameters))
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


@dataclasses.dataclass(frozen=True)
class _FedAlike:
    """Neurons that are fed by the same arrays. What they share is computed for all at once."""

    neurons: list[tuple[Claim, Neuron]]
    longest: int  # the most that their stride may be

    @functools.cached_property
    def flops(self) -> float:
        """Of their moments in one step, were they taken at all positions."""
        grams = (neuron.moment_flops for _, neuron in self.neurons if neuron.metric == "gram")
        return max(grams, default=0.0) / EVERY

    @functools.cached_property
    def backprop(self) -> float:
        return max(1.0, sum(backprop_flops(neuron) for _, neuron in self.neurons))

    def stride(self, share: float) -> int:
        """That with which the moments take no more than a share of the neurons' own flops."""
        return max(1, min(math.ceil(self.flops / self.backprop / share - 1e-6), self.longest))

    def thinned(self, share: float) -> list[tuple[Claim, Neuron]]:
        """The neurons with their stride, and each with its part of the moments' flops."""
        grams = sum(neuron.metric == "gram" for _, neuron in self.neurons)
        if not grams:
            return self.neurons
        first: dict[Any, str] = {}
        return [
            (
                c,
                dataclasses.replace(
                    neuron,
                    stride=self.stride(share),
                    moment_flops=neuron.moment_flops / grams,
                    gram=first.setdefault(_moments(c, neuron), neuron.name),
                ),
            )
            for c, neuron in self.neurons
        ]


def _fed_alike(claims: list[Claim], trace: Trace, metric: str, turn: int) -> _FedAlike:
    neurons = [(c, _neuron(c, trace, metric, turn)) for c in claims]
    grams = [c for c, neuron in neurons if neuron.metric == "gram"]
    if not grams or any(c.sharded for c in grams):
        return _FedAlike(neurons, longest=1)
    rows = min(int(neuron.n / (ROWS * neuron.layout.inputs)) for _, neuron in neurons)
    strides = [arrange(site, c).longest_stride() for c in grams for site in c.feeding]
    return _FedAlike(neurons, longest=min(rows, *strides))


def _largest_share(groups: list[_FedAlike], share: float) -> float:
    """What moments may take of their own neurons' flops, if all take `share` of all flops.

    At least `share`; more, where others take less.
    """
    within = share * sum(group.backprop for group in groups)
    possible = {
        group.flops / group.backprop / stride
        for group in groups
        for stride in range(1, group.stride(share))
    }
    total = lambda share: sum(group.flops / group.stride(share) for group in groups)
    return max((s for s in possible if total(s) <= within), default=share)


def _moments(c: Claim, neuron: Neuron) -> Any:
    """What a neuron's M is made of; the same for neurons that have the same."""
    if neuron.metric != "gram":
        return neuron.name
    sites = [(site.fed_by, arrange(site, c)) for site in c.feeding]
    return c.bias is None, frozenset(sites)


def orientations(c: Claim) -> list[Claim]:
    """The sites of a weight used in two orientations, where a gram for each is the cheaper M.

    That is, cheaper than the products of `lnb.CG` with the features themselves.
    """
    sides = c.orientations
    features = sum(4.0 * side.n * _entries(side) for side in sides if side.kind != "lookup")
    grams = sum(_moment_flops(side) + CG_PRODUCTS * _product_flops(side) for side in sides)
    return sides if grams < CG_PRODUCTS * features else []


def _neuron(c: Claim, trace: Trace, metric: str, turn: int) -> Neuron:
    sides = orientations(c)
    return Neuron(
        name=trace.names[c.weight] + c.suffix,
        weight=trace.names[c.weight],
        bias=None if c.bias is None else trace.names[c.bias],
        kind=c.kind,
        metric=_choose(c, metric),
        postponed=metric == "auto" and _is_small(c),
        d_in=c.d_in,
        d_out=c.d_out,
        sites=len(c.sites),
        n=c.n,
        layout=c.layout,
        bias_layout=c.bias_layout,
        has_gram=c.has_gram,
        turn=turn,
        gram=trace.names[c.weight] + c.suffix,
        moment_flops=sum(map(_moment_flops, [c] if c.has_gram else sides)),
        product_flops=sum(map(_product_flops, sides)) or 4.0 * c.n * _entries(c),
    )


def _moment_flops(c: Claim) -> float:
    return sum(
        arrange(site, c).flops(site.features[0].aval.shape) * math.prod(site.loops)
        for site in c.feeding
    )


def _product_flops(c: Claim) -> float:
    """Of a product with its gram."""
    return _entries(c) * (1.0 if c.kind in {"lookup", "scale"} else 2.0 * c.layout.inputs)


def _entries(c: Claim) -> int:
    return c.layout.blocks * c.layout.inputs * c.layout.outputs


def _is_small(c: Claim) -> bool:
    """Whether backpropagation keeps a neuron's features, in at most twice the memory of its M."""
    if not c.has_gram or c.kind not in {"dense", "conv"} or c.layout.inputs <= WHOLE:
        return False
    kept = all(site.scope.kept for site in c.feeding)
    features = sum(math.prod(site.features[0].aval.shape) for site in c.feeding)
    return kept and features <= 2 * c.layout.blocks * c.layout.inputs**2


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
