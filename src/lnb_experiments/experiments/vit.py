"""A vision transformer on CIFAR-10."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import data
from ..data import Data, Source, Split
from .classification import Classification
from .layers import dropout, init_linear, layer_norm, linear, normal, split_key
from .transformer import apply_block, init_blocks

SIZE, CHANNELS, CLASSES = 32, 3, 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


@dataclass(frozen=True)
class Vit(Classification):
    """The vision transformer of Equinox's example, at the preset "paper".

    As there: sizes, learned positions and a class token (standard normal), blocks that normalise
    first, attention without biases, GELU, dropout after the positions, after the GELU and after
    the MLP, a head on the normalised class token, uniform initial weights, crops and flips. As in
    the paper: the norms learn nothing. Unlike the example: blocks start from different keys, where
    it starts them all alike.

    Attributes:
      width: of a token.
      mlp_width: hidden units of a block's MLP.
      heads: attention heads of a block.
      blocks: how many.
      patch: side of a patch, in pixels.
      dropout: probability.
    """

    name = "vit"
    summary = "a vision transformer, patches of 4 x 4"
    dataset = "CIFAR-10"
    optimizers = ("adam", "muon", "algorithm2", "lnb")
    presets: ClassVar = {
        "tiny": {
            "width": 16,
            "mlp_width": 32,
            "heads": 2,
            "blocks": 2,
            "patch": 8,
            "batch_size": 32,
            "steps": 30,
            "evaluate_every": 15,
        },
        "laptop": {
            "width": 96,
            "mlp_width": 192,
            "heads": 4,
            "blocks": 4,
            "batch_size": 128,
            "steps": 100,
            "evaluate_every": 50,
        },
        "arena": {
            "width": 96,
            "mlp_width": 192,
            "heads": 4,
            "blocks": 3,
            "patch": 8,
            "batch_size": 64,
            "steps": 800,
            "evaluate_every": 32,
            "test_examples": 1000,
        },
        "paper": {"batch_size": 64, "steps": 78_100, "evaluate_every": 781},
    }

    width: int = 512
    mlp_width: int = 256
    heads: int = 8
    blocks: int = 6
    patch: int = 4
    dropout: float = 0.1

    def load(self, source: Source) -> Data:
        return data.cifar10(source)

    def augment(self, rng: np.random.Generator, batch: Split) -> Split:
        return Split(data.crop_and_flip(rng, batch.inputs), batch.targets)

    def init(self, key: Array) -> dict[str, Any]:
        patch_key, token_key, position_key, block_key, head_key = jax.random.split(key, 5)
        tokens = (SIZE // self.patch) ** 2 + 1
        return {
            "patches": init_linear(patch_key, self.patch**2 * CHANNELS, self.width),
            "class_token": normal(token_key, (1, self.width)),
            "positions": normal(position_key, (tokens, self.width)),
            "blocks": init_blocks(block_key, self.blocks, self.width, self.mlp_width),
            "head": init_linear(head_key, self.width, CLASSES),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        keys = split_key(key, self.blocks + 1)
        x = linear(model["patches"], cut(normalise(batch.inputs), self.patch))
        token = jnp.broadcast_to(model["class_token"][None], (len(x), 1, self.width))
        x = jnp.concatenate([token, x], axis=1) + model["positions"][None]
        x = dropout(x, self.dropout, keys[0])
        for block, block_key in zip(model["blocks"], keys[1:], strict=True):
            x = apply_block(block, x, heads=self.heads, rate=self.dropout, key=block_key)
        return linear(model["head"], layer_norm(x[:, 0]))


def normalise(images: Any) -> Array:
    """Bytes to float32, with about mean 0 and variance 1 in each channel."""
    mean = jnp.asarray(MEAN, jnp.float32).reshape(1, 1, 1, CHANNELS)
    std = jnp.asarray(STD, jnp.float32).reshape(1, 1, 1, CHANNELS)
    return (jnp.asarray(images, jnp.float32) / 255 - mean) / std


def cut(images: Array, patch: int) -> Array:
    """Images to patches in rows: [batch, height, width, channels] to [batch, patches, numbers]."""
    batch, height, width, channels = images.shape
    grid = images.reshape(batch, height // patch, patch, width // patch, patch, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, patch**2 * channels)
