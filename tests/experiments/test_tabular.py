"""The table: badly scaled, learnable, the same in every run."""

import numpy as np

from lnb_experiments.data import Source
from lnb_experiments.experiments import Tabular


def load():
    return Tabular.preset("arena").load(Source())


def test_the_table_is_badly_scaled_and_correlated():
    train, test, _ = load()
    assert train.inputs.shape == (100_000, 40)
    assert test.inputs.shape == (10_000, 40)
    mean, std = train.inputs.mean(0, np.float64), train.inputs.std(0, np.float64)
    np.testing.assert_allclose(np.sort(std), np.geomspace(1e-3, 1e3, 40), rtol=0.02)
    offset = np.abs(mean / std)
    assert (offset[::2] < 0.02).all()
    assert ((offset[1::2] > 1.9) & (offset[1::2] < 10.1)).all()
    correlations = np.corrcoef(train.inputs.T.astype(np.float64)) - np.eye(40)
    assert 0.2 < np.abs(correlations).mean() < 0.6


def test_the_target_is_standardised_and_not_linear():
    train = load().train
    np.testing.assert_allclose([train.targets.mean(), train.targets.std()], [0, 1], atol=1e-5)
    columns = (train.inputs - train.inputs.mean(0)) / train.inputs.std(0)
    features = np.hstack([columns, np.ones((len(columns), 1))])
    weights = np.linalg.lstsq(features, train.targets, rcond=None)[0]
    unexplained = ((features @ weights - train.targets) ** 2).mean()
    assert 0.15 < unexplained < 0.9


def test_the_table_is_always_the_same():
    first, second = load(), load()
    np.testing.assert_array_equal(first.train.inputs, second.train.inputs)
    np.testing.assert_array_equal(first.test.targets, second.test.targets)
