"""Matrix factorization by a two-layer linear network: sum_i |W1 W2 x_i - A x_i|^2."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..data import Data, Source, Split
from ..experiment import Experiment
from .layers import normal

PAPER = {"n": 10_000, "rows": 100, "columns": 60, "batch_size": 10_000, "evaluate_every": 10}


@dataclass(frozen=True)
class MatrixFactorization(Experiment):
    """Recht's example of gradient descent being slow, ten times as large in each dimension.

    The rows of A are uniform in [0, 1] and scaled from 1 down to 1e-5. The paper speaks of a
    condition number of 1e5; that is the ratio of the scales, and A's own is about 100, which the
    data's note states as computed. Each step uses all n columns, and the loss is a sum over them.

    Attributes:
      n: columns x_i to train on; a tenth as many to test on.
      rows: rows of A and W1.
      columns: columns of A; W2 is square.
    """

    name = "matrix-factorization"
    summary = "a two-layer linear network fits an ill-conditioned matrix, full batch"
    dataset = "synthetic columns"
    optimizers = ("sgd", "adam", "algorithm1", "algorithm2", "lnb", "levenberg-marquardt")
    presets: ClassVar = {
        "tiny": {
            "n": 200,
            "rows": 12,
            "columns": 8,
            "batch_size": 200,
            "steps": 20,
            "evaluate_every": 10,
        },
        "laptop": {**PAPER, "steps": 500},
        "arena": {**PAPER, "steps": 3000, "evaluate_every": 120},
        "paper": {**PAPER, "steps": 3000},
    }
    headline = "loss"
    decays_weights = False
    larger_is_better = False
    # A step of fixed length never settles; the paper's algorithms take a schedule of lengths.
    decays = (1.0, 1e-5)
    trials = 10
    tolerance = 1e-10
    # Of a sum over all columns, with weights and outputs far from one.
    rates: ClassVar = {
        "sgd": (1e-9, 1e-7),
        "adam": (1e-2, 1.0),
        **dict.fromkeys(("algorithm1", "algorithm2", "lnb"), (1.0, 100.0)),
    }

    n: int = 10_000
    rows: int = 100
    columns: int = 60

    def matrix(self) -> np.ndarray:
        """A, the same in every run."""
        scales = np.linspace(1, 1e-5, self.rows)
        return scales[:, None] * np.random.default_rng(0).uniform(size=(self.rows, self.columns))

    def examples(self, count: int, seed: int) -> Split:
        """Standard normal x_i and their A x_i, one a row."""
        inputs = np.random.default_rng(seed).standard_normal((count, self.columns))
        targets = inputs @ self.matrix().T
        return Split(inputs.astype(np.float32), targets.astype(np.float32))

    def load(self, source: Source) -> Data:
        condition = np.linalg.cond(self.matrix())
        note = (
            f"made from a seed; A has condition number {condition:.3g}; the training loss is a sum "
            "over columns, the test loss a mean"
        )
        return Data(self.examples(self.n, seed=1), self.examples(self.n // 10, seed=2), note)

    def hold_out(self, data: Data) -> Data:
        """Fresh columns to choose by: the loss is a sum, so fewer to train on would change it."""
        return Data(data.train, self.examples(self.n // 10, seed=3), data.note)

    def init(self, key: Array) -> dict[str, Array]:
        keys = jax.random.split(key)
        return {
            "w1": normal(keys[0], (self.rows, self.columns)),
            "w2": normal(keys[1], (self.columns, self.columns)),
        }

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        return jnp.asarray(batch.inputs) @ model["w2"].T @ model["w1"].T

    def objective(self, outputs: Array, batch: Split) -> Array:
        return jnp.sum((outputs - batch.targets) ** 2)

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        return {
            "count": jnp.asarray(len(batch.targets), jnp.int32),
            "loss": self.loss(model, batch, None),
        }
