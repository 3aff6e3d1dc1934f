"""An MLP on MNIST, as it is or with its pixels inverted."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from .. import data
from ..data import Data, Source, Split
from .classification import Classification
from .layers import Layer
from .mlp import init_mlp, mlp

PIXELS, CLASSES = 784, 10


@dataclass(frozen=True)
class Mnist(Classification):
    """784-800-10 with tanh units, Glorot-normal weights and batches of 1,000.

    Attributes:
      depth: number of weight layers.
      width: units of a hidden layer.
      inverted: whether to train and test on 1 - x. A method that is invariant to an affine change
        of the features learns as fast on these.
    """

    name = "mnist"
    summary = "an MLP 784-800-10 with tanh units; --inverted for pixels 1 - x"
    dataset = "MNIST"
    optimizers = ("adam", "muon", "algorithm2", "lnb")
    presets: ClassVar = {
        "tiny": {"width": 32, "batch_size": 100, "steps": 20, "evaluate_every": 10},
        "laptop": {"batch_size": 1000, "steps": 240, "evaluate_every": 30},
        "arena": {
            "depth": 4,
            "width": 512,
            "inverted": True,
            "batch_size": 500,
            "steps": 1000,
            "evaluate_every": 40,
            "test_examples": 2000,
        },
        "paper": {"batch_size": 1000, "steps": 6000, "evaluate_every": 60},
    }
    options = ("depth", "inverted")

    depth: int = 2
    width: int = 800
    inverted: bool = False

    def __post_init__(self):
        if self.depth < 1:
            raise ValueError(
                f"mnist's depth counts its weight layers and is at least 1, not {self.depth}; "
                f"--depth 2 is 784-{self.width}-10."
            )

    def load(self, source: Source) -> Data:
        return data.mnist(source)

    def init(self, key: Array) -> list[Layer]:
        return init_mlp(key, (PIXELS, *[self.width] * (self.depth - 1), CLASSES))

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        x = pixels(batch)
        return mlp(model, 1 - x if self.inverted else x)


def pixels(batch: Split) -> Array:
    """The images of a batch, in [0, 1]."""
    return jnp.asarray(batch.inputs, jnp.float32) / 255
