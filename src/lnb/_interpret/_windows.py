"""Moments of a convolution's windows without taking the windows apart.

A window's second moment, k taps by k taps of c x c, is made of few different sums. Where the filter
moves by one, the taps p and q see x[u] and x[u + q - p] for all u but those near the border: so the
products of x with its shifts, less those of the few windows that the convolution does not visit. In
a transposed convolution whose filters do not overlap, each window holds one input.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution without groups, over an image [batch, *image, channels].

    Attributes:
      axes: of the features, in that order.
      filter: its taps in each direction.
      before: how many windows would begin before the first one and see a part of the image.
      after: likewise after the last one.
      apart: whether filters do not overlap.
    """

    axes: Sizes
    image: Sizes
    channels: int
    batch: int
    filter: Sizes
    before: Sizes
    after: Sizes
    apart: bool

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    def flops(self) -> float:
        """Of the second moment in this way."""
        everywhere, border = math.prod(self._all), math.prod(self._all) - math.prod(self._visited)
        shifts = len(self._shifts()) * everywhere
        return 2 * self.batch * self.channels**2 * (shifts + border * self.taps**2)

    def patch_flops(self) -> float:
        """Of the second moment from windows taken apart."""
        return 2 * self.batch * math.prod(self._visited) * (self.channels * self.taps) ** 2

    @property
    def _all(self) -> Sizes:
        """How many windows see a part of the image, in each direction."""
        return tuple(n + k - 1 for n, k in zip(self.image, self.filter, strict=True))

    @property
    def _visited(self) -> Sizes:
        """How many of them the convolution visits."""
        edges = zip(self._all, self.before, self.after, strict=True)
        return tuple(n - lo - hi for n, lo, hi in edges)

    def second(self, x: Array, dtype: Any) -> Array:
        """The sum over windows of their outer products, [c * taps, c * taps]."""
        x = x.transpose(self.axes)
        if self.apart:
            flat = x.reshape(-1, self.channels)
            return jnp.kron(_product(flat, flat, dtype), jnp.eye(self.taps, dtype=dtype))
        second = self._everywhere(x, dtype)
        border = self._border_windows(x)
        return second if border is None else second - _product(border, border, dtype)

    def first(self, x: Array, dtype: Any) -> Array:
        """The sum over windows, [c * taps]."""
        total = jnp.sum(x.transpose(self.axes), axis=0, dtype=dtype)
        if self.apart:
            whole = jnp.sum(total, axis=tuple(range(len(self.image))))
            return jnp.repeat(whole, self.taps)
        total = self._padded(total[None])
        region = [(lo, lo + n) for lo, n in zip(self.before, self._visited, strict=True)]
        return self._windows(total, region).sum(axis=0)

    def _everywhere(self, x: Array, dtype: Any) -> Array:
        """The second moment of all windows that see a part of the image."""
        shifts = self._shifts()
        # With zeros after each line and each image, a shift is a shift of all in one row.
        pad = [(0, 0), *((0, k - 1) for k in self.filter), (0, 0)]
        flat = jnp.pad(x, pad).reshape(-1, self.channels)
        strides = [math.prod(self._all[i + 1 :]) for i in range(len(self._all))]
        offsets = [sum(s * d for s, d in zip(strides, shift, strict=True)) for shift in shifts]
        longer = jnp.pad(flat, ((0, max(offsets)), (0, 0)))
        products = {}
        for _, row in itertools.groupby(zip(shifts, offsets, strict=True), lambda s: s[0][:-1]):
            part = list(row)
            shifted = [lax.slice_in_dim(longer, o, o + len(flat)) for _, o in part]
            product = _product(flat, jnp.concatenate(shifted, axis=1), dtype)
            pieces = product.reshape(self.channels, len(part), self.channels)
            for i, (shift, _) in enumerate(part):
                products[shift] = pieces[:, i]
                products[tuple(-s for s in shift)] = pieces[:, i].T
        order = {shift: i for i, shift in enumerate(products)}
        taps = list(itertools.product(*map(range, self.filter)))
        table = [[order[tuple(map(operator.sub, q, p))] for q in taps] for p in taps]
        blocks = jnp.stack(list(products.values()))[jnp.asarray(table)]  # p, q, c, c
        d = self.channels * self.taps
        return blocks.transpose(2, 0, 3, 1).reshape(d, d)

    def _shifts(self) -> list[Sizes]:
        """Those from a tap to one that is not before it."""
        ranges = [range(1 - k, k) for k in self.filter]
        return [shift for shift in itertools.product(*ranges) if shift >= (0,) * len(shift)]

    def _padded(self, x: Array) -> Array:
        """With all windows inside that see a part of the image."""
        return jnp.pad(x, [(0, 0), *((k - 1, k - 1) for k in self.filter), (0, 0)])

    def _border_windows(self, x: Array) -> Array | None:
        """The windows that the convolution does not visit, one a row."""
        padded = self._padded(x)
        totals = self._all
        inside = [(lo, n - hi) for n, lo, hi in zip(totals, self.before, self.after, strict=True)]
        rows = []
        for i, (low, high) in enumerate(inside):
            for edge in ((0, low), (high, totals[i])):
                region = [*inside[:i], edge, *((0, n) for n in totals[i + 1 :])]
                if all(start < stop for start, stop in region):
                    rows.append(self._windows(padded, region))
        return jnp.concatenate(rows) if rows else None

    def _windows(self, padded: Array, region: Sequence[tuple[int, int]]) -> Array:
        parts = []
        for tap in itertools.product(*map(range, self.filter)):
            starts = [start + p for (start, _), p in zip(region, tap, strict=True)]
            stops = [stop + p for (_, stop), p in zip(region, tap, strict=True)]
            parts.append(lax.slice(padded, [0, *starts, 0], [len(padded), *stops, self.channels]))
        return jnp.stack(parts, axis=-1).reshape(-1, self.channels * self.taps)


def cheaper_windows(shape: Sizes, options: dict[str, Any]) -> Windows | None:
    """The windows of a convolution, if their moments are cheaper than from patches."""
    numbers, taps = options["dimension_numbers"], options["filter_shape"]
    axes = (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    batch, *image, channels = (shape[i] for i in axes)
    if any(s != 1 for s in options["window_strides"]):
        return None
    padding, dilation = options["padding"], options["lhs_dilation"]
    apart = all(n == k for n, k in zip(dilation, taps, strict=True)) and math.prod(taps) > 1
    plain = all(n == 1 for n in (*dilation, *options["rhs_dilation"]))
    # Filters that lie side by side: each input meets each tap once.
    covers = all((k - 1,) * 2 == tuple(pad) for k, pad in zip(taps, padding, strict=True))
    if not plain and not (apart and covers and all(n == 1 for n in options["rhs_dilation"])):
        return None
    edges = [[k - 1 - side for side in pad] for k, pad in zip(taps, padding, strict=True)]
    if any(edge < 0 for pair in edges for edge in pair):
        return None
    before, after = zip(*edges, strict=True)
    windows = Windows(
        axes, tuple(image), channels, batch, tuple(taps), before, after, apart=not plain
    )
    one_each = windows.apart or windows.taps == 1
    return windows if one_each or windows.flops() < 0.8 * windows.patch_flops() else None


def _product(x: Array, y: Array, dtype: Any) -> Array:
    return lax.dot_general(
        x,
        y,
        (((0,), (0,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
