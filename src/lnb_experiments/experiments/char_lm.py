"""A causal transformer that predicts the next byte of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from .. import data
from ..data import Data, Source, Split
from .classification import Classification
from .layers import layer_norm, normal
from .transformer import apply_block, init_blocks

VOCABULARY = 256


@dataclass(frozen=True)
class CharLM(Classification):
    """A language model whose input and output embeddings are one matrix.

    That matrix is looked up in and multiplied by: one neuron used in two orientations. Positions
    are learned, blocks normalise first, the norms learn nothing, and there is no dropout.

    Attributes:
      text: path of a text file; without it, the data set's own.
      length: bytes of an example.
      width: of a token.
      mlp_width: hidden units of a block's MLP.
      heads: attention heads of a block.
      blocks: how many.
    """

    name = "char-lm"
    summary = "a causal transformer on bytes, with tied embeddings; --text for a file of your own"
    dataset = "a text file; by default the documentation of Python's own modules"
    optimizers = ("adam", "muon", "algorithm2", "lnb")
    presets: ClassVar = {
        "tiny": {
            "length": 16,
            "width": 16,
            "mlp_width": 32,
            "heads": 2,
            "blocks": 1,
            "batch_size": 16,
            "steps": 20,
            "evaluate_every": 10,
        },
        "laptop": {
            "length": 64,
            "width": 96,
            "mlp_width": 192,
            "heads": 4,
            "blocks": 3,
            "batch_size": 64,
            "steps": 150,
            "evaluate_every": 50,
        },
        "arena": {
            "length": 64,
            "width": 64,
            "mlp_width": 128,
            "heads": 4,
            "blocks": 2,
            "batch_size": 32,
            "steps": 600,
            "evaluate_every": 24,
            "test_examples": 200,
        },
        "paper": {"batch_size": 64, "steps": 5000, "evaluate_every": 250},
    }
    headline = "loss"
    larger_is_better = False
    options = ("text",)

    text: str | None = None
    length: int = 256
    width: int = 384
    mlp_width: int = 1536
    heads: int = 6
    blocks: int = 6

    def load(self, source: Source) -> Data:
        return data.text(source, self.text, self.length)

    def init(self, key: Array) -> dict[str, Any]:
        embedding_key, position_key, block_key = jax.random.split(key, 3)
        return {
            "embedding": normal(embedding_key, (VOCABULARY, self.width), std=0.02),
            "positions": normal(position_key, (self.length, self.width), std=0.02),
            "blocks": init_blocks(block_key, self.blocks, self.width, self.mlp_width),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        tokens = jnp.asarray(batch.inputs, jnp.int32)
        x = model["embedding"][tokens] + model["positions"][None, : tokens.shape[1]]
        for block in model["blocks"]:
            x = apply_block(block, x, heads=self.heads, causal=True)
        return layer_norm(x) @ model["embedding"].T

    def metrics(self, counts: Mapping[str, Any]) -> dict[str, float]:
        means = super().metrics(counts)
        return {**means, "bits": means["loss"] / log(2)}
