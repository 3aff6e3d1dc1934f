"""What an experiment is: data, a network, a loss, and how results are counted."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jax import Array

from .data import Data, Source, Split, hold_out


@dataclass(frozen=True)
class Experiment:
    """One training problem at one size. A subclass is an experiment, its fields are the sizes.

    A model is a tree of the arrays that are trained. All that is traced is free of side effects,
    and randomness comes from the key.

    Class attributes:
      name: what it is called on the command line.
      summary: one line for `lnb list`.
      dataset: the name of its data set, for `lnb list`.
      optimizers: those that it compares by default.
      presets: field values by preset; what a preset does not name has the field's default.
      headline: the metric that a winner is chosen by; `larger_is_better` says in which direction.
      options: fields that may be set on the command line, beyond those of this class.
      trials: how many trials a sweep gives to each optimizer by default.
      tolerance: a run is done early when its loss has fallen to this part of its first.
      decays: what the learning rate falls to by the last step, as parts of it; a sweep tries all.
      decays_weights: whether people train such a network with weight decay. Few do in a regression.
      rates: search spaces for learning rates, (lowest, highest) by optimizer, where this problem's
        scale makes those of the optimizer pointless.

    Attributes:
      steps: number of training steps.
      batch_size: examples a step.
      evaluate_every: steps between two evaluations.
      test_examples: how many an evaluation takes, the first; None takes all.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    dataset: ClassVar[str]
    optimizers: ClassVar[tuple[str, ...]]
    presets: ClassVar[Mapping[str, Mapping[str, Any]]]
    headline: ClassVar[str] = "accuracy"
    larger_is_better: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ()
    trials: ClassVar[int] = 4
    tolerance: ClassVar[float] = 0.0
    decays: ClassVar[tuple[float, ...]] = (1.0,)
    decays_weights: ClassVar[bool] = True
    rates: ClassVar[Mapping[str, tuple[float, float]]] = {}

    steps: int
    batch_size: int
    evaluate_every: int
    test_examples: int | None = None

    def load(self, source: Source) -> Data:
        """The data. Small integers may stay as they are: `outputs` converts them on the device."""
        raise NotImplementedError

    def hold_out(self, data: Data) -> Data:
        """Training data split in two, for choosing hyperparameters without the test data."""
        return hold_out(data)

    def init(self, key: Array) -> Any:
        """A model with random parameters."""
        raise NotImplementedError

    def outputs(self, model: Any, batch: Split, key: Array | None) -> Array:
        """What the network says of a batch. Without a key, as in a test: no dropout."""
        raise NotImplementedError

    def objective(self, outputs: Array, batch: Split) -> Array:
        """The loss of these outputs, a scalar."""
        raise NotImplementedError

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        """What an evaluation adds up over batches."""
        raise NotImplementedError

    def metrics(self, counts: Mapping[str, Any]) -> dict[str, float]:
        """What is reported of the sums of `counts`; by default, each as a mean over "count"."""
        return {
            name: float(value) / float(counts["count"])
            for name, value in counts.items()
            if name != "count"
        }

    def calibrated(self, model: Any, batch: Split) -> Any:
        """The model as it is evaluated. Batch normalisation takes its statistics from this batch,
        which is of training examples."""
        return model

    def augment(self, rng: np.random.Generator, batch: Split) -> Split:
        """A randomly changed training batch, on the host."""
        return batch

    def loss(self, model: Any, batch: Split, key: Array | None) -> Array:
        return self.objective(self.outputs(model, batch, key), batch)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "Experiment":
        """The experiment at a preset's sizes, with changes."""
        return cls(**{**cls.presets[name], **changes})

    @property
    def variant(self) -> str:
        """The name with the options that are not as usual, such as `mnist-inverted`."""
        usual = {field.name: field.default for field in fields(self)}
        parts = [self.name]
        for option in self.options:
            value = getattr(self, option)
            if value != usual[option]:
                parts += [option] if value is True else [option, Path(str(value)).stem]
        return "-".join(parts)

    def sizes(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}
