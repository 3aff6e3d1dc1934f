"""A made-up table whose columns have very different scales, as in tables that people have."""

import numpy as np

from .types import Data, Split

FACTORS, HIDDEN, PRODUCTS = 8, 16, 10
NOISE = 0.2


def tabular(train: int, test: int, features: int) -> Data:
    """A table to regress on. The same in every run.

    The columns have common factors, so they are correlated; scales from 1e-3 to 1e3; and every
    second one has a mean of two to ten standard deviations. The target is a smooth function of the
    columns before they were scaled (a random network and some products of two columns) with noise.
    It has mean 0 and variance 1 in training.

    Returns:
      Inputs of float32 [n, features], targets of float32 [n].
    """
    rng = np.random.default_rng(0)
    columns = _correlated(rng, train + test, features)
    target = _target(rng, columns)
    target += NOISE * target.std() * rng.standard_normal(target.shape)
    target = (target - target[:train].mean()) / target[:train].std()
    scales = rng.permutation(np.geomspace(1e-3, 1e3, features))
    offsets = rng.uniform(2, 10, features) * rng.choice([-1, 1], features)
    offsets[::2] = 0
    inputs = (columns + offsets) * scales
    rows = Split(inputs.astype(np.float32), target.astype(np.float32))
    note = f"made from a seed; noise is {NOISE**2 / (1 + NOISE**2):.1%} of the target's variance"
    return Data(rows.take(slice(train)), rows.take(slice(train, None)), note)


def _correlated(rng: np.random.Generator, count: int, features: int) -> np.ndarray:
    """Columns of variance 1 which mostly consist of a few common factors."""
    loadings = rng.standard_normal((FACTORS, features)) / FACTORS**0.5
    common = rng.standard_normal((count, FACTORS)) @ loadings
    columns = common + 0.5 * rng.standard_normal((count, features))
    return columns / columns.std(0)


def _target(rng: np.random.Generator, columns: np.ndarray) -> np.ndarray:
    features = columns.shape[1]
    hidden = np.tanh(columns @ rng.standard_normal((features, HIDDEN)) * 2 / features**0.5)
    pairs = rng.integers(features, size=(2, PRODUCTS))
    products = columns[:, pairs[0]] * columns[:, pairs[1]]
    network = hidden @ rng.standard_normal(HIDDEN) / HIDDEN**0.5
    return network + 0.5 * (products @ rng.standard_normal(PRODUCTS)) / PRODUCTS**0.5
