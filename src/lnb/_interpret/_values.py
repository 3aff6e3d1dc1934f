"""What the static pass knows of each value in the program."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp

from . import _axes
from ._axes import Atom, Axes
from ._program import Chain, Step


@dataclasses.dataclass(frozen=True)
class Const:
    """Depends on neither parameters nor batch.

    `value` is set where it is known (a scalar, or a short range), `turns` where it is a known
    scalar at each turn of the innermost loop. An array that the loss closes over is `captured`: it
    may well be the data.
    """

    value: Any = None
    turns: Any = None
    captured: bool = False


@dataclasses.dataclass(frozen=True)
class Cut:
    """A slice of one of a parameter's atoms; `atom` is what is left of it."""

    source: Atom
    start: int
    stop: int
    stride: int
    atom: Atom | None


@dataclasses.dataclass(frozen=True)
class View:
    """Linear in one parameter alone.

    `axes` is `None` where the view is no mere rearrangement; `cuts` are the slices on its way,
    `stacked` the axes that loops slice it along, `scale` the constant that multiplies it.
    """

    parameter: int
    axes: Axes | None
    chains: tuple[Chain, ...] = (Chain(),)
    cuts: tuple[Cut, ...] = ()
    stacked: tuple[tuple[Atom, ...], ...] = ()
    scale: float = 1.0
    fraction: float = 1.0  # of the parameter's elements that it covers

    def then(self, step: Step | None, **changes: Any) -> View:
        if step is not None and "chains" not in changes:
            last = self.chains[-1]
            chain = dataclasses.replace(last, steps=(*last.steps, step))
            changes["chains"] = (*self.chains[:-1], chain)
        return dataclasses.replace(self, **changes)

    def turned(self, axis: int) -> dict[str, Any] | None:
        """What changes when a loop's counter indexes `axis`: as if the loop sliced the view."""
        *outer, last = self.chains
        if self.axes is None or not outer or last.steps or last.scanned:
            return None
        if not _axes.labels(self.axes[axis]) <= {"parameter"}:
            return None
        to_front = Step.make(f"moveaxis {axis} 0", lambda view: jnp.moveaxis(view, axis, 0))
        restore = Step.make(f"expand_dims {axis}", lambda view: jnp.expand_dims(view, axis))
        outer[-1] = dataclasses.replace(outer[-1], steps=(*outer[-1].steps, to_front))
        return {
            "chains": (*outer, Chain((restore,), scanned=True)),
            "axes": (*self.axes[:axis], (), *self.axes[axis + 1 :]),
            "stacked": (*self.stacked, self.axes[axis]),
        }

    def loop(self, scanned: bool) -> View:
        """The view as the body of a loop sees it."""
        changes: dict[str, Any] = {"chains": (*self.chains, Chain(scanned=scanned))}
        if scanned:
            usable = self.axes is not None and _axes.labels(self.axes[0]) <= {"parameter"}
            changes["axes"] = self.axes[1:] if self.axes is not None and usable else None
            changes["stacked"] = (*self.stacked, self.axes[0] if self.axes is not None else ())
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Entangled:
    """A function of parameters alone that is linear in none; harmless until it meets data."""

    parameters: frozenset[int]
    reason: str
    opaque: bool = False


@dataclasses.dataclass(eq=False)
class Roles:
    """Which of a weight's atoms tell blocks, inputs and outputs apart, in their order of layout."""

    blocks: list[Atom]
    inputs: list[Atom]
    outputs: list[Atom]

    def leaves(self) -> tuple[list[Atom], list[Atom], list[Atom]]:
        return _axes.leaves(self.blocks), _axes.leaves(self.inputs), _axes.leaves(self.outputs)


class Scope:
    """A jaxpr as it stands in the program: what is around it, and the jaxprs inside."""

    def __init__(self, loops: tuple[int, ...] = (), sharded: bool = False, kept: bool = True):
        self.loops = loops
        self.sharded = sharded
        self.kept = kept  # whether its values are there once it has run: not in loops and branches
        self.inner: dict[int, list[Scope]] = {}
        self.uses: collections.Counter[Any] = collections.Counter()  # of each variable

    def enter(
        self, index: int, *, loop: int | None = None, sharded: bool = False, kept: bool = False
    ) -> Scope:
        """A new scope for a jaxpr inside equation `index`."""
        loops = self.loops if loop is None else (*self.loops, loop)
        inner = Scope(loops, self.sharded or sharded, self.kept and kept)
        self.inner.setdefault(index, []).append(inner)
        return inner


@dataclasses.dataclass(eq=False)
class Site:
    """A place where a weight meets data linearly.

    `features` are the data's variables, `feature_axes` how their axes correspond to the weight's
    atoms (of their patches, for a convolution); `options` say how to take them, by kind.
    """

    kind: str
    view: View
    steps: tuple[Step, ...]  # from the view to the output
    scope: Scope
    features: tuple[Any, ...]  # variables; their product, where a scale meets several
    positions: int
    loops: tuple[int, ...]  # the trip counts of the loops around it
    roles: Roles | None = None
    feature_axes: Axes | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    output: Any = None  # the variable of its own output, `output_axes` as of the features
    output_axes: Axes | None = None
    after: tuple[Step, ...] = ()  # from the site's own output to where the bias is added
    bias: View | None = None
    bias_pairs: list[tuple[Atom, Atom]] = dataclasses.field(default_factory=list)

    @property
    def fed_by(self) -> tuple[int, ...]:
        """What tells its features from others: calls of one inner program have its variables."""
        return id(self.scope), *map(id, self.features)

    def count(self, depth: int = 0) -> int:
        """n, the positions at which one output unit is computed, within `depth` loops."""
        turns = 1
        for length, chain in zip(self.loops[depth:], self.view.chains[1 + depth :], strict=True):
            turns *= 1 if chain.scanned else length
        return self.positions * turns


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of exactly one site (plus data that no site puts out), seen through views."""

    site: Site
    axes: Axes
    steps: tuple[Step, ...] = ()


class _Mixed:
    """The sum, or a part, of site outputs: no bias can be told from it."""


MIXED = _Mixed()


@dataclasses.dataclass(frozen=True)
class Data:
    """Depends on the batch, or on parameters beyond their sites.

    `frozen` is set where it is a parameter under `stop_gradient`.
    """

    output: Output | _Mixed | None = None
    frozen: int | None = None


Value = Const | View | Entangled | Data


@dataclasses.dataclass(frozen=True)
class Use:
    """How a parameter is used: at a site, as a bias, added, or in a way that nothing can claim."""

    kind: str  # "site", "bias", "identity", "nonlinear", "opaque"
    site: Site | None = None
    reason: str = ""
