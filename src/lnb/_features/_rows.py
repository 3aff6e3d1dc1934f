"""What a neuron was fed, as rows [blocks, positions, inputs], and the sums that M is made of."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ._experts import Gathered, Ragged
from ._layout import Layout
from ._windows import Windows, cheaper_windows

HIGHEST = lax.Precision.HIGHEST


def accumulator(dtype: Any) -> Any:
    """The dtype of statistics and solves: float32 at least."""
    wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits > 32
    return jnp.dtype(dtype if wide else jnp.float32)


class Moments(NamedTuple):
    """Means over positions, or the sums that they are made of.

    Attributes:
      first: of x, [blocks, inputs]; `None` where x is not known.
      second: of x x^T, [blocks, inputs, inputs], or of x * x, [blocks, inputs].
    """

    first: Array | None
    second: Array

    @property
    def square(self) -> Array:
        """The mean of x * x, [blocks, inputs]."""
        second = self.second
        return second if second.ndim == 2 else jnp.diagonal(second, axis1=1, axis2=2)


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How the array that a site is fed stands as rows.

    Take patches (of a convolution), reshape to `sizes`; then `blocks`, `positions` and `inputs` say
    which axes are which, in the order of the weight's layout. The axes of the loops around the site
    come first: a loop over weights is an axis of blocks, any other one of positions.

    Attributes:
      kind: of the site.
      loops: how many loops there are around the site.
      loop_sizes: the sizes of their axes.
      sizes: those of the array itself, or of its patches.
      inputs_count: the number of inputs.
      scale: a constant that multiplies the weight.
      examples: the axis, of `sizes`, along which examples may be left out; `None` if there is none.
      options: of the patches, of the lookup, of the products.
      stride: every so many examples are kept.
    """

    kind: str
    loops: int
    loop_sizes: tuple[int, ...]
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    positions: tuple[int, ...]
    inputs: tuple[int, ...]
    inputs_count: int
    scale: float
    examples: int | None
    options: tuple[tuple[str, Any], ...] = ()
    stride: int = 1

    def thinned(self, stride: int) -> Arrangement:
        """The same, with every so many examples only."""
        return dataclasses.replace(self, stride=stride)

    # -- in the forward pass, once for each iteration of the loops -------------------------------

    @property
    def experts(self) -> Gathered | Ragged | None:
        return dict(self.options).get("experts")

    def thin(self, *fed: Array) -> Any:
        """What to keep of all that the site was fed: every so many examples of it."""
        if self.kind == "lookup":
            return fed[0][..., dict(self.options)["column"]].reshape(-1)
        if self.experts is not None:  # features, and the expert of each position
            return jax.tree.map(lambda x: x[:: self.stride], self.experts.rows(*fed))
        x = self._product(fed) if self.kind == "scale" else fed[0]
        if self.kind != "conv":
            x = x.reshape(self.sizes)
        if self.stride == 1 or self.examples is None:
            return x
        numbers = dict(self.options).get("dimension_numbers")
        axis = self.examples if numbers is None else numbers.lhs_spec[0]
        return lax.slice_in_dim(x, 0, None, self.stride, axis)

    def _product(self, factors: Sequence[Array]) -> Array:
        """The product of all that a scale met, as it was rearranged in between."""
        product = jnp.ones((), factors[0].dtype)
        for x, (steps, shape) in zip(factors, dict(self.options)["stages"], strict=True):
            for step in steps:
                product = step(product, {})
            product = jnp.broadcast_to(product, shape) * jnp.broadcast_to(x, shape)
        return product

    # -- later, on what was kept -----------------------------------------------------------------

    @property
    def kept_sizes(self) -> tuple[int, ...]:
        """The sizes of what `thin` keeps, or of its patches, with the loops' axes."""
        sizes = list(self.sizes)
        if self.examples is not None:
            sizes[self.examples] = -(-sizes[self.examples] // self.stride)
        return (*self.loop_sizes, *sizes)

    @property
    def weight(self) -> float:
        """How many positions each that is kept stands for."""
        if self.examples is None or self.stride == 1:
            return 1.0
        size = self.sizes[self.examples]
        return size / -(-size // self.stride)

    @property
    def shape(self) -> tuple[int, int, int]:
        """That of the rows: blocks, positions that are kept, inputs."""
        sizes = self.kept_sizes
        count = lambda axes: math.prod(sizes[i] for i in axes)
        blocks = count(self.blocks) * (1 if self.experts is None else self.experts.count)
        return blocks, count(self.positions), self.inputs_count

    def rows(self, x: Any) -> Array:
        """Rows [blocks, positions, inputs]; of a lookup, the indices [blocks, positions]."""
        x, expert = (x, None) if self.experts is None else x
        if self.kind == "conv":
            options = {k: v for k, v in self.options if k != "image_shape"}
            take = functools.partial(lax.conv_general_dilated_patches, **options, precision=HIGHEST)
            for _ in range(self.loops):
                take = jax.vmap(take)
            x = take(x)
        *_, positions, inputs = self.shape
        x = x.reshape(self.kept_sizes).transpose((*self.blocks, *self.positions, *self.inputs))
        if self.kind == "lookup":
            return x.reshape(-1, positions)
        x = x.reshape(-1, positions, inputs).astype(accumulator(x.dtype)) * self.scale
        if self.experts is None or expert is None:
            return x
        # Each expert sees zeros where another one was chosen: such rows count for nothing.
        sizes = [self.kept_sizes[i] for i in sorted((*self.blocks, *self.positions))]
        expert = expert.reshape(sizes).transpose((*self.blocks, *self.positions))
        own = jax.nn.one_hot(
            expert.reshape(-1, positions), self.experts.count, axis=1, dtype=x.dtype
        )
        return (own[..., None] * x[:, None]).reshape(self.shape)

    def sums(self, x: Any) -> Moments:
        """Of all positions, those left out included: each that is kept stands for several."""
        if self.kind == "lookup":
            counts = self.occurrences(x)
            return Moments(counts * self.scale, counts * self.scale**2)
        windows = self._windows()
        if windows is None:
            rows = self.rows(x)
            second = jnp.einsum("gnd,gne->gde", rows, rows, precision=HIGHEST)
            return Moments(jnp.sum(rows, axis=1) * self.weight, second * self.weight)
        dtype = accumulator(x.dtype)
        second = self._in_order(windows.second(x, dtype), 2) * (self.weight * self.scale**2)
        first = self._in_order(windows.first(x, dtype), 1) * (self.weight * self.scale)
        return Moments(first[None], second[None])

    def _in_order(self, sums: Array, rank: int) -> Array:
        """Sums over windows, `rank` times with the inputs of patches, in the weight's own order."""
        places = sorted(self.inputs)
        order = [places.index(i) for i in self.inputs]
        spread = sums.reshape([self.kept_sizes[i] for i in places] * rank)
        axes = [k * len(order) + i for k in range(rank) for i in order]
        return spread.transpose(axes).reshape(sums.shape)

    def occurrences(self, x: Array) -> Array:
        """How often each row was looked up: the diagonal of the one-hot features' x x^T."""
        mode = "clip" if dict(self.options)["mode"] == lax.GatherScatterMode.CLIP else "drop"
        blank = jnp.zeros(self.inputs_count, jnp.result_type(float))
        return jax.vmap(lambda indices: blank.at[indices].add(1, mode=mode))(self.rows(x))

    def flops(self) -> float:
        """Of `sums`."""
        blocks, positions, inputs = self.shape
        if self.kind == "lookup":
            return float(blocks * positions)
        windows = self._windows()
        return 2.0 * blocks * positions * inputs**2 if windows is None else windows.flops()

    def _windows(self) -> Windows | None:
        """Of a convolution, where sums over its windows need no patches."""
        if self.kind != "conv" or self.loops or self.blocks:
            return None
        options = dict(self.options)
        shape = list(options["image_shape"])
        if self.examples is not None:
            shape[options["dimension_numbers"].lhs_spec[0]] = self.kept_sizes[self.examples]
        return cheaper_windows(tuple(shape), options)


class SiteRows(NamedTuple):
    """A site, as the metric needs it: its rows, and how it sees the neuron's parameters.

    Attributes:
      fraction: how much of the parameter the site sees; its positions count by as much.
    """

    arrangement: Arrangement
    layout: Layout
    bias_layout: Layout | None
    fraction: float = 1.0
