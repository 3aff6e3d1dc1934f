"""Text for a language model of characters, which are bytes."""

import platform
from pathlib import Path

import numpy as np

from . import documentation, synthetic
from .locate import read
from .types import Data, DataError, Source, Split

CHARACTERS = 256
WINDOWS = 640  # of the synthetic text


def text(source: Source, path: str | None, length: int) -> Data:
    """A text in windows that do not overlap; the last tenth of them is tested on.

    Args:
      source: of a text that is not given by its path.
      path: any file. Without one, the documentation of Python's standard library.
      length: characters a window.

    Returns:
      Inputs of uint8 [n, length], and as targets the characters that follow, int32 [n, length].
    """
    if source.kind == "synthetic":
        content = synthetic.sentences(WINDOWS * length + 1)
        return _windows(content, length, "the synthetic text", "synthetic data, not a real text")
    if path is not None:
        return _windows(read(Path(path).expanduser()), length, path, "")
    note = f"documentation of the standard library of Python {platform.python_version()}"
    return _windows(documentation.standard_library(), length, f"the {note}", note)


def _windows(content: bytes, length: int, name: str, note: str) -> Data:
    count = (len(content) - 1) // length
    if count < 2:
        raise DataError(
            f"{name} has {len(content)} characters: too few for two windows of {length}, which "
            f"take {2 * length + 1}. Choose a longer text."
        )
    characters = np.frombuffer(content, np.uint8)[: count * length + 1]
    inputs = characters[:-1].reshape(count, length)
    targets = characters[1:].astype(np.int32).reshape(count, length)
    train = count - max(1, count // 10)
    return Data(
        Split(inputs[:train], targets[:train]), Split(inputs[train:], targets[train:]), note
    )
