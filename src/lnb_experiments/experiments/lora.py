"""Low-rank adapters: a trained network learns a new task, its own weights frozen."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from .. import data
from ..data import Batches, Data, Source, Split
from .classification import Classification, cross_entropies
from .layers import Layer, linear, normal
from .mlp import init_mlp, mlp
from .mnist import CLASSES, PIXELS, pixels

RATE, BATCH_SIZE = 1e-3, 250  # of the pre-training


@dataclass(frozen=True)
class Lora(Classification):
    """LoRA (Hu et al., 2021) on an MLP with tanh units, from upright digits to rotated ones.

    The MLP is first trained on MNIST, always from the same seed. Then the images are rotated by 90
    degrees, and each layer x W + b becomes x W + (x A) B alpha / rank + b, where only A and B are
    trained. B starts at zero, so that nothing has changed at the start. The frozen W and b come
    with the data: see `load`.

    Attributes:
      width: units of a hidden layer.
      depth: number of weight layers.
      pretraining: steps of AdamW, before the run.
      rank: columns of A and rows of B.
      alpha: strength of an adapter.
    """

    name = "lora"
    summary = "low-rank adapters on an MLP: from upright digits to rotated ones"
    dataset = "MNIST"
    optimizers = ("adamw", "muon", "lnb")
    presets: ClassVar = {
        "tiny": {
            "width": 32,
            "pretraining": 30,
            "rank": 4,
            "batch_size": 100,
            "steps": 40,
            "evaluate_every": 20,
        },
        "laptop": {"batch_size": 128, "steps": 1000, "evaluate_every": 100},
        "arena": {"batch_size": 128, "steps": 2500, "evaluate_every": 100, "test_examples": 2000},
        "paper": {
            "width": 2048,
            "depth": 4,
            "pretraining": 5000,
            "batch_size": 128,
            "steps": 10_000,
            "evaluate_every": 400,
        },
    }
    decays_weights = False  # few add it to adapters

    width: int = 1024
    depth: int = 3
    pretraining: int = 300
    rank: int = 8
    alpha: float = 16.0

    @property
    def widths(self) -> tuple[int, ...]:
        return (PIXELS, *[self.width] * (self.depth - 1), CLASSES)

    def load(self, source: Source) -> Data:
        """Rotated images, and beside them the network that was trained on the upright ones."""
        upright = data.mnist(source)
        frozen = pretrained(source, self.widths, self.pretraining)
        train, test = (Split(rotated(s.inputs), s.targets, frozen) for s in upright[:2])
        return Data(train, test, upright.note)

    def init(self, key: Array) -> list[Layer]:
        """A normal with variance 1 / inputs, B zero."""
        shapes = list(pairwise(self.widths))
        keys = jax.random.split(key, len(shapes))
        return [
            {
                "a": normal(key, (inputs, self.rank), std=inputs**-0.5),
                "b": jnp.zeros((self.rank, outputs)),
            }
            for key, (inputs, outputs) in zip(keys, shapes, strict=True)
        ]

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        *hidden, last = zip(batch.shared, model, strict=True)
        x = pixels(batch)
        for layer, adapter in hidden:
            x = jnp.tanh(self.adapted(layer, adapter, x))
        return self.adapted(*last, x)

    def adapted(self, layer: Layer, adapter: Layer, x: Array) -> Array:
        """A frozen layer and what its adapter adds."""
        return linear(layer, x) + (x @ adapter["a"]) @ adapter["b"] * (self.alpha / self.rank)


def rotated(images: np.ndarray) -> np.ndarray:
    """Images of 28 x 28 pixels in rows, turned by 90 degrees."""
    return np.rot90(images.reshape(-1, 28, 28), axes=(1, 2)).reshape(images.shape)


@lru_cache(maxsize=2)
def pretrained(source: Source, widths: tuple[int, ...], steps: int) -> list[Layer]:
    """An MLP trained on MNIST's training images by AdamW, the same in every process."""
    batches = Batches(data.mnist(source).train, BATCH_SIZE, seed=0)
    optimizer = optax.adamw(optax.cosine_decay_schedule(RATE, steps))

    def loss(model: list[Layer], batch: Split) -> Array:
        return cross_entropies(mlp(model, pixels(batch)), batch).mean()

    @jax.jit
    def step(model, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(model, batch), state, model)
        return optax.apply_updates(model, updates), state

    model = init_mlp(jax.random.key(0), widths)
    state = optimizer.init(model)
    for number in range(steps):
        model, state = step(model, state, batches.batch(number))
    return model
