"""Seeded stand-ins for the data sets: the same shapes and types, small, and learnable."""

import numpy as np

from .types import Data, Split

SEED = 0


def digits() -> Data:
    """In place of MNIST."""
    return _classes("MNIST", 2000, 500, (28, 28, 1), block=7, shape=(784,))


def photographs() -> Data:
    """In place of CIFAR-10."""
    return _classes("CIFAR-10", 500, 200, (32, 32, 3), block=8, shape=(32, 32, 3))


def _classes(name: str, train: int, test: int, image, block: int, shape) -> Data:
    """Ten patterns of coloured blocks, each image one of them in noise."""
    rng = np.random.default_rng(SEED)
    height, width, channels = image
    blocks = rng.uniform(0, 160, (10, height // block, width // block, channels))
    patterns = blocks.repeat(block, axis=1).repeat(block, axis=2)

    def split(count: int) -> Split:
        labels = rng.integers(10, size=count)
        images = patterns[labels] + rng.uniform(0, 95, (count, *image))
        return Split(images.astype(np.uint8).reshape(count, *shape), labels.astype(np.int32))

    return Data(split(train), split(test), f"synthetic data, not {name}")


def segmentation(size: int) -> Data:
    """In place of PASCAL VOC 2012: boxes with a void outline, their colours those of a class."""
    rng = np.random.default_rng(SEED)
    colours = rng.uniform(-2, 2, (21, 3))

    def example() -> tuple[np.ndarray, np.ndarray]:
        height, width = (int(side) for side in rng.integers(size // 2, size + 1, size=2))
        top, left = int(rng.integers(height // 2)), int(rng.integers(width // 2))
        box = slice(top, top + height // 2), slice(left, left + width // 2)
        inside = tuple(slice(side.start + 1, side.stop - 1) for side in box)
        mask = np.full((size, size), 255, np.uint8)
        image = np.zeros((size, size, 3))
        label = rng.integers(1, 21)
        mask[:height, :width], mask[box], mask[inside] = 0, 255, label
        image[:height, :width], image[box] = colours[0], colours[label]
        image[:height, :width] += 0.2 * rng.normal(size=(height, width, 3))
        return image.astype(np.float16), mask

    def split(count: int) -> Split:
        images, masks = zip(*(example() for _ in range(count)), strict=True)
        return Split(np.stack(images), np.stack(masks))

    return Data(split(24), split(8), "synthetic data, not PASCAL VOC 2012")


def sentences(size: int) -> bytes:
    """In place of a text: made-up words, each of which is followed by one of three others."""
    rng = np.random.default_rng(SEED)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(rng.choice(letters, rng.integers(2, 8))) for _ in range(40)]
    followers = rng.integers(len(words), size=(len(words), 3))
    choices = rng.integers(3, size=size)  # more than enough: a word has more than one letter
    spoken, word, length = [], 0, 0
    for choice in choices:
        spoken.append(words[word])
        length += len(words[word]) + 1
        if length > size:
            break
        word = followers[word, choice]
    return " ".join(spoken).encode()[:size]
