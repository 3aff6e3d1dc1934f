"""What a training run sees: batches, random crops, held-out examples, texts, stand-ins."""

from itertools import pairwise

import numpy as np
import pytest

from lnb_experiments import data
from lnb_experiments.data import Batches, DataError, Source, Split

RNG = np.random.default_rng(5)
SYNTHETIC = Source("synthetic")


def numbered(count: int) -> Split:
    return Split(np.arange(count)[:, None], np.arange(count))


def noisy(rng: np.random.Generator, batch: Split) -> Split:
    return Split(batch.inputs + rng.integers(1000, size=batch.inputs.shape), batch.targets)


@pytest.mark.parametrize("augment", [None, noisy])
def test_a_batch_depends_on_seed_and_step_alone(augment):
    steps = [7, 0, 25, 7, 3, 26, 8, 7]
    make = lambda seed: Batches(numbered(23), 4, seed, augment)
    shared = make(1)
    for step in steps:
        for one, other in zip(shared.batch(step), make(1).batch(step), strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(make(1).batch(7).targets, make(2).batch(7).targets)


def test_each_example_once_an_epoch():
    batches = Batches(numbered(23), 4, seed=0)
    assert batches.per_epoch == 5
    orders = []
    for epoch in range(3):
        seen = [batches.batch(5 * epoch + step) for step in range(5)]
        assert all(len(batch.targets) == 4 for batch in seen)
        assert all(np.array_equal(batch.inputs[:, 0], batch.targets) for batch in seen)
        orders.append(np.concatenate([batch.targets for batch in seen]))
        assert len(set(orders[-1])) == 20
    assert not np.array_equal(orders[0], orders[1])


def test_augmentation_is_new_at_each_step_and_not_the_order():
    draws = []
    batches = Batches(
        numbered(6), 6, 0, lambda rng, batch: (draws.append(rng.permutation(6)), batch)[1]
    )
    orders = [np.random.default_rng([0, epoch]).permutation(6) for epoch in range(20)]
    for step in range(20):
        batches.batch(step)
    assert len({tuple(draw) for draw in draws}) > 15
    assert sum(np.array_equal(a, b) for a, b in zip(draws, orders, strict=True)) < 3


def test_a_full_batch_is_the_split_itself():
    split = numbered(9)
    batches = Batches(split, 9, seed=0)
    assert batches.per_epoch == 1
    assert batches.batch(3) is split


@pytest.mark.parametrize("size", [0, 10])
def test_batch_sizes_that_do_not_fit(size):
    with pytest.raises(ValueError, match=f"batch size of {size} does not fit 9 training examples"):
        Batches(numbered(9), size, seed=0)


def test_hold_out_is_disjoint_and_complete():
    held = data.hold_out(data.Data(numbered(57), numbered(3), "note"))
    assert len(held.test.targets) == 5
    assert sorted([*held.train.targets, *held.test.targets]) == list(range(57))
    assert held.note == "note"


@pytest.mark.parametrize("shape", [(40, 8, 8, 3), (15, 5, 7, 1)])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_crop_and_flip(shape, padding):
    images = RNG.integers(1, 256, size=shape, dtype=np.uint8)
    cropped = data.crop_and_flip(np.random.default_rng(0), images, padding)
    assert cropped.dtype == np.uint8
    assert cropped.shape == shape
    # The same choices in the same order, one image at a time.
    rng = np.random.default_rng(0)
    tops, lefts = rng.integers(2 * padding + 1, size=(2, len(images)))
    flips = rng.random(len(images)) < 0.5
    for row, image in enumerate(images):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = tops[row], lefts[row]
        crop = padded[top : top + shape[1], left : left + shape[2]]
        np.testing.assert_array_equal(cropped[row], crop[:, ::-1] if flips[row] else crop)
    assert 0 < flips.mean() < 1


def test_text_in_windows(tmp_path):
    content = bytes(RNG.integers(256, size=1015, dtype=np.uint8))
    path = tmp_path / "text"
    path.write_bytes(content)
    loaded = data.text(Source(), str(path), 20)
    assert (len(loaded.train.inputs), len(loaded.test.inputs)) == (45, 5)
    inputs = np.concatenate([loaded.train.inputs, loaded.test.inputs])
    targets = np.concatenate([loaded.train.targets, loaded.test.targets])
    assert bytes(inputs.ravel()) == content[:1000]
    assert bytes(targets.astype(np.uint8).ravel()) == content[1:1001]
    assert (inputs.dtype, targets.dtype) == (np.uint8, np.int32)


def test_texts_that_cannot_be_used(tmp_path):
    (tmp_path / "short").write_bytes(bytes(40))
    with pytest.raises(DataError, match=r"short has 40 characters.*windows of 20, which take 41"):
        data.text(Source(), str(tmp_path / "short"), 20)
    with pytest.raises(DataError, match="absent cannot be read"):
        data.text(Source(), str(tmp_path / "absent"), 20)


def test_the_documentation_of_python():
    loaded = data.text(Source(), None, 100)
    content = bytes(np.concatenate([loaded.train.inputs, loaded.test.inputs]).ravel())
    assert 700_000 < len(content) < 1_500_000
    assert b"Return the sample arithmetic mean of data." in content
    assert "Python 3." in loaded.note


@pytest.mark.parametrize("load", [data.mnist, data.cifar10], ids=["mnist", "cifar10"])
def test_synthetic_images_are_learnable(load):
    """By least squares, as a network would: far better than one in ten."""
    loaded = load(SYNTHETIC)
    assert "synthetic" in loaded.note
    flat = lambda split: split.inputs.reshape(len(split.targets), -1)[:, ::7] / 255 - 0.5
    weights = np.linalg.lstsq(flat(loaded.train), np.eye(10)[loaded.train.targets], rcond=1e-2)[0]
    guesses = (flat(loaded.test) @ weights).argmax(axis=1)
    assert (guesses == loaded.test.targets).mean() > 0.9
    for one, other in zip(loaded.train, load(SYNTHETIC).train, strict=True):
        np.testing.assert_array_equal(one, other)


def test_synthetic_shapes():
    digits, photographs = data.mnist(SYNTHETIC), data.cifar10(SYNTHETIC)
    assert (digits.train.inputs.shape, digits.train.inputs.dtype) == ((2000, 784), np.uint8)
    assert photographs.test.inputs.shape == (200, 32, 32, 3)
    assert digits.train.targets.dtype == photographs.train.targets.dtype == np.int32


def test_synthetic_segmentation_is_learnable():
    """The mean colour of each class, seen in training, tells it in the test."""
    loaded = data.voc2012(SYNTHETIC, 48)
    assert (loaded.train.inputs.shape, loaded.train.inputs.dtype) == ((24, 48, 48, 3), np.float16)
    assert (loaded.test.targets.shape, loaded.test.targets.dtype) == ((8, 48, 48), np.uint8)
    assert "synthetic" in loaded.note
    classes = np.setdiff1d(loaded.train.targets, 255)
    assert set(classes) <= set(range(21))
    inputs = loaded.train.inputs.astype(float)
    means = np.stack([inputs[loaded.train.targets == label].mean(axis=0) for label in classes])
    known = np.isin(loaded.test.targets, classes)
    pixels = loaded.test.inputs[known].astype(float)
    guesses = classes[np.square(pixels[:, None] - means).sum(axis=-1).argmin(axis=1)]
    right = guesses == loaded.test.targets[known]
    assert right.mean() > 0.9 > (loaded.test.targets[known] == 0).mean()


def test_synthetic_text_repeats_itself():
    loaded = data.text(SYNTHETIC, None, 64)
    assert (len(loaded.train.inputs), len(loaded.test.inputs)) == (576, 64)
    assert "synthetic" in loaded.note
    words = bytes(np.concatenate(loaded.train.inputs)).split()
    assert len(set(words[1:-1])) <= 40
    assert len(set(pairwise(words[1:-1]))) <= 120
