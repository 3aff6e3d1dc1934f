"""What the walk knows of each value in the program."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from .._features import Axes, Axis, Chain, Dim, Layout, Program, Step, dims


@dataclasses.dataclass(frozen=True)
class Const:
    """Depends on neither parameters nor batch.

    Attributes:
      numbers: where it is known to be one number, repeated: that number, or one for each iteration
        of the innermost loop, in an array of one dimension.
      captured: whether it is an array that the loss closes over: it may well be the data.
      is_range: whether it is 0, 1, 2, ...
    """

    numbers: Any = None
    captured: bool = False
    is_range: bool = False

    @property
    def number(self) -> Any:
        """The number, where it is known and the same in all iterations."""
        return self.numbers[0] if self.numbers is not None and len(self.numbers) == 1 else None


@dataclasses.dataclass(frozen=True)
class View:
    """Linear in one parameter alone.

    Attributes:
      axes: which elements of the parameter stand where; `None` where it is no mere rearrangement.
      offset: the first element of the parameter that is in the view.
      chains: the equations on the way, level by level of the loops around.
      loops: of each loop around, the dims that it slices the view along; empty if it does not.
      scale: the constant that multiplies it.
      fraction: how much of the parameter's elements it covers.
      repeats: how many times it is repeated, where the axes do not tell.
    """

    parameter: int
    axes: Axes | None
    offset: int = 0
    chains: tuple[Chain, ...] = (Chain(),)
    loops: tuple[Axis, ...] = ()
    scale: float = 1.0
    fraction: float = 1.0
    repeats: int = 1

    def then(self, step: Step, **changes: Any) -> View:
        """The view after one more equation."""
        if "chains" not in changes:
            *outer, last = self.chains
            last = dataclasses.replace(last, steps=(*last.steps, step))
            changes["chains"] = (*outer, last)
        return dataclasses.replace(self, **changes)

    def iterated(self, axis: int) -> dict[str, Any] | None:
        """What changes when a loop's counter indexes `axis`: as if the loop sliced the view."""
        *outer, last = self.chains
        if self.axes is None or not outer or last.steps or last.scanned:
            return None
        if not dims.of_elements(self.axes[axis]):
            return None
        to_front = Step(lambda view: jnp.moveaxis(view, axis, 0), f"moveaxis {axis} 0")
        restore = Step(lambda view: jnp.expand_dims(view, axis), f"expand_dims {axis}")
        outer[-1] = dataclasses.replace(outer[-1], steps=(*outer[-1].steps, to_front))
        return {
            "chains": (*outer, Chain((restore,), scanned=True)),
            "axes": (*self.axes[:axis], (), *self.axes[axis + 1 :]),
            "loops": (*self.loops[:-1], self.axes[axis]),
        }

    def inside(self, scanned: bool) -> View:
        """The view as the body of a loop sees it."""
        chains, axes, sliced = (*self.chains, Chain(scanned=scanned)), self.axes, ()
        if scanned and axes is not None:
            sliced, axes = axes[0], axes[1:] if dims.of_elements(axes[0]) else None
        return dataclasses.replace(self, chains=chains, axes=axes, loops=(*self.loops, sliced))


@dataclasses.dataclass(frozen=True)
class Entangled:
    """A function of parameters alone that is linear in none; harmless until it meets data."""

    parameters: frozenset[int]
    reason: str
    opaque: bool = False


class Scope:
    """A program as it stands in the whole: the loops around it, and the programs inside."""

    def __init__(self, loops: tuple[int, ...] = ()):
        self.loops = loops
        self.inner: dict[int, list[Scope]] = {}
        self.uses: collections.Counter[Any] = collections.Counter()  # of each variable

    def enter(self, index: int, *loop: int) -> Scope:
        """A new scope for a program inside equation `index`, perhaps in a loop of some length."""
        inner = Scope((*self.loops, *loop))
        self.inner.setdefault(index, []).append(inner)
        return inner


@dataclasses.dataclass(eq=False)
class Site:
    """A place where a weight meets data linearly.

    Attributes:
      kind: `"dense"`, `"conv"`, `"lookup"` or `"scale"`.
      view: of the weight.
      steps: from the view to the site's output.
      scope: where it stands.
      features: the data's variables; their product, where a scale meets several.
      feature_axes: the axes of the features (of a convolution, of their patches), as dims of the
        weight; those of stride 0 are positions.
      roles: which of the weight's dims are blocks, inputs, outputs; `None` where it has no matrix
        form.
      options: how to take the features, by kind.
      output: the variable of its output, `output_axes` as of the features.
      after: the steps from its output to where the bias is added.
      bias: the view of the bias.
      bias_pairs: the dims of its outputs, each with that of the bias.
    """

    kind: str
    view: View
    steps: tuple[Step, ...]
    scope: Scope
    features: tuple[Any, ...]
    feature_axes: Axes
    roles: tuple[Axis, Axis, Axis] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    output: Any = None
    output_axes: Axes | None = None
    after: tuple[Step, ...] = ()
    bias: View | None = None
    bias_pairs: list[tuple[Dim, Dim]] = dataclasses.field(default_factory=list)

    @property
    def positions(self) -> int:
        """How many there are in one iteration of the loops around."""
        if self.output.aval.size == 0:  # of an empty batch, which axes do not tell from one example
            return 0
        return dims.size(dim for dim in dims.flatten(self.feature_axes) if not dim.stride)

    @property
    def fed_by(self) -> tuple[int, ...]:
        """What tells its features from others: calls of one inner program have its variables."""
        return id(self.scope), *map(id, self.features)

    def count(self, depth: int = 0) -> int:
        """n, the positions at which one output unit is computed, within `depth` loops."""
        total = self.positions
        inner = zip(self.scope.loops[depth:], self.view.chains[1 + depth :], strict=True)
        for length, chain in inner:
            total *= 1 if chain.scanned else length
        return total

    def program(self, layout: Layout, bias_layout: Layout | None) -> Program:
        """The map from weight and bias to its outputs."""
        *outer, last = self.view.chains
        steps = (*last.steps, *self.steps, *self.after)
        weight = (*outer, dataclasses.replace(last, steps=steps))
        if self.bias is None:
            return Program(weight, (), layout, None, self.view.fraction)
        return Program(weight, self.bias.chains, layout, bias_layout, self.view.fraction)


@dataclasses.dataclass(frozen=True)
class Output:
    """The output of exactly one site (plus data that no site puts out), seen through views.

    Attributes:
      scale: the constant that multiplies it.
    """

    site: Site
    axes: Axes
    steps: tuple[Step, ...] = ()
    scale: float = 1.0

    @property
    def view(self) -> View:
        """That of the weight, with the constant: it multiplies one or the other."""
        return dataclasses.replace(self.site.view, scale=self.scale * self.site.view.scale)


class _Mixed:
    """The sum, or a part, of site outputs: no bias can be told from it."""


MIXED = _Mixed()


@dataclasses.dataclass(frozen=True)
class Data:
    """Depends on the batch, or on parameters beyond their sites.

    Attributes:
      output: the site that it is the output of.
      frozen: the parameter that it is, under `stop_gradient`.
      penalties: the parameters in what was added to it, each with the use that this would be. It
        is none if nothing but sums lead from here to the loss.
    """

    output: Output | _Mixed | None = None
    frozen: int | None = None
    penalties: tuple[tuple[int, Use], ...] = ()


def penalties_of(values: Iterable[Value]) -> tuple[tuple[int, Use], ...]:
    found = (value.penalties for value in values if isinstance(value, Data))
    return tuple(dict.fromkeys(itertools.chain.from_iterable(found)))


Value = Const | View | Entangled | Data


@dataclasses.dataclass(frozen=True)
class Use:
    """How a parameter is used: at a site, as a bias, added, or in a way that nothing can claim."""

    kind: str  # "site", "bias", "identity", "nonlinear", "opaque"
    site: Site | None = None
    reason: str = ""
