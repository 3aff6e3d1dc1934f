"""Regression on a table whose columns nobody standardised."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from .. import data
from ..data import Data, Source, Split
from ..experiment import Experiment
from .layers import Layer, init_linear, linear


@dataclass(frozen=True)
class Tabular(Experiment):
    """An MLP with GELU units, fed columns of scales from 1e-3 to 1e3 as they are.

    To standardise them would be right, and is often forgotten. The loss is half the mean squared
    error; the target has variance 1.

    Attributes:
      rows: of the table to train on; a tenth as many to test on.
      features: columns.
      width: units of a hidden layer.
      depth: number of weight layers.
    """

    name = "tabular"
    summary = "regression on a table whose columns have scales from 1e-3 to 1e3"
    dataset = "a made-up table"
    optimizers = ("adamw", "muon", "lnb")
    presets: ClassVar = {
        "tiny": {
            "rows": 1000,
            "width": 16,
            "batch_size": 100,
            "steps": 40,
            "evaluate_every": 20,
        },
        "laptop": {"batch_size": 1000, "steps": 1000, "evaluate_every": 100},
        "arena": {"batch_size": 1000, "steps": 5000, "evaluate_every": 200, "test_examples": 2000},
        "paper": {
            "rows": 500_000,
            "width": 1024,
            "depth": 4,
            "batch_size": 1000,
            "steps": 10_000,
            "evaluate_every": 200,
        },
    }
    headline = "loss"
    decays_weights = False
    larger_is_better = False

    rows: int = 100_000
    features: int = 40
    width: int = 256
    depth: int = 3

    def load(self, source: Source) -> Data:
        return data.tabular(self.rows, self.rows // 10, self.features)

    def init(self, key: Array) -> list[Layer]:
        widths = (self.features, *[self.width] * (self.depth - 1), 1)
        keys = jax.random.split(key, self.depth)
        return [init_linear(k, *shape) for k, shape in zip(keys, pairwise(widths), strict=True)]

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        x = jnp.asarray(batch.inputs)
        for layer in model[:-1]:
            x = jax.nn.gelu(linear(layer, x))
        return linear(model[-1], x)[:, 0]

    def objective(self, outputs: Array, batch: Split) -> Array:
        return ((outputs - batch.targets) ** 2).mean() / 2

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        count = len(batch.targets)
        return {
            "count": jnp.asarray(count, jnp.int32),
            "loss": count * self.loss(model, batch, None),
        }
