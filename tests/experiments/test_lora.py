"""Low-rank adapters: what is frozen, what is trained, and where it starts."""

import jax
import numpy as np
import pytest

from lnb_experiments import data
from lnb_experiments.data import Source
from lnb_experiments.experiments import Lora
from lnb_experiments.experiments.lora import pretrained, rotated
from lnb_experiments.experiments.mlp import mlp
from lnb_experiments.experiments.mnist import pixels

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def setting():
    experiment = Lora.preset("tiny")
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it
        return experiment, jax.jit(experiment.init)(KEY), experiment.load(Source("synthetic"))


def test_images_are_rotated():
    image = np.arange(784).reshape(28, 28)
    turned = rotated(image.reshape(1, 784)).reshape(28, 28)
    assert turned[0, 0] == image[0, -1]
    assert turned[-1, 0] == image[0, 0]
    assert turned[-1, -1] == image[-1, 0]


def test_nothing_has_changed_at_the_start(setting):
    experiment, model, loaded = setting
    batch = loaded.train.take(slice(20))
    outputs = jax.jit(experiment.outputs)(model, batch, None)
    np.testing.assert_allclose(outputs, mlp(batch.shared, pixels(batch)), atol=1e-5)


def test_an_adapter_is_an_update_of_low_rank(setting):
    experiment, model, loaded = setting
    batch = loaded.test.take(slice(20))
    model = jax.tree.map(lambda leaf: leaf + 0.05, model)
    merged = [
        {**layer, "weight": layer["weight"] + adapter["a"] @ adapter["b"] * (16 / 4)}
        for layer, adapter in zip(batch.shared, model, strict=True)
    ]
    outputs = jax.jit(experiment.outputs)(model, batch, None)
    np.testing.assert_allclose(outputs, mlp(merged, pixels(batch)), rtol=1e-4, atol=1e-4)


def test_only_adapters_are_trained():
    model = jax.eval_shape(Lora.preset("arena").init, KEY)
    shapes = [(adapter["a"].shape, adapter["b"].shape) for adapter in model]
    wide = 1024
    assert shapes == [((784, 8), (8, wide)), ((wide, 8), (8, wide)), ((wide, 8), (8, 10))]
    assert all(set(adapter) == {"a", "b"} for adapter in model)


def test_the_network_knows_upright_digits_and_not_rotated_ones(setting):
    experiment, model, loaded = setting
    upright = data.mnist(Source("synthetic")).test._replace(shared=loaded.test.shared)
    accuracies = [
        experiment.metrics(jax.jit(experiment.counts)(model, split))["accuracy"]
        for split in (upright, loaded.test)
    ]
    assert accuracies[0] > 0.8
    assert accuracies[1] < 0.5


def test_the_network_is_trained_once_in_a_process(setting):
    experiment, _, loaded = setting
    again = pretrained(Source("synthetic"), experiment.widths, experiment.pretraining)
    assert again is loaded.train.shared
    assert experiment.hold_out(loaded).test.shared is again
