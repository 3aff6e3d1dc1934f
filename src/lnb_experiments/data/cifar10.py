"""CIFAR-10: small colour photographs of ten kinds of things (Krizhevsky, 2009)."""

from pathlib import Path

import numpy as np

from . import synthetic
from .inert_pickle import load_batch
from .locate import Files, find, present
from .types import Data, DataError, Source, Split

TRAIN = [f"data_batch_{number}" for number in range(1, 6)]
PIXELS = 3 * 32 * 32

BINARY = Files(
    "CIFAR-10",
    "cifar-10-batches-bin",
    {
        "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
        "test_batch.bin": "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
    },
    {
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz": (
            "md5:c32a1d4ab5d03f1284b67883e8d87530"
        )
    },
)

PYTHON = Files(
    "CIFAR-10",
    "cifar-10-batches-py",
    {
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    },
    {
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz": (
            "md5:c58f30108f718f92721af3b95e74349a"
        )
    },
)


def cifar10(source: Source, binary: Files = BINARY, python: Files = PYTHON) -> Data:
    """50,000 photographs to train on and 10,000 to test on.

    Args:
      source: where they come from. Of the two official layouts the binary one is preferred.
      binary: the binary layout's files and checksums, if not the official ones.
      python: the Python layout's.

    Returns:
      Inputs of uint8 [n, 32, 32, 3], targets of int32 [n].
    """
    if source.kind == "synthetic":
        return synthetic.photographs()
    pickled = present(python, source) and not present(binary, source)
    files, read = (python, _read_python) if pickled else (binary, _read_binary)
    folder = find(files, source)
    *train, test = (read(files, folder, name) for name in [*TRAIN, "test_batch"])
    inputs = np.concatenate([part.inputs for part in train])
    targets = np.concatenate([part.targets for part in train])
    return Data(Split(inputs, targets), test)


def _read_binary(files: Files, folder: Path, name: str) -> Split:
    """Records of a label and the pixels, one byte each."""
    path = folder / f"{name}.bin"
    content = files.read(folder, path.name)
    if not content or len(content) % (1 + PIXELS):
        raise DataError(
            f"{path} is damaged: {len(content)} bytes are not a number of records of {1 + PIXELS}."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + PIXELS)
    return _split(path, records[:, 1:], records[:, 0])


def _read_python(files: Files, folder: Path, name: str) -> Split:
    # The checksum comes first: what is unpickled is the official file, byte for byte.
    pixels, labels = load_batch(folder / name, files.read(folder, name))
    return _split(folder / name, pixels, labels)


def _split(path: Path, pixels: np.ndarray, labels: np.ndarray) -> Split:
    if pixels.shape != (len(labels), PIXELS) or labels.max() > 9:
        raise DataError(
            f"{path} is damaged: pixels of shape {pixels.shape} and {len(labels)} labels up to "
            f"{labels.max()}, where n x {PIXELS} and n labels up to 9 are expected."
        )
    # The files hold one plane a colour.
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Split(np.ascontiguousarray(images), labels.astype(np.int32))
