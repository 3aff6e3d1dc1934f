"""Random changes of training images."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


def crop_and_flip(rng: np.random.Generator, images: np.ndarray, padding: int = 4) -> np.ndarray:
    """Crops each image at random out of its zero-padded self, and mirrors every second one.

    Args:
      rng: where the choices come from.
      images: [n, height, width, channels].
      padding: zeros at each side before cropping.

    Returns:
      Images of the same shape and type.
    """
    count, height, width, channels = images.shape
    top, left = rng.integers(2 * padding + 1, size=(2, count))
    flipped = rng.random(count) < 0.5

    padded = np.zeros(
        (count, height + 2 * padding, width + 2 * padding, channels), dtype=images.dtype
    )
    padded[:, padding : padding + height, padding : padding + width] = images
    # A row of a crop is one run of memory, and is copied as such.
    runs = sliding_window_view(padded.reshape(*padded.shape[:2], -1), width * channels, axis=2)
    rows = top[:, None] + np.arange(height)
    crops = runs[np.arange(count)[:, None], rows, left[:, None] * channels].reshape(images.shape)
    crops[flipped] = crops[flipped, :, ::-1]
    return crops
