"""A network that solves Burgers' equation: its derivatives are part of the loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..data import Data, Source, Split
from ..data.burgers import VISCOSITY, burgers
from ..experiment import Experiment
from .layers import Layer
from .mlp import init_mlp, mlp


@dataclass(frozen=True)
class Burgers(Experiment):
    """A physics-informed network with tanh units (Raissi et al., 2019).

    The loss is the mean square of the residual u_t + u u_x - v u_xx at points inside, plus the mean
    squared error of u at points at t = 0 and x = +-1. An example is one point of each kind, so its
    inputs are [t, x, t, x], and its target is u at the second. Evaluations compare u with the exact
    solution: there, the loss is the mean squared error.

    Attributes:
      points: to train on, of each kind.
      width: units of a hidden layer.
      depth: number of weight layers.
    """

    name = "burgers"
    summary = "a physics-informed network for Burgers' equation"
    dataset = "points of the equation"
    optimizers = ("adamw", "muon", "lnb")
    presets: ClassVar = {
        "tiny": {
            "points": 1000,
            "width": 12,
            "depth": 3,
            "batch_size": 100,
            "steps": 40,
            "evaluate_every": 20,
        },
        "laptop": {"batch_size": 500, "steps": 1000, "evaluate_every": 100},
        "arena": {"batch_size": 500, "steps": 10_000, "evaluate_every": 400, "test_examples": 2000},
        "paper": {
            "width": 64,
            "depth": 9,
            "batch_size": 5000,
            "steps": 20_000,
            "evaluate_every": 200,
        },
    }
    headline = "loss"
    decays_weights = False
    larger_is_better = False

    points: int = 10_000
    width: int = 40
    depth: int = 5

    def load(self, source: Source) -> Data:
        """Random points to train on; a grid, in random order, to test on."""
        rng = np.random.default_rng(0)
        inside, edge = random_points(rng, self.points), random_points(rng, self.points)
        kinds = np.arange(self.points) % 4  # half of them at t = 0, a quarter at each end
        edge[:, 0] *= kinds >= 2
        edge[:, 1] = np.select([kinds == 2, kinds == 3], [-1.0, 1.0], edge[:, 1])
        values = np.where(kinds >= 2, 0.0, -np.sin(np.pi * edge[:, 1]))
        train = Split(np.hstack([inside, edge]).astype(np.float32), values.astype(np.float32))
        t, x = np.meshgrid(np.linspace(0, 1, 26), np.linspace(-1, 1, 201), indexing="ij")
        grid = rng.permutation(np.stack([t.ravel(), x.ravel()], axis=1))
        return Data(train, solved(grid), "random points; the test loss is the error of u")

    def hold_out(self, data: Data) -> Data:
        """All points to train on, and the exact solution at fresh ones to choose by."""
        return Data(data.train, solved(random_points(np.random.default_rng(1), 2000)), data.note)

    def init(self, key: Array) -> list[Layer]:
        return init_mlp(key, (2, *[self.width] * (self.depth - 1), 1))

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        """The residual and u, in two columns."""
        inside, edge = jnp.split(jnp.asarray(batch.inputs), 2, axis=1)
        return jnp.stack([residual(lambda p: solution(model, p), inside), solution(model, edge)], 1)

    def objective(self, outputs: Array, batch: Split) -> Array:
        residuals, values = outputs[:, 0], outputs[:, 1]
        return (residuals**2).mean() + ((values - batch.targets) ** 2).mean()

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        errors = solution(model, jnp.asarray(batch.inputs)[:, 2:]) - batch.targets
        return {"count": jnp.asarray(len(errors), jnp.int32), "loss": (errors**2).sum()}


def random_points(rng: np.random.Generator, count: int) -> np.ndarray:
    """Points [t, x] of [0, 1] x [-1, 1]."""
    return rng.uniform([0, -1], [1, 1], (count, 2))


def solved(points: np.ndarray) -> Split:
    """Points [t, x] with the exact solution."""
    values = burgers(points[:, 0], points[:, 1])
    return Split(np.hstack([points, points]).astype(np.float32), values.astype(np.float32))


def solution(model: list[Layer], points: Array) -> Array:
    """What the network takes for u at points [t, x]. It is fed 2 t - 1, as [-1, 1] as x is."""
    t, x = points[:, :1], points[:, 1:]
    return mlp(model, jnp.concatenate([2 * t - 1, x], axis=1))[:, 0]


def residual(u: Callable[[Array], Array], points: Array) -> Array:
    """u_t + u u_x - v u_xx at points [t, x]."""
    t, x = (jnp.broadcast_to(row, points.shape) for row in jnp.eye(2)[:, None])

    def with_slope(points: Array) -> tuple[Array, Array]:
        return jax.jvp(u, (points,), (x,))

    (value, u_x), (_, u_xx) = jax.jvp(with_slope, (points,), (x,))
    _, u_t = jax.jvp(u, (points,), (t,))
    return u_t + value * u_x - VISCOSITY * u_xx
