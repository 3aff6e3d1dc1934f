"""A recurrent network that predicts the next byte of a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import data
from ..data import Data, Source, Split
from .char_lm import VOCABULARY
from .classification import Classification
from .layers import Layer, init_linear, linear, normal


@dataclass(frozen=True)
class Lstm(Classification):
    """Layers of long short-term memory (Hochreiter and Schmidhuber, 1997) between two embeddings.

    The weights are shared over time: each step of a loop multiplies by the same matrix. The
    embeddings of inputs and outputs are two matrices. States start at zero in every example.

    Attributes:
      length: bytes of an example.
      width: of an embedding and of a state.
      layers: how many.
    """

    name = "lstm"
    summary = "an LSTM on bytes"
    dataset = "the documentation of Python's own modules"
    optimizers = ("adamw", "muon", "lnb")
    presets: ClassVar = {
        "tiny": {
            "length": 16,
            "width": 16,
            "batch_size": 16,
            "steps": 30,
            "evaluate_every": 15,
        },
        "laptop": {
            "length": 64,
            "width": 128,
            "batch_size": 64,
            "steps": 300,
            "evaluate_every": 50,
        },
        "arena": {
            "length": 64,
            "width": 128,
            "batch_size": 32,
            "steps": 750,
            "evaluate_every": 30,
            "test_examples": 256,
        },
        "paper": {
            "length": 256,
            "width": 512,
            "layers": 2,
            "batch_size": 64,
            "steps": 5000,
            "evaluate_every": 250,
        },
    }
    headline = "loss"
    larger_is_better = False

    length: int = 64
    width: int = 128
    layers: int = 1

    def load(self, source: Source) -> Data:
        return data.text(source, None, self.length)

    def init(self, key: Array) -> dict[str, Any]:
        embedding_key, layer_key, head_key = jax.random.split(key, 3)
        keys = jax.random.split(layer_key, self.layers)
        return {
            "embedding": normal(embedding_key, (VOCABULARY, self.width)),
            "layers": [init_lstm(key, self.width) for key in keys],
            "head": init_linear(head_key, self.width, VOCABULARY),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        x = model["embedding"][jnp.asarray(batch.inputs, jnp.int32)]
        for layer in model["layers"]:
            x = lstm(layer, x)
        return linear(model["head"], x)

    def metrics(self, counts: Mapping[str, Any]) -> dict[str, float]:
        means = super().metrics(counts)
        return {**means, "bits": means["loss"] / log(2)}


def init_lstm(key: Array, width: int) -> dict[str, Layer]:
    """Weights of four gates side by side: input, forget, candidate, output.

    Forget gates have a bias of 1, so that a state is kept at first (Jozefowicz et al., 2015).
    """
    keys = jax.random.split(key)
    inputs = init_linear(keys[0], width, 4 * width, bias=False)
    bias = jnp.zeros((4, width)).at[1].set(1.0).ravel()
    return {
        "inputs": {**inputs, "bias": bias},
        "recurrent": init_linear(keys[1], width, 4 * width, bias=False),
    }


def lstm(layer: dict[str, Layer], x: Array) -> Array:
    """The hidden states [batch, time, width] of inputs of the same shape."""

    def step(state: tuple[Array, Array], fed: Array) -> tuple[tuple[Array, Array], Array]:
        hidden, cell = state
        gates = fed + linear(layer["recurrent"], hidden)
        write, keep, candidate, read = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(keep) * cell + jax.nn.sigmoid(write) * jnp.tanh(candidate)
        hidden = jax.nn.sigmoid(read) * jnp.tanh(cell)
        return (hidden, cell), hidden

    # All inputs are multiplied at once: they do not have to wait for the states.
    fed = linear(layer["inputs"], x).swapaxes(0, 1)
    zeros = jnp.zeros_like(x[:, 0])
    return lax.scan(step, (zeros, zeros), fed)[1].swapaxes(0, 1)
