"""A deep autoencoder of MNIST: a classic hard problem for first-order methods."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

from .. import data
from ..data import Data, Source, Split
from ..experiment import Experiment
from .layers import Layer
from .mlp import init_mlp, mlp
from .mnist import PIXELS, pixels


@dataclass(frozen=True)
class Autoencoder(Experiment):
    """784-1000-500-250-30 and back, the sizes of Hinton and Salakhutdinov (2006).

    Hidden units are tanh, the code of 30 is linear, weights Glorot-normal. The loss of an image is
    the cross entropy of its pixels, summed; its error the squared difference, summed.

    Attributes:
      widths: of the encoder's layers, the code last; the decoder's are the same, reversed.
    """

    name = "autoencoder"
    summary = "an autoencoder 784-1000-500-250-30 and back"
    dataset = "MNIST"
    optimizers = ("adam", "muon", "algorithm2", "lnb")
    presets: ClassVar = {
        "tiny": {"widths": (32, 8), "batch_size": 100, "steps": 20, "evaluate_every": 10},
        "laptop": {"batch_size": 1000, "steps": 120, "evaluate_every": 30},
        "arena": {
            "widths": (512, 256, 128, 30),
            "batch_size": 500,
            "steps": 800,
            "evaluate_every": 32,
            "test_examples": 2000,
        },
        "paper": {"batch_size": 1000, "steps": 6000, "evaluate_every": 60},
    }
    headline = "error"
    decays_weights = False
    larger_is_better = False

    widths: tuple[int, ...] = (1000, 500, 250, 30)

    def load(self, source: Source) -> Data:
        return data.mnist(source)

    def init(self, key: Array) -> dict[str, list[Layer]]:
        keys = jax.random.split(key)
        widths = (PIXELS, *self.widths)
        return {"encoder": init_mlp(keys[0], widths), "decoder": init_mlp(keys[1], widths[::-1])}

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        """The logit of each pixel."""
        return mlp(model["decoder"], mlp(model["encoder"], pixels(batch)))

    def objective(self, outputs: Array, batch: Split) -> Array:
        return optax.sigmoid_binary_cross_entropy(outputs, pixels(batch)).sum(-1).mean()

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        logits, images = self.outputs(model, batch, None), pixels(batch)
        return {
            "count": jnp.asarray(len(images), jnp.int32),
            "loss": optax.sigmoid_binary_cross_entropy(logits, images).sum(),
            "error": ((jax.nn.sigmoid(logits) - images) ** 2).sum(),
        }
