"""The residual network: batch normalisation in training and in evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lnb_experiments.data import Source, Split
from lnb_experiments.experiments import ResNet
from lnb_experiments.experiments.resnet import conv, init_conv

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def setting():
    experiment = ResNet.preset("tiny")
    data = experiment.load(Source("synthetic"))
    return experiment, jax.jit(experiment.init)(KEY), data.train.take(slice(32))


def test_sizes():
    """ResNet-18 for CIFAR-10, whose number of parameters is widely published."""
    model = jax.eval_shape(ResNet.preset("paper").init, KEY)
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == 11_173_962


@pytest.mark.parametrize("stride", [1, 2])
def test_a_normalised_convolution(stride):
    """Against loops over windows, in float64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 6, 6, 3)).astype(np.float32) + 5
    layer = init_conv(KEY, 3, 3, 2)
    layer["scale"] = jnp.asarray([2.0, 0.5])
    layer["shift"] = jnp.asarray([1.0, -1.0])
    y, fixed = conv(layer, jnp.asarray(x), stride)

    # Of an even size, XLA pads the right side only where the stride is 2.
    padded = np.pad(x, ((0, 0), (2 - stride, 1), (2 - stride, 1), (0, 0)))
    weight = np.asarray(layer["weight"], np.float64)
    expected = np.empty(y.shape)
    for i, j in np.ndindex(y.shape[1:3]):
        window = padded[:, i * stride : i * stride + 3, j * stride : j * stride + 3]
        expected[:, i, j] = np.tensordot(window, weight, axes=3)
    mean, variance = expected.mean((0, 1, 2)), expected.var((0, 1, 2))
    expected = (expected - mean) / np.sqrt(variance + 1e-5) * [2, 0.5] + [1, -1]
    np.testing.assert_allclose(y, expected, atol=1e-4)
    np.testing.assert_allclose(fixed["mean"], mean, rtol=1e-4)
    np.testing.assert_allclose(fixed["variance"], variance, rtol=1e-3)


def test_training_takes_statistics_of_the_batch_and_evaluation_does_not(setting):
    experiment, model, batch = setting
    outputs = jax.jit(experiment.outputs)
    evaluated = jax.jit(experiment.calibrated)(model, batch)
    half = batch.take(slice(16))
    whole = outputs(model, batch, None)
    np.testing.assert_allclose(outputs(evaluated, batch, None), whole, atol=1e-5)
    np.testing.assert_allclose(outputs(evaluated, half, None), whole[:16], atol=1e-5)
    assert not np.allclose(outputs(model, half, None), whole[:16], atol=1e-2)


def test_a_calibrated_model_stays_as_it_is(setting):
    experiment, model, batch = setting
    evaluated = jax.jit(experiment.calibrated)(model, batch)
    again = jax.jit(experiment.calibrated)(evaluated, Split(batch.inputs // 2, batch.targets))
    jax.tree.map(np.testing.assert_array_equal, evaluated, again)


def test_weights_before_a_norm_have_no_scale(setting):
    experiment, model, batch = setting
    larger = {**model, "stem": {**model["stem"], "weight": 10 * model["stem"]["weight"]}}
    outputs = jax.jit(experiment.outputs)
    np.testing.assert_allclose(outputs(larger, batch, None), outputs(model, batch, None), atol=1e-3)
