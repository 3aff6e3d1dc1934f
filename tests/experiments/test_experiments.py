"""The experiments' networks, losses and counts, against computations of their own."""

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from math import log

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lnb
from lnb_experiments.data import Source, Split
from lnb_experiments.experiments import (
    EXPERIMENTS,
    Autoencoder,
    CharLM,
    MatrixFactorization,
    Mnist,
    UNet,
    Vit,
)
from lnb_experiments.experiments.layers import dropout

KEY = jax.random.key(0)


def some_bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def labels(*shape: int, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(1).integers(0, classes, shape, np.int32)


def segmentation(size: int = 16) -> Split:
    inputs = np.random.default_rng(0).standard_normal((4, size, size, 3)).astype(np.float16)
    targets = labels(4, size, size, classes=21).astype(np.uint8)
    targets[:, :3] = 255
    return Split(inputs, targets)


def first_examples(name: str) -> Split:
    experiment = EXPERIMENTS[name].preset("tiny")
    with jax.numpy_dtype_promotion("standard"):  # optax.adamw needs it, for a pre-training
        loaded = experiment.load(Source("synthetic"))
    return loaded.train.take(slice(experiment.batch_size))


BATCHES: dict[str, Callable[[], Split]] = {
    "matrix-factorization": lambda: MatrixFactorization.preset("tiny").load(Source()).train,
    "mnist": lambda: Split(some_bytes(100, 784), labels(100)),
    "vit": lambda: Split(some_bytes(32, 32, 32, 3), labels(32)),
    "unet": segmentation,
    "autoencoder": lambda: Split(some_bytes(100, 784), labels(100)),
    "char-lm": lambda: Split(some_bytes(16, 17)[:, :-1], some_bytes(16, 17)[:, 1:]),
    "resnet": lambda: Split(some_bytes(32, 32, 32, 3), labels(32)),
    "lstm": lambda: Split(some_bytes(16, 17)[:, :-1], some_bytes(16, 17)[:, 1:]),
    **{name: partial(first_examples, name) for name in ("tabular", "burgers", "lora")},
}

every = pytest.mark.parametrize("name", EXPERIMENTS)


@cache
def tiny(name: str):
    """An experiment, a model and a batch, small."""
    experiment = EXPERIMENTS[name].preset("tiny")
    return experiment, jax.jit(experiment.init)(KEY), BATCHES[name]()


def outputs(experiment, model, batch, key=None):
    return jax.jit(experiment.outputs)(model, batch, key)


def counts(experiment, model, batch):
    return jax.jit(experiment.counts)(model, batch)


def calibrated(experiment, model, batch):
    return jax.jit(experiment.calibrated)(model, batch)


def loss(experiment, model, batch, key=None):
    return jax.jit(experiment.loss)(model, batch, key)


def parameters(experiment) -> int:
    """The number of parameters, without making them."""
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(experiment.init, KEY)))


def test_all_are_registered_by_name():
    assert list(EXPERIMENTS) == list(BATCHES)
    assert all(experiment.name == name for name, experiment in EXPERIMENTS.items())


@every
def test_presets_are_complete(name):
    for preset in ("tiny", "laptop", "arena", "paper"):
        experiment = EXPERIMENTS[name].preset(preset)
        assert experiment.evaluate_every <= experiment.steps
        assert set(experiment.options) <= set(experiment.sizes())


@every
def test_the_arena_has_25_evaluations(name):
    experiment = EXPERIMENTS[name].preset("arena")
    assert experiment.steps >= 300
    assert experiment.steps == 25 * experiment.evaluate_every
    assert (experiment.test_examples or 0) <= 2000


# Burgers' equation is tested by its solution.
@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "burgers"])
def test_counts_agree_with_the_objective(name):
    experiment, model, batch = tiny(name)
    mean = 1 if name != "matrix-factorization" else len(batch.targets)
    evaluated = calibrated(experiment, model, batch)
    metrics = experiment.metrics(counts(experiment, evaluated, batch))
    np.testing.assert_allclose(metrics["loss"] * mean, loss(experiment, model, batch), rtol=1e-5)
    assert experiment.headline in metrics


@every
def test_counts_add_up_over_batches(name):
    experiment, model, batch = tiny(name)
    model = calibrated(experiment, model, batch)
    middle = len(batch.targets) // 2
    parts = [counts(experiment, model, batch.take(s)) for s in (slice(middle), slice(middle, None))]
    summed = experiment.metrics(jax.tree.map(jnp.add, *parts))
    whole = experiment.metrics(counts(experiment, model, batch))
    assert summed == pytest.approx(whole, rel=1e-4)


@every
def test_every_parameter_belongs_to_a_neuron(name):
    experiment, model, batch = tiny(name)
    neurons = lnb.find_neurons(experiment.loss, model, batch, KEY)
    assert neurons.unclaimed == ()


@pytest.mark.parametrize(
    ("name", "classes"),
    [("mnist", 10), ("vit", 10), ("resnet", 10), ("char-lm", 256), ("lstm", 256)],
)
def test_an_untrained_network_knows_little(name, classes):
    experiment, model, batch = tiny(name)
    assert float(loss(experiment, model, batch)) == pytest.approx(log(classes), abs=0.5)


@every
def test_gradients_are_finite_and_not_zero(name):
    experiment, model, batch = tiny(name)
    model = jax.tree.map(lambda leaf: leaf + 0.01, model)  # low-rank adapters start at zero
    for gradient in jax.tree.leaves(jax.jit(jax.grad(experiment.loss))(model, batch, KEY)):
        assert gradient.dtype == jnp.float32
        assert np.isfinite(gradient).all()
        assert np.any(gradient != 0)


def test_matrix_factorization_is_as_published():
    experiment = MatrixFactorization.preset("paper")
    data = experiment.load(Source())
    matrix = np.linalg.lstsq(data.train.inputs, data.train.targets, rcond=None)[0].T
    assert matrix.shape == (100, 60)
    condition = np.linalg.cond(matrix)
    assert 30 < condition < 300
    assert f"condition number {condition:.3g};" in data.note
    assert data.train.inputs.shape == (10_000, 60)
    assert data.test.inputs.shape == (1_000, 60)
    assert parameters(experiment) == 100 * 60 + 60 * 60


def test_matrix_factorization_sums_squares():
    experiment, model, batch = tiny("matrix-factorization")
    w1, w2 = (np.asarray(model[name], np.float64) for name in ("w1", "w2"))
    columns = [w1 @ w2 @ x - y for x, y in zip(batch.inputs, batch.targets, strict=True)]
    expected = np.sum(np.square(columns))
    np.testing.assert_allclose(loss(experiment, model, batch), expected, rtol=1e-4)


def test_matrix_factorization_holds_out_fresh_columns_only():
    experiment = MatrixFactorization(**MatrixFactorization.presets["tiny"])
    data = experiment.load(Source())
    held_out = experiment.hold_out(data)
    assert held_out.train is data.train
    assert held_out.test.inputs.shape == data.test.inputs.shape
    assert not np.isclose(held_out.test.inputs, data.test.inputs).any()
    np.testing.assert_allclose(
        held_out.test.targets, held_out.test.inputs @ experiment.matrix().T, rtol=1e-4, atol=1e-5
    )


def test_mnist_is_as_published():
    assert parameters(Mnist.preset("paper")) == 785 * 800 + 801 * 10
    assert parameters(Mnist.preset("paper", depth=3)) == 785 * 800 + 801 * 800 + 801 * 10


def test_mnist_inverts_pixels():
    experiment, model, batch = tiny("mnist")
    inverted = Mnist.preset("tiny", inverted=True)
    flipped = Split(255 - batch.inputs, batch.targets)
    np.testing.assert_allclose(
        outputs(inverted, model, batch), outputs(experiment, model, flipped), atol=1e-5
    )


def test_mnist_has_at_least_one_layer():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        Mnist.preset("tiny", depth=0)


def test_vit_is_as_published():
    block = 4 * 512**2 + (513 * 256 + 257 * 512)
    expected = (4 * 4 * 3 + 1) * 512 + 512 + 65 * 512 + 6 * block + 513 * 10
    assert parameters(Vit.preset("paper")) == expected


def test_vit_cuts_patches_and_attends_as_a_loop_would():
    """One image through the network, written with loops over patches and heads in float64."""
    experiment, model, batch = tiny("vit")
    m = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def gelu(x):
        return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    image = (batch.inputs[0] / 255 - mean) / std
    patches = [
        image[i : i + 8, j : j + 8].ravel() for i in range(0, 32, 8) for j in range(0, 32, 8)
    ]
    embedded = np.stack(patches) @ m["patches"]["weight"] + m["patches"]["bias"]
    x = np.concatenate([m["class_token"], embedded]) + m["positions"]
    for block in m["blocks"]:
        query, key, value = (norm(x) @ block[name]["weight"] for name in ("query", "key", "value"))
        heads = [
            softmax(query[:, h] @ key[:, h].T / np.sqrt(8)) @ value[:, h]
            for h in (slice(0, 8), slice(8, 16))
        ]
        x = x + np.concatenate(heads, axis=1) @ block["output"]["weight"]
        hidden = gelu(norm(x) @ block["expand"]["weight"] + block["expand"]["bias"])
        x = x + hidden @ block["contract"]["weight"] + block["contract"]["bias"]
    expected = norm(x[0]) @ m["head"]["weight"] + m["head"]["bias"]

    np.testing.assert_allclose(outputs(experiment, model, batch)[0], expected, atol=1e-4)


def test_vit_drops_out_with_a_key_only():
    experiment, model, batch = tiny("vit")
    without = outputs(experiment, model, batch)
    kept = outputs(Vit.preset("tiny", dropout=0.0), model, batch, KEY)
    np.testing.assert_array_equal(without, kept)
    first = outputs(experiment, model, batch, KEY)
    assert not np.allclose(first, without)
    assert not np.allclose(first, outputs(experiment, model, batch, jax.random.key(1)))


def test_dropout_keeps_the_mean_and_drops_independently():
    x = np.asarray(dropout(jnp.ones((200, 301, 3)), 0.1, KEY))
    dropped = (x == 0).ravel()
    np.testing.assert_allclose(x[x != 0], 1 / 0.9, rtol=1e-6)
    # Five standard deviations; neighbours may share a random word, and must not share their luck.
    assert np.mean(dropped) == pytest.approx(0.1, abs=5 * np.sqrt(0.09 / dropped.size))
    pairs = dropped[: dropped.size // 2 * 2].reshape(-1, 2).all(1)
    assert np.mean(pairs) == pytest.approx(0.01, abs=5 * np.sqrt(0.01 / pairs.size))


@every
def test_only_vit_and_resnet_change_training_images(name):
    experiment, _, batch = tiny(name)
    changed = experiment.augment(np.random.default_rng(0), batch)
    assert changed.inputs.shape == batch.inputs.shape
    assert np.array_equal(changed.inputs, batch.inputs) == (name not in {"vit", "resnet"})
    np.testing.assert_array_equal(changed.targets, batch.targets)


def test_unet_is_as_published():
    def convolutions(*widths):
        return sum((9 * d_in + 1) * d_out for d_in, d_out in pairwise(widths))

    down = convolutions(3, 64, 64, 128, 128, 256, 256, 512, 512, 1024, 1024)
    up = sum(convolutions(2 * width, width, width) for width in (512, 256, 128, 64))
    double = sum((4 * 2 * width + 1) * width for width in (512, 256, 128, 64))
    experiment = UNet.preset("paper")
    assert parameters(experiment) == down + up + double + 65 * 21

    model = jax.eval_shape(experiment.init, KEY)
    images = jax.ShapeDtypeStruct((8, 384, 384, 3), jnp.float16)
    masks = jax.ShapeDtypeStruct((8, 384, 384), jnp.uint8)
    batch = Split(images, masks)  # pyright: ignore[reportArgumentType]
    shape = jax.eval_shape(experiment.outputs, model, batch, None).shape
    assert shape == (8, 384, 384, 21)


def test_unet_starts_near_chance():
    """He's weights leave the logits a variance of about 2, which adds to log(21)."""
    experiment, model, batch = tiny("unet")
    assert log(21) < float(loss(experiment, model, batch)) < log(21) + 1


def test_unet_ignores_void():
    experiment, model, batch = tiny("unet")
    logits = outputs(experiment, model, batch)
    void = jnp.asarray(batch.targets == 255)[..., None]
    elsewhere = jnp.where(void, 100 * jax.random.normal(KEY, logits.shape), logits)
    mean = experiment.objective(logits, batch)
    np.testing.assert_allclose(experiment.objective(elsewhere, batch), mean, rtol=1e-6)

    log_p = np.asarray(jax.nn.log_softmax(logits))[batch.targets != 255]
    truth = batch.targets[batch.targets != 255]
    np.testing.assert_allclose(mean, -log_p[range(len(truth)), truth].mean(), rtol=1e-5)


def test_unet_survives_a_batch_that_is_all_void():
    experiment, model, batch = tiny("unet")
    void = Split(batch.inputs, np.full_like(batch.targets, 255))
    assert float(loss(experiment, model, void)) == 0


def test_unet_reports_accuracy_and_mean_iou():
    experiment, model, batch = tiny("unet")
    # Only some classes occur, so that others are absent from the truth or from everything.
    batch = Split(batch.inputs, np.where(batch.targets == 255, 255, batch.targets % 5))
    predicted = np.asarray(outputs(experiment, model, batch).argmax(-1))
    valid = batch.targets != 255
    truth, guess = batch.targets[valid], predicted[valid]
    ious = []
    for label in range(21):
        union = np.sum((truth == label) | (guess == label))
        if union:
            ious.append(np.sum((truth == label) & (guess == label)) / union)
    assert 5 <= len(ious) < 21

    sums = counts(experiment, model, batch)
    metrics = experiment.metrics(sums)
    assert int(sums["count"]) == valid.sum()
    assert metrics["accuracy"] == pytest.approx(np.mean(truth == guess))
    assert metrics["miou"] == pytest.approx(np.mean(ious))


def test_autoencoder_is_as_published():
    widths = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    expected = sum((widths[i] + 1) * widths[i + 1] for i in range(8))
    assert parameters(Autoencoder.preset("paper")) == expected


def test_autoencoder_measures_images_and_has_a_linear_code():
    experiment, model, batch = tiny("autoencoder")
    images = batch.inputs / 255.0
    x = images
    for part in ("encoder", "decoder"):
        for i, layer in enumerate(model[part]):
            x = x @ np.asarray(layer["weight"], np.float64) + np.asarray(layer["bias"])
            x = np.tanh(x) if i == 0 else x
    p = 1 / (1 + np.exp(-x))
    entropy = -(images * np.log(p) + (1 - images) * np.log(1 - p)).sum(1)

    metrics = experiment.metrics(counts(experiment, model, batch))
    assert metrics["loss"] == pytest.approx(entropy.mean(), rel=1e-5)
    assert metrics["error"] == pytest.approx(((p - images) ** 2).sum(1).mean(), rel=1e-4)


def test_char_lm_has_one_embedding():
    block = 4 * 384**2 + 385 * 1536 + 1537 * 384
    assert parameters(CharLM.preset("paper")) == (256 + 256) * 384 + 6 * block


def test_char_lm_does_not_see_the_future():
    experiment, model, batch = tiny("char-lm")
    changed = batch.inputs.copy()
    changed[:, 9:] += 1
    before = outputs(experiment, model, batch)
    after = outputs(experiment, model, Split(changed, batch.targets))
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not np.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_char_lm_sees_the_past():
    experiment, model, batch = tiny("char-lm")
    changed = batch.inputs.copy()
    changed[:, 0] += 1
    before = outputs(experiment, model, batch)
    after = outputs(experiment, model, Split(changed, batch.targets))
    assert not np.isclose(before[:, -1], after[:, -1]).all(-1).any()


def test_char_lm_reports_bits():
    experiment, model, batch = tiny("char-lm")
    metrics = experiment.metrics(counts(experiment, model, batch))
    assert metrics["bits"] == pytest.approx(np.log2(np.exp(metrics["loss"])))
