"""A residual network with batch normalisation on CIFAR-10."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import data
from ..data import Data, Source, Split
from .classification import Classification
from .layers import Layer, add_bias, init_linear, linear, normal
from .vit import CHANNELS, CLASSES, normalise

LAYOUT = ("NHWC", "HWIO", "NHWC")
EPSILON = 1e-5


@dataclass(frozen=True)
class ResNet(Classification):
    """Residual blocks of two 3 x 3 convolutions (He et al., 2016).

    Each convolution has no bias and is followed by batch normalisation, with a learned scale and
    shift, and a ReLU. Where a block changes the shape, its shortcut is a 1 x 1 convolution with
    batch normalisation. The head is linear, on the mean over pixels. Images are cropped and flipped
    as for the vision transformer.

    Training takes the statistics of each batch. A model that is evaluated has fixed ones, of one
    batch of training examples: "precise batch normalisation" (Wu and Johnson, 2021). So there are
    no running averages, and nothing but the weights is trained.

    Attributes:
      widths: channels of each stage; where they change, the image is halved.
      blocks: residual blocks of a stage.
      stride: of the first convolution; 2 makes all that follows four times as fast.
    """

    name = "resnet"
    summary = "a residual network with batch normalisation"
    dataset = "CIFAR-10"
    optimizers = ("adamw", "muon", "lnb")
    presets: ClassVar = {
        "tiny": {
            "widths": (4, 8),
            "blocks": 1,
            "stride": 2,
            "batch_size": 32,
            "steps": 20,
            "evaluate_every": 10,
        },
        "laptop": {
            "widths": (16, 32, 64),
            "blocks": 1,
            "batch_size": 128,
            "steps": 150,
            "evaluate_every": 50,
        },
        "arena": {
            "widths": (16, 32, 64),
            "blocks": 1,
            "stride": 2,
            "batch_size": 128,
            "steps": 400,
            "evaluate_every": 16,
            "test_examples": 1000,
        },
        "paper": {"batch_size": 128, "steps": 64_000, "evaluate_every": 640},
    }

    widths: tuple[int, ...] = (64, 128, 256, 512)
    blocks: int = 2
    stride: int = 1

    def load(self, source: Source) -> Data:
        return data.cifar10(source)

    def augment(self, rng: np.random.Generator, batch: Split) -> Split:
        return Split(data.crop_and_flip(rng, batch.inputs), batch.targets)

    def init(self, key: Array) -> dict[str, Any]:
        stem_key, block_key, head_key = jax.random.split(key, 3)
        widths = [width for width in self.widths for _ in range(self.blocks)]
        keys = jax.random.split(block_key, len(widths))
        sizes = pairwise([self.widths[0], *widths])
        return {
            "stem": init_conv(stem_key, 3, CHANNELS, self.widths[0]),
            "blocks": [init_block(k, *size) for k, size in zip(keys, sizes, strict=True)],
            "head": init_linear(head_key, self.widths[-1], CLASSES),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        return self.forward(model, batch)[0]

    def calibrated(self, model: Any, batch: Split) -> Any:
        return self.forward(model, batch)[1]

    def forward(self, model: Any, batch: Split) -> tuple[Array, Any]:
        """The logits; and the model, with the statistics that made them fixed."""
        x, stem = conv(model["stem"], normalise(batch.inputs), self.stride)
        x, blocks = jax.nn.relu(x), []
        for block in model["blocks"]:
            x, block = apply_block(block, x)
            blocks.append(block)
        logits = linear(model["head"], x.mean((1, 2)))
        return logits, {"stem": stem, "blocks": blocks, "head": model["head"]}


def init_block(key: Array, inputs: int, outputs: int) -> dict[str, Layer]:
    keys = jax.random.split(key, 3)
    block = {
        "first": init_conv(keys[0], 3, inputs, outputs),
        "second": init_conv(keys[1], 3, outputs, outputs),
    }
    if inputs != outputs:
        block["shortcut"] = init_conv(keys[2], 1, inputs, outputs)
    return block


def apply_block(block: dict[str, Layer], x: Array) -> tuple[Array, dict[str, Layer]]:
    """A block that has a shortcut of its own halves the image."""
    stride = 2 if "shortcut" in block else 1
    fixed = {}
    y, fixed["first"] = conv(block["first"], x, stride)
    y, fixed["second"] = conv(block["second"], jax.nn.relu(y), 1)
    if "shortcut" in block:
        x, fixed["shortcut"] = conv(block["shortcut"], x, stride)
    return jax.nn.relu(x + y), fixed


def init_conv(key: Array, size: int, inputs: int, outputs: int) -> Layer:
    """A convolution with batch normalisation: He-normal weights, a scale of 1, a shift of 0."""
    weight = normal(key, (size, size, inputs, outputs), std=(2 / (size**2 * inputs)) ** 0.5)
    return {"weight": weight, "scale": jnp.ones(outputs), "shift": jnp.zeros(outputs)}


def conv(layer: Layer, x: Array, stride: int) -> tuple[Array, Layer]:
    """The normalised convolution; and the layer with the statistics that it was normalised by.

    These are the batch's, unless the layer comes with fixed ones.
    """
    strides = (stride, stride)
    y = lax.conv_general_dilated(x, layer["weight"], strides, "SAME", dimension_numbers=LAYOUT)
    if "mean" not in layer:
        mean = y.mean((0, 1, 2))
        layer = {**layer, "mean": mean, "variance": (add_bias(y, -mean) ** 2).mean((0, 1, 2))}
    factor = layer["scale"] * lax.rsqrt(layer["variance"] + EPSILON)
    scaled = add_bias(y, -layer["mean"]) * factor.reshape(1, 1, 1, -1)
    return add_bias(scaled, layer["shift"]), layer
