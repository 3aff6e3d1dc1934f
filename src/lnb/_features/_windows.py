"""Moments of a convolution's windows without taking the windows apart.

A window's second moment, k taps by k taps of c x c, is made of few different sums. Where the filter
moves by one, the taps p and q see x[u] and x[u + q - p] for all u but those near the border: so the
products of x with its shifts, less those of the few windows that the convolution does not visit.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Sizes = tuple[int, ...]
_HIGHEST = lax.Precision.HIGHEST


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution without groups, over an image [batch, *image, channels].

    Attributes:
      axes: of the features, in that order.
      filter: its taps in each direction.
      before: how many windows would begin before the first one and see a part of the image.
      after: likewise after the last one.
    """

    axes: Sizes
    image: Sizes
    channels: int
    batch: int
    filter: Sizes
    before: Sizes
    after: Sizes

    @property
    def taps(self) -> int:
        return math.prod(self.filter)

    def flops(self) -> float:
        """Of the second moment in this way."""
        shifts, everywhere = len(self._shifts()), math.prod(self._all)
        border = everywhere - math.prod(self._visited)
        positions = self.batch * (shifts * everywhere + border * self.taps**2)
        return 2 * self.channels**2 * (positions + shifts * self.taps**2)

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
        second = self._everywhere(x, dtype)
        border = self._border_windows(x)
        return second if border is None else second - _product(border, border, dtype)

    def first(self, x: Array, dtype: Any) -> Array:
        """The sum over windows, [c * taps]."""
        total = jnp.sum(x.transpose(self.axes), axis=0, dtype=dtype)
        # A tap sees as many pixels in a row as there are windows.
        edges = zip(self.filter, self.before, self.after, strict=True)
        pad = [*((k - 1 - before, k - 1 - after, 0) for k, before, after in edges), (0, 0, 0)]
        padded, box = lax.pad(total, jnp.zeros((), dtype), pad), (*self._visited, 1)
        sums = lax.reduce_window(
            padded, np.zeros((), dtype), lax.add, box, (1,) * len(box), "VALID"
        )
        return jnp.moveaxis(sums, -1, 0).reshape(-1)

    def _everywhere(self, x: Array, dtype: Any) -> Array:
        """The second moment of all windows that see a part of the image."""
        # With zeros after each line and each image, a shift is a shift of all in one row.
        pad = [(0, 0), *((0, k - 1) for k in self.filter), (0, 0)]
        flat = jnp.pad(x, pad).reshape(-1, self.channels)
        shifts = self._shifts()
        strides = [math.prod(self._all[i + 1 :]) for i in range(len(self._all))]
        offsets = shifts @ np.array(strides)
        longer = jnp.pad(flat, ((0, max(offsets)), (0, 0)))
        # One after the other: side by side they would take many times the memory of x.
        products = lax.map(
            lambda o: _product(flat, lax.dynamic_slice_in_dim(longer, o, len(flat)), dtype),
            jnp.asarray(offsets, jnp.int32),
        )
        taps = np.indices(self.filter).reshape(len(self.filter), -1).T
        # From p to q, for all q after p; half of that from p to itself; the rest by symmetry.
        to = taps[None] - taps[:, None]
        choice = (to[:, :, None] == shifts).all(-1) * (1 - np.eye(self.taps) / 2)[..., None]
        blocks = jnp.tensordot(jnp.asarray(choice, dtype), products, 1, precision=_HIGHEST)
        blocks = blocks.transpose(2, 0, 3, 1) + blocks.transpose(3, 1, 2, 0)  # c, p, c, q
        return blocks.reshape(self.channels * self.taps, -1)

    def _shifts(self) -> np.ndarray:
        """Those from a tap to one that is not before it, [shifts, directions]."""
        ranges = [range(1 - k, k) for k in self.filter]
        zero = (0,) * len(self.filter)
        return np.array([shift for shift in itertools.product(*ranges) if shift >= zero])

    def _border_windows(self, x: Array) -> Array | None:
        """The windows that see a part of the image but are not visited, one a row."""
        inside = np.zeros(self._all, bool)
        ends = map(operator.sub, self._all, self.after)
        inside[tuple(map(slice, self.before, ends))] = True
        if inside.all():
            return None
        taps = np.indices(self.filter).reshape(len(self.filter), -1)
        pixels = np.argwhere(~inside)[:, :, None] + taps - np.subtract(self.filter, 1)[:, None]
        outside = (pixels < 0) | (pixels >= np.array(self.image)[:, None])
        pixels = np.where(outside.any(1, keepdims=True), 0, pixels).swapaxes(0, 1)
        index = np.ravel_multi_index(tuple(pixels), self.image)
        index = np.where(outside.any(1), math.prod(self.image), index)  # beyond: reads as zero
        flat = x.reshape(len(x), -1, self.channels)
        windows = flat.at[:, index].get(mode="fill", fill_value=0)  # batch, window, tap, channel
        return windows.swapaxes(2, 3).reshape(-1, self.channels * self.taps)


def cheaper_windows(shape: Sizes, options: dict[str, Any]) -> Windows | None:
    """The windows of a convolution, if their moments are cheaper than from patches."""
    numbers, taps = options["dimension_numbers"], options["filter_shape"]
    axes = (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    batch, *image, channels = (shape[i] for i in axes)
    moves = ("window_strides", "lhs_dilation", "rhs_dilation")
    if any(n != 1 for name in moves for n in options[name]):
        return None
    edges = [
        [k - 1 - side for side in pad] for k, pad in zip(taps, options["padding"], strict=True)
    ]
    if any(edge < 0 for pair in edges for edge in pair):
        return None
    before, after = zip(*edges, strict=True)
    windows = Windows(axes, tuple(image), channels, batch, tuple(taps), before, after)
    cheaper = windows.flops() < 0.8 * windows.patch_flops()
    return windows if cheaper or windows.taps == 1 else None


def _product(x: Array, y: Array, dtype: Any) -> Array:
    return jnp.einsum("nc,nd->cd", x, y, precision=_HIGHEST, preferred_element_type=dtype)
