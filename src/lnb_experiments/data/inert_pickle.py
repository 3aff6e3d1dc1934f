"""Reads the pickles of CIFAR-10 without running anything that they name.

A pickle may call any function. In these, three names of NumPy occur, which say how to build an
array; each is met with a class that only remembers what it is given. All other names are refused.
A few bytes may also ask for gigabytes of memory: `check_sizes` refuses that before anything is
built.
"""

import io
import pickle
import pickletools
from pathlib import Path

import numpy as np

from .types import DataError


class Inert:
    """Stands for whatever the pickle would have built, and does nothing."""

    state: tuple = ()

    def __init__(self, *arguments):
        del arguments

    def __setstate__(self, state: tuple) -> None:
        self.state = state


class InertUnpickler(pickle.Unpickler):
    admitted = frozenset(
        {("numpy.core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")}
    )

    def find_class(self, module_name: str, global_name: str) -> type[Inert]:
        if (module_name, global_name) not in self.admitted:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")
        return Inert

    def persistent_load(self, pid):
        raise pickle.UnpicklingError(f"it refers to {pid!r} outside of itself")


def check_sizes(content: bytes) -> None:
    """Refuses a length beyond the end of the pickle, and a far too large index into its memo.

    `pickle` sets memory aside for both before it finds out. The memo lists what is used again, in
    order: no index is larger than the number of operations so far.
    """
    for count, (operation, argument, position) in enumerate(pickletools.genops(content), 1):
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count:
            raise pickle.UnpicklingError(
                f"it writes to entry {argument} of its memo at byte {position}, where there can be "
                f"no more than {count}"
            )


def load_batch(path: Path, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The pixels, uint8 [n, 3072], and the labels, uint8 [n], of a batch.

    Args:
      path: named in errors.
      content: what the file holds.
    """
    try:
        check_sizes(content)
        batch = InertUnpickler(io.BytesIO(content), encoding="bytes").load()
        # An array's state: a version, its shape, its type, whether columns come first, its bytes.
        _, shape, _, columns_first, values = batch[b"data"].state
        pixels = np.frombuffer(values, np.uint8).reshape(shape, order="F" if columns_first else "C")
        # Each label is one number: a list within a list would be refused here.
        return pixels, np.frombuffer(bytes([*batch[b"labels"]]), np.uint8)
    # A damaged pickle can fail in any way.
    except Exception as error:
        raise DataError(f"{path} is refused, it is not a batch of CIFAR-10: {error}.") from error
