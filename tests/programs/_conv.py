"""Convolutions with every option."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from ._layer import Layer, normal
from ._stored import Stored

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Conv(Layer):
    """A convolution over time, or over time and a part of the width.

    `image` are the sizes that the filter moves over; `spread` puts so many minus one zeros between
    neighbouring inputs (a transposed convolution). `specs` are the orders of the axes of data,
    weight and output: batch or outputs 0, channels 1, then space.
    """

    image: Sizes
    channels: int
    outputs: int
    taps: Sizes
    strides: Sizes
    dilation: Sizes
    spread: Sizes
    padding: tuple[tuple[int, int], ...]
    groups: int
    specs: tuple[Sizes, Sizes, Sizes]
    flipped: bool
    bias: bool
    form: str

    @property
    def output_image(self) -> Sizes:
        def size(i):
            padded = (self.image[i] - 1) * self.spread[i] + 1 + sum(self.padding[i])
            return (padded - (self.taps[i] - 1) * self.dilation[i] - 1) // self.strides[i] + 1

        return tuple(size(i) for i in range(len(self.image)))

    @property
    def out_shape(self) -> tuple[int, int]:
        """Time and width of the output."""
        time, *rest = self.output_image
        return time, math.prod(rest) * self.outputs

    @property
    def stored(self) -> Stored:
        shape = (self.outputs, self.channels // self.groups, *self.taps)
        return Stored(tuple(shape[i] for i in inverse(self.specs[1])), self.form)

    def init(self, rng):
        inputs = self.channels // self.groups * math.prod(self.taps)
        params = {"w": normal(rng, *self.stored.stored_shape, inputs=inputs)}
        return params | ({"b": normal(rng, self.outputs)} if self.bias else {})

    def run(self, params, x, data):
        lead = x.shape[:-2]
        # To [batch, channels, *space], then to the order asked for.
        x = jnp.moveaxis(x.reshape(-1, *self.image, self.channels), -1, 1)
        lhs, rhs, out = self.specs
        w = self.stored.view(params["w"])
        y = lax.conv_general_dilated(
            jnp.transpose(x, inverse(lhs)),
            jnp.flip(w, rhs[2:]) if self.flipped else w,
            self.strides,
            self.padding,
            self.spread,
            self.dilation,
            lax.ConvDimensionNumbers(lhs, rhs, out),
            self.groups,
        )
        if self.bias:
            y = y + params["b"].reshape([-1 if i == out[1] else 1 for i in range(len(out))])
        y = jnp.moveaxis(jnp.transpose(y, out), 1, -1)
        return y.reshape(*lead, *self.out_shape)

    def apply(self, w, b, x):
        x = np.moveaxis(x.reshape(-1, *self.image, self.channels), -1, 1)
        w = np.transpose(self.stored.view(w), self.specs[1])
        w = np.flip(w, tuple(range(2, w.ndim))) if self.flipped else w
        y = np.moveaxis(self._convolve(x, w), 1, -1)
        y = y if b is None else y + b
        return y.reshape(-1, *self.out_shape)

    def _convolve(self, x, w):
        """Of [batch, channels, *space] and [outputs, channels / groups, *taps], tap by tap."""
        wide = [(n - 1) * s + 1 for n, s in zip(self.image, self.spread, strict=True)]
        spread = np.zeros((*x.shape[:2], *wide), x.dtype)
        spread[(..., *(slice(None, None, s) for s in self.spread))] = x
        x = np.pad(spread, ((0, 0), (0, 0), *self.padding))
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:])
        w = w.reshape(self.groups, -1, *w.shape[1:])
        total = 0.0
        for tap in itertools.product(*map(range, self.taps)):
            sides = zip(tap, self.dilation, self.strides, self.output_image, strict=True)
            window = [slice(t * d, t * d + s * (n - 1) + 1, s) for t, d, s, n in sides]
            total += np.einsum("bgi...,goi->bgo...", x[(..., *window)], w[(..., *tap)])
        return np.reshape(total, (len(x), self.outputs, *self.output_image))

    def by_hand(self, tape, place, x, data):
        batch = len(x.value)
        n, n_back = (batch * math.prod(image) for image in (self.output_image, self.image))
        bias = place / "b" if self.bias else None
        return tape.site(self.apply, place / "w", bias, x, n, n_back=n_back)

    def __str__(self):
        options = {
            "strides": self.strides if max(self.strides) > 1 else None,
            "dilation": self.dilation if max(self.dilation) > 1 else None,
            "spread": self.spread if max(self.spread) > 1 else None,
            "groups": self.groups if self.groups > 1 else None,
            "specs": self.specs,
        }
        said = "".join(f", {name} {value}" for name, value in options.items() if value)
        said += ", flipped" * self.flipped + ", bias" * self.bias + str(self.stored)
        sizes = f"{self.channels} -> {self.outputs}, image {self.image}, taps {self.taps}"
        return f"conv {sizes}, padding {self.padding}{said}"


def inverse(order: Sizes) -> Sizes:
    """Of a permutation."""
    return tuple(order.index(i) for i in range(len(order)))
