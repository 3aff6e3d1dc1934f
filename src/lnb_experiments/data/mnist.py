"""MNIST: handwritten digits (LeCun, Cortes and Burges, 1998)."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from . import synthetic
from .locate import Files, find
from .types import Data, DataError, Source, Split

CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}

# The authors' own page no longer serves the files; this is where torchvision takes them from.
MNIST = Files(
    "MNIST",
    "mnist",
    CHECKSUMS,
    {
        f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}": CHECKSUMS[name]
        for name in CHECKSUMS
    },
    archived=False,
)


def mnist(source: Source, files: Files = MNIST) -> Data:
    """60,000 digits to train on and 10,000 to test on.

    Args:
      source: where they come from.
      files: the files and their checksums, if not the official ones.

    Returns:
      Inputs of uint8 [n, 784], targets of int32 [n].
    """
    if source.kind == "synthetic":
        return synthetic.digits()
    folder = find(files, source)
    return Data(_split(files, folder, "train"), _split(files, folder, "t10k"))


def _split(files: Files, folder: Path, name: str) -> Split:
    images = _read_idx(files, folder, f"{name}-images-idx3-ubyte.gz", axes=3)
    labels = _read_idx(files, folder, f"{name}-labels-idx1-ubyte.gz", axes=1)
    if len(images) != len(labels):
        raise DataError(f"{folder}: {len(images)} {name} images, but {len(labels)} labels.")
    return Split(images.reshape(len(images), -1), labels.astype(np.int32))


def _read_idx(files: Files, folder: Path, name: str, axes: int) -> np.ndarray:
    """An IDX file of bytes: 0, 0, 8, the number of axes, their lengths, the values."""
    try:
        content = gzip.decompress(files.read(folder, name))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{folder / name} is damaged: {error}.") from error
    magic, start = bytes([0, 0, 8, axes]), 4 + 4 * axes
    if content[:4] != magic or len(content) < start:
        raise DataError(
            f"{folder / name} is not an IDX file of {axes} axes: it begins with "
            f"{content[:4].hex(' ')}, not with {magic.hex(' ')}."
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", axes, offset=4))
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{folder / name} is damaged: {len(content) - start} values for shape {shape}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
