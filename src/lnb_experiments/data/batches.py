"""Batches for training: which examples each step sees."""

from collections.abc import Callable

import numpy as np

from .types import DataError, Split

Augment = Callable[[np.random.Generator, Split], Split]


class Batches:
    """Random batches, each example once an epoch; an incomplete last batch is left out.

    What a step sees depends on the seed and its number alone, so that a run that was interrupted
    goes on as if it had not been.

    Args:
      split: the examples.
      batch_size: how many of them a batch holds. All of them: the split itself, in its own order.
      seed: of the order, and of the changes.
      augment: (generator, batch) -> a randomly changed batch.
    """

    def __init__(
        self, split: Split, batch_size: int, seed: int, augment: Augment | None = None
    ) -> None:
        self.count = len(split.targets)
        if not 1 <= batch_size <= self.count:
            raise DataError(
                f"a batch size of {batch_size:,} does not fit {self.count:,} training examples; "
                f"choose one from 1 to {self.count:,}"
            )
        self.split = split
        self.batch_size = batch_size
        self.per_epoch = self.count // batch_size
        self._seed = seed
        self._augment = augment
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, step: int) -> Split:
        """The batch of a step, counted from 0."""
        batch = self.split if self.batch_size == self.count else self.split.take(self._rows(step))
        if self._augment is None:
            return batch
        # Seeds are filled up with zeros: without the 1 this would be the order of an epoch.
        return self._augment(np.random.default_rng([self._seed, step, 1]), batch)

    def _rows(self, step: int) -> np.ndarray:
        epoch, position = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.count)
            self._epoch = epoch
        return self._order[position * self.batch_size : (position + 1) * self.batch_size]
