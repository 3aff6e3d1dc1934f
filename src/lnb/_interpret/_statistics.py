"""What a site leaves behind of its features: sums of x x^T and of x, or the rows x themselves."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .._packed import pack
from . import _axes
from ._claims import Claim
from ._values import Site
from ._windows import Windows, cheaper_windows

_HIGHEST = lax.Precision.HIGHEST


def accumulator(dtype: Any) -> Any:
    """The dtype of statistics and solves: float32 at least."""
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    wide = inexact and jnp.finfo(dtype).bits > 32
    return jnp.dtype(dtype if wide else jnp.float32)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How the data that a site is fed stand as rows [blocks, positions, inputs].

    Take patches (of a convolution), reshape to `sizes`; then `blocks`, `positions` and `inputs` say
    which axes are which, in the order of the weight's layout. `scanned` tells, of each loop around
    the site, whether its turns have weights of their own (they are blocks) or not (positions).
    """

    kind: str
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    positions: tuple[int, ...]
    inputs: tuple[int, ...]
    rows: int  # of a lookup
    scale: float
    scanned: tuple[bool, ...]
    options: tuple[tuple[str, Any], ...]  # of the patches, of the lookup, of the products
    stride: int = 1  # moments come from every so many positions of the first axis that has any
    weight: float = 1.0  # of a position: how many it stands for

    def moments(self, *xs: Array) -> dict[str, Array]:
        """The sums of x x^T [blocks, inputs, inputs] and x [blocks, inputs], of one turn."""
        if self.stride > 1:
            return self._thinned().moments(*self._thin(*xs))
        if self.kind == "lookup":
            return {"second": self._occurrences(*xs)}
        windows = self._windows(xs[0]) if self.kind == "conv" else None
        second, first = self._sums(*xs) if windows is None else self._window_sums(windows, xs[0])
        g, d = self._size(self.blocks), self._size(self.inputs)
        return {
            "second": second.reshape(g, d, d) * (self.weight * self.scale**2),
            "first": first.reshape(g, d) * (self.weight * self.scale),
        }

    @functools.partial(jax.jit, static_argnums=0)
    def packed_moments(self, *xs: Array) -> dict[str, Array]:
        """The same, with x x^T in half the memory where it is more than a diagonal."""
        moments = self.moments(*xs)
        if self.kind != "lookup" and self._size(self.inputs) > 1:
            moments["second"] = pack(moments["second"])
        return moments

    def flops(self, shape: Sequence[int]) -> float:
        """Of the moments of features of a shape, of one turn."""
        if self.kind == "lookup":
            return float(math.prod(shape))
        windows = cheaper_windows(tuple(shape), dict(self.options)) if self.kind == "conv" else None
        if windows is not None and self._fits(windows):
            return windows.flops()
        return 2.0 * math.prod(self.sizes) * self._size(self.inputs)

    def longest_stride(self) -> int:
        """The most that `stride` may be: at least two of what it leaves out must be left."""
        if self.kind not in {"dense", "conv"} or not self.positions:
            return 1
        if self.kind == "conv" and dict(self.options)["dimension_numbers"].out_spec[0] != 0:
            return 1  # only a batch that comes first is thinned
        return max(1, self.sizes[self.positions[0]] // 2)

    def wait(self, *xs: Array) -> tuple[Array, ...]:
        """Features that are to wait for a turn: images thinned out, rows as they are.

        To thin rows is left to those whose turn it is: backpropagation keeps all of them anyway.
        """
        return self._thin(*xs) if self.kind == "conv" else xs

    def waiting(self) -> Arrangement:
        """That of what `wait` returns."""
        return self._thinned() if self.kind == "conv" else self

    def _thin(self, *xs: Array) -> tuple[Array, ...]:
        """Features at the positions where moments are taken."""
        if self.stride == 1 or not self.positions:  # a batch of one example has no such axis
            return xs
        (x,) = xs
        if self.kind == "conv":
            axis = dict(self.options)["dimension_numbers"].lhs_spec[0]
        else:
            x, axis = x.reshape(self.sizes), self.positions[0]
        return (lax.slice_in_dim(x, 0, None, self.stride, axis),)

    def _thinned(self) -> Arrangement:
        """That of what `_thin` returns, each position of which stands for several."""
        if self.stride == 1 or not self.positions:
            return dataclasses.replace(self, stride=1)
        axis = self.positions[0]
        before, after = self.sizes[axis], -(-self.sizes[axis] // self.stride)
        sizes = (*self.sizes[:axis], after, *self.sizes[axis + 1 :])
        return dataclasses.replace(self, sizes=sizes, weight=before / after, stride=1)

    def all_moments(self, *xs: Array) -> dict[str, Array]:
        """The same over all turns of all loops, whose axes the features have in front."""
        moments = self.moments
        for _ in self.scanned:
            moments = jax.vmap(moments)
        shared = tuple(i for i, scanned in enumerate(self.scanned) if not scanned)
        summed = {name: value.sum(axis=shared) for name, value in moments(*xs).items()}
        loops = len(self.scanned) - len(shared)
        return {k: v.reshape(-1, *v.shape[loops + 1 :]) for k, v in summed.items()}

    def all_sums(self, *xs: Array) -> dict[str, Array]:
        """The sums of x * x and x [blocks, inputs], without the products in between."""
        rows = self.all_rows(*xs)
        if rows is None:
            return {"square": self.all_moments(*xs)["second"]}
        return {"square": jnp.sum(rows * rows, axis=1), "first": jnp.sum(rows, axis=1)}

    def all_rows(self, *xs: Array) -> Array | None:
        """The features of all turns as [blocks, positions, inputs]; a lookup has none."""
        if self.kind == "lookup":
            return None
        spread = self._spread
        for _ in self.scanned:
            spread = jax.vmap(spread)
        x, n = spread(*xs), len(self.scanned)
        loops = [i for i, scanned in enumerate(self.scanned) if scanned]
        turns = [i for i, scanned in enumerate(self.scanned) if not scanned]
        blocks, positions = [n + i for i in self.blocks], [n + i for i in self.positions]
        order = [*loops, *blocks, *turns, *positions, *(n + i for i in self.inputs)]
        g = math.prod(x.shape[i] for i in (*loops, *blocks))
        x = x.transpose(order).reshape(g, -1, self._size(self.inputs))
        return x.astype(accumulator(x.dtype)) * self.scale

    def _spread(self, *xs: Array) -> Array:
        options: dict[str, Any] = dict(self.options)
        if self.kind == "scale":
            x = self._multiplied(xs, options["stages"])
        elif self.kind == "conv":
            x = lax.conv_general_dilated_patches(xs[0], **options, precision=_HIGHEST)
        else:
            (x,) = xs
        return x.reshape(self.sizes)

    def _multiplied(self, xs: Sequence[Array], stages: Sequence[Any]) -> Array:
        """The product of what a scale met, factor by factor, as it was rearranged in between."""
        product = jnp.ones((), xs[0].dtype)
        for x, (steps, shape) in zip(xs, stages, strict=True):
            for step in steps:
                product = step(product, {})
            product = jnp.broadcast_to(product, shape) * jnp.broadcast_to(x, shape)
        return product

    def _sums(self, *xs: Array) -> tuple[Array, Array]:
        x = self._spread(*xs)
        dtype = accumulator(x.dtype)
        first = jnp.sum(x, axis=self.positions, dtype=dtype)
        return self._second(x, dtype), first.transpose(_ranks([*self.blocks, *self.inputs]))

    def _windows(self, x: Array) -> Windows | None:
        """Of a convolution without groups, where they are cheaper than patches."""
        windows = cheaper_windows(x.shape, dict(self.options))
        return windows if windows is not None and self._fits(windows) else None

    def _fits(self, windows: Windows) -> bool:
        return windows.channels * windows.taps == self._size(self.inputs)

    def _window_sums(self, windows: Windows, x: Array) -> tuple[Array, Array]:
        dtype = accumulator(x.dtype)
        places = sorted(self.inputs)  # channels, then taps; `windows` has them the other way round
        sizes = [self.sizes[i] for i in places]
        split = next(k for k in range(len(sizes) + 1) if math.prod(sizes[k:]) == windows.taps)
        sizes, places = sizes[split:] + sizes[:split], places[split:] + places[:split]
        order = [places.index(i) for i in self.inputs]
        second = windows.second(x, dtype).reshape(*sizes, *sizes)
        first = windows.first(x, dtype).reshape(sizes).transpose(order)
        return second.transpose(*order, *(len(order) + i for i in order)), first

    def _second(self, x: Array, dtype: Any) -> Array:
        if not self.inputs:
            wide = x.astype(dtype)
            return jnp.sum(wide * wide, axis=self.positions).transpose(_ranks(self.blocks))
        second = lax.dot_general(
            x,
            x,
            ((self.positions, self.positions), (self.blocks, self.blocks)),
            precision=_HIGHEST,
            preferred_element_type=dtype,
        )
        # Its axes: blocks, inputs, inputs; the inputs as they stand in x.
        g, d = len(self.blocks), len(self.inputs)
        ranks = _ranks(self.inputs)
        return second.transpose(*range(g), *(g + i for i in ranks), *(g + d + i for i in ranks))

    def _occurrences(self, indices: Array) -> Array:
        """How often each row was looked up: the diagonal of the one-hot features' x x^T."""
        mode = "clip" if dict(self.options)["mode"] == lax.GatherScatterMode.CLIP else "drop"
        counts = jnp.zeros(self.rows, jnp.float32)
        return counts.at[indices.reshape(-1)].add(self.scale**2, mode=mode)[None]

    def _size(self, axes: Sequence[int]) -> int:
        return math.prod(self.sizes[i] for i in axes)


def arrange(site: Site, claim: Claim) -> Arrangement:
    """The arrangement of a site's features in its neuron's layout."""
    blocks, inputs, _ = claim.order
    atoms = [] if site.feature_axes is None else _axes.flatten(site.feature_axes)
    places = {id(atom): i for i, atom in enumerate(atoms)}
    block_axes = tuple(places[id(atom)] for atom in blocks if id(atom) in places)
    input_axes = tuple(places[id(atom)] for atom in inputs if id(atom) in places)
    return Arrangement(
        kind=site.kind,
        sizes=tuple(atom.size for atom in atoms),
        blocks=block_axes,
        positions=tuple(i for i in range(len(atoms)) if i not in {*block_axes, *input_axes}),
        inputs=input_axes,
        rows=claim.layout.inputs,
        scale=site.view.scale,
        scanned=tuple(chain.scanned for chain in site.view.chains[1:]),
        options=tuple(site.options.items()),
    )


def output_rows(site: Site, claim: Claim, outputs: Array) -> Array:
    """A site's outputs as [blocks, positions, outputs], in the order of its features' rows."""
    blocks, inputs, units = claim.order
    assert site.output_axes is not None
    assert site.feature_axes is not None
    others = {id(atom) for atom in (*blocks, *inputs)}
    positions = [a for a in _axes.flatten(site.feature_axes) if id(a) not in others]
    atoms = _axes.flatten(site.output_axes)
    places = {id(atom): i for i, atom in enumerate(atoms)}
    rows = outputs.reshape([atom.size for atom in atoms])
    rows = rows.transpose([places[id(atom)] for atom in (*blocks, *positions, *units)])
    rows = rows.reshape(claim.layout.blocks, -1, claim.layout.outputs)
    return rows.astype(accumulator(rows.dtype))


def _ranks(places: Sequence[int]) -> list[int]:
    ordered = sorted(places)
    return [ordered.index(place) for place in places]
