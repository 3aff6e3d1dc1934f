"""What a data set is here: arrays on the host, a part to train on and a part to test on."""

from typing import Any, Literal, NamedTuple

import numpy as np


class Split(NamedTuple):
    """Examples: arrays whose first axis counts them. A batch is a `Split` too.

    Attributes:
      inputs: what a network is fed.
      targets: what it should say.
      shared: a tree of arrays that all examples have in common, such as frozen weights.
    """

    inputs: np.ndarray
    targets: np.ndarray
    shared: Any = None

    def take(self, rows) -> "Split":
        return Split(self.inputs[rows], self.targets[rows], self.shared)


class Data(NamedTuple):
    """A data set.

    Attributes:
      train: examples to train on.
      test: examples to test on.
      note: what a reader of the results must know, such as that the set is partial or synthetic.
    """

    train: Split
    test: Split
    note: str = ""


class Source(NamedTuple):
    """Where data comes from.

    Attributes:
      kind: the real data, or a seeded stand-in of the same shapes that needs no file.
      folder: where the official files lie; without it `$LNB_DATA`, then downloads kept in a cache.
    """

    kind: Literal["real", "synthetic"] = "real"
    folder: str | None = None


class DataError(ValueError):
    """Data that is missing, damaged or too small; the message says what, where, what to do."""


def hold_out(data: Data, fraction: float = 0.1) -> Data:
    """The training part alone, a fraction of it held out as what is tested on.

    The same examples are held out in every run, whatever its seed.
    """
    order = np.random.default_rng(0).permutation(len(data.train.targets))
    count = max(1, int(fraction * len(order)))
    return Data(data.train.take(order[count:]), data.train.take(order[:count]), data.note)
