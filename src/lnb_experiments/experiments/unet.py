"""A U-Net that segments the images of PASCAL VOC 2012."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from .. import data
from ..data import Data, Source, Split
from ..experiment import Experiment
from .layers import Layer, add_bias, normal

CHANNELS, CLASSES, VOID = 3, 21, 255
LAYOUT = ("NHWC", "HWIO", "NHWC")


@dataclass(frozen=True)
class UNet(Experiment):
    """Two 3 x 3 convolutions with ReLU at each level, on the way down and on the way up.

    Convolutions keep the size, max-pooling halves it, transposed 2 x 2 convolutions double it, and
    what left a level on the way down is concatenated on the way up. Weights are He-normal, biases
    zero, there are no norms. Pixels marked void count nowhere.

    Attributes:
      size: side of an image; a multiple of 2 to the number of levels less one.
      widths: channels of each level.
    """

    name = "unet"
    summary = "a U-Net of 64 to 1024 channels, 21 classes, 384 x 384"
    dataset = "PASCAL VOC 2012"
    optimizers = ("adam", "muon", "algorithm2", "lnb")
    presets: ClassVar = {
        "tiny": {
            "size": 16,
            "widths": (4, 8, 16),
            "batch_size": 4,
            "steps": 10,
            "evaluate_every": 5,
        },
        "laptop": {
            "size": 96,
            "widths": (16, 32, 64, 128),
            "batch_size": 8,
            "steps": 100,
            "evaluate_every": 50,
        },
        "arena": {
            "size": 48,
            "widths": (16, 32, 64),
            "batch_size": 8,
            "steps": 400,
            "evaluate_every": 16,
            "test_examples": 100,
        },
        "paper": {"batch_size": 8, "steps": 18_300, "evaluate_every": 183},
    }

    headline = "loss"  # at first all that a network says is "background", which is right by 70%
    larger_is_better = False

    size: int = 384
    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)

    def load(self, source: Source) -> Data:
        return data.voc2012(source, self.size)

    def init(self, key: Array) -> dict[str, Any]:
        keys = iter(jax.random.split(key, 3 * len(self.widths)))
        down = list(pairwise((CHANNELS, *self.widths)))
        up = list(pairwise(self.widths[::-1]))
        return {
            "down": [init_pair(next(keys), *sizes) for sizes in down],
            "double": [init_conv(next(keys), 2, *sizes) for sizes in up],
            "up": [init_pair(next(keys), *sizes) for sizes in up],
            "head": init_conv(next(keys), 1, self.widths[0], CLASSES),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        """The logits of each pixel's classes."""
        x = jnp.asarray(batch.inputs, jnp.float32)
        passed = []
        for pair in model["down"]:
            x = apply_pair(pair, halve(x) if passed else x)
            passed.append(x)
        for double, pair, level in zip(model["double"], model["up"], passed[-2::-1], strict=True):
            x = apply_pair(pair, jnp.concatenate([level, transposed(double, x)], axis=-1))
        return conv(model["head"], x)

    def objective(self, outputs: Array, batch: Split) -> Array:
        losses, valid = cross_entropies(outputs, batch)
        return losses.sum() / jnp.maximum(valid.sum(), 1).astype(jnp.float32)

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        """Sums over valid pixels; "confusion" has a row a true class, a column a predicted one."""
        logits = self.outputs(model, batch, None)
        losses, valid = cross_entropies(logits, batch)
        pairs = CLASSES * jnp.asarray(batch.targets, jnp.int32) + logits.argmax(-1).astype(
            jnp.int32
        )
        inside = jnp.where(valid, pairs, CLASSES**2).ravel()
        confusion = jnp.bincount(inside, length=CLASSES**2 + 1)[:-1]
        return {
            "count": valid.sum(),
            "loss": losses.sum(),
            "confusion": confusion.reshape(CLASSES, CLASSES),
        }

    def metrics(self, counts: Mapping[str, Any]) -> dict[str, float]:
        """The mean loss, the share of pixels that are right, the mean IoU of classes present."""
        confusion = np.asarray(counts["confusion"], np.float64)
        hits = confusion.diagonal()
        union = confusion.sum(0) + confusion.sum(1) - hits
        present = union > 0
        return {
            "loss": float(counts["loss"]) / float(counts["count"]),
            "accuracy": float(hits.sum() / confusion.sum()),
            "miou": float((hits[present] / union[present]).mean()),
        }


def cross_entropies(logits: Array, batch: Split) -> tuple[Array, Array]:
    """The cross entropy of each pixel, 0 where it is void; and which are not."""
    targets = jnp.asarray(batch.targets, jnp.int32)
    valid = targets != VOID
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, targets, 0))
    return jnp.where(valid, losses, 0.0), valid


def init_conv(key: Array, size: int, inputs: int, outputs: int) -> Layer:
    weight = normal(key, (size, size, inputs, outputs), std=(2 / (size**2 * inputs)) ** 0.5)
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def init_pair(key: Array, inputs: int, outputs: int) -> list[Layer]:
    keys = jax.random.split(key)
    return [init_conv(keys[0], 3, inputs, outputs), init_conv(keys[1], 3, outputs, outputs)]


def apply_pair(pair: list[Layer], x: Array) -> Array:
    for layer in pair:
        x = jax.nn.relu(conv(layer, x))
    return x


def conv(layer: Layer, x: Array) -> Array:
    y = lax.conv_general_dilated(x, layer["weight"], (1, 1), "SAME", dimension_numbers=LAYOUT)
    return add_bias(y, layer["bias"])


def transposed(layer: Layer, x: Array) -> Array:
    y = lax.conv_transpose(x, layer["weight"], (2, 2), "SAME", dimension_numbers=LAYOUT)
    return add_bias(y, layer["bias"])


def halve(x: Array) -> Array:
    """Max-pooling of 2 x 2 pixels. A maximum over new axes is faster than a window's on a CPU."""
    batch, height, width, channels = x.shape
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
