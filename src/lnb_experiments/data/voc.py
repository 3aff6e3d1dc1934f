"""PASCAL VOC 2012: photographs whose pixels are labelled (Everingham et al., 2015)."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from . import synthetic
from .locate import Files, find, read
from .types import Data, DataError, Source, Split

CANVAS = 500  # pixels: no photograph is larger
CLASSES = 21  # with the background, which is 0
VOID = 255  # a pixel that does not count
MEAN = np.array([0.485, 0.456, 0.406])  # of ImageNet's pixels, from 0 to 1
STD = np.array([0.229, 0.224, 0.225])
NORMALISED = ((np.arange(256)[:, None] / 255 - MEAN) / STD).T.astype(np.float32)  # by byte
OFFICIAL = {"train": 1464, "val": 1449}

VOC2012 = Files(
    "PASCAL VOC 2012",
    "VOCdevkit/VOC2012",
    {
        "ImageSets/Segmentation/train.txt": None,
        "ImageSets/Segmentation/val.txt": None,
        "JPEGImages": None,
        "SegmentationClass": None,
    },
    {
        "https://thor.robots.ox.ac.uk/pascal/VOC/voc2012/VOCtrainval_11-May-2012.tar": (
            "md5:6cd6e144f989b92b3379bac3b3de84fd"
        )
    },
)


def voc2012(source: Source, size: int) -> Data:
    """1,464 photographs to train on and 1,449 to test on, or those that the lists name.

    Photographs are normalised, filled up with zeros to 500 x 500 at the right and the bottom, and
    resized. Filled-up pixels do not count: their target is void.

    Args:
      source: where they come from.
      size: height and width after resizing.

    Returns:
      Inputs of float16 [n, size, size, 3], whose rounding is finer than that of the files' bytes;
      targets of uint8 [n, size, size]: 0 to 20, or 255 for void.
    """
    if source.kind == "synthetic":
        return synthetic.segmentation(size)
    folder = find(VOC2012, source)
    train, test = (_load(folder, part, size) for part in ("train", "val"))
    return Data(train, test, _note(len(train.targets), len(test.targets)))


def _note(train: int, test: int) -> str:
    if (train, test) == (OFFICIAL["train"], OFFICIAL["val"]):
        return ""
    return (
        f"{_of(train, OFFICIAL['train'])} training images and "
        f"{_of(test, OFFICIAL['val'])} validation images of PASCAL VOC 2012"
    )


def _of(count: int, official: int) -> str:
    return f"{count:,} {'of' if count <= official else 'instead of'} {official:,}"


def _load(folder: Path, part: str, size: int) -> Split:
    names = _names(folder, part)
    inputs = np.empty((len(names), size, size, 3), np.float16)
    targets = np.empty((len(names), size, size), np.uint8)

    def load(row: int) -> None:
        inputs[row], targets[row] = _example(folder, names[row], size)

    # Pillow and NumPy let go of the interpreter's lock where the time goes.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(load, range(len(names))))
    return Split(inputs, targets)


def _names(folder: Path, part: str) -> Sequence[str]:
    """The names of a list, all of whose files exist."""
    path = folder / "ImageSets" / "Segmentation" / f"{part}.txt"
    names = read(path).decode("ascii", "replace").split()
    if not names:
        raise DataError(f"{path} names no image.")
    absent = [file for name in names for file in _paths(folder, name) if not file.exists()]
    if absent:
        listed = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
        raise DataError(
            f"{path} names {len(names)} images, but {len(absent)} of their files are missing: "
            f"{listed}. Extract the archive again, or shorten the list."
        )
    return names


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / "JPEGImages" / f"{name}.jpg", folder / "SegmentationClass" / f"{name}.png"


def _example(folder: Path, name: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    photograph, mask = _paths(folder, name)
    pixels, classes = _decode(photograph, convert="RGB"), _decode(mask)
    if classes.shape != pixels.shape[:2] or max(classes.shape) > CANVAS:
        raise DataError(
            f"{mask} has shape {classes.shape} and its photograph {pixels.shape}, where the same "
            f"height and width are expected, at most {CANVAS}."
        )
    # Filled up after it is normalised: zero is the mean colour.
    planes = [
        _resize(table.take(pixels[..., colour]), 0, size, Image.Resampling.BILINEAR)
        for colour, table in enumerate(NORMALISED)
    ]
    return np.stack(planes, axis=-1), _resize(classes, VOID, size, Image.Resampling.NEAREST)


def _resize(plane: np.ndarray, fill: int, size: int, how: Image.Resampling) -> np.ndarray:
    canvas = np.full((CANVAS, CANVAS), fill, plane.dtype)
    canvas[: plane.shape[0], : plane.shape[1]] = plane
    return np.asarray(Image.fromarray(canvas).resize((size, size), how))


def _decode(path: Path, convert: str | None = None) -> np.ndarray:
    """An image's pixels; without conversion, those of a mask: indices into its palette."""
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert(convert) if convert else image)
    # To Pillow a broken PNG is a SyntaxError, and a broken header can claim a gigantic image.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is damaged: {error}.") from error
    if convert is None:
        _check_mask(path, pixels)
    return pixels


def _check_mask(path: Path, pixels: np.ndarray) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 2:
        raise DataError(f"{path} is not a mask: it holds colours, not indices into a palette.")
    values = np.flatnonzero(np.bincount(pixels.ravel(), minlength=256))
    wrong = [int(value) for value in values if CLASSES <= value != VOID]
    if wrong:
        raise DataError(
            f"{path} holds classes {wrong}; 0 to {CLASSES - 1} and {VOID} are expected."
        )
