"""What experiments have in common whose targets are classes."""

from typing import Any

import jax.numpy as jnp
import optax
from jax import Array

from ..data import Split
from ..experiment import Experiment


class Classification(Experiment):
    """The loss is the mean cross entropy of the logits, over all axes of the targets."""

    def objective(self, outputs: Array, batch: Split) -> Array:
        return cross_entropies(outputs, batch).mean()

    def counts(self, model: Any, batch: Split) -> dict[str, Array]:
        logits = self.outputs(model, batch, None)
        targets = jnp.asarray(batch.targets, jnp.int32)
        return {
            "count": jnp.asarray(targets.size, jnp.int32),
            "loss": cross_entropies(logits, batch).sum(),
            "accuracy": (logits.argmax(-1).astype(jnp.int32) == targets).sum(),
        }


def cross_entropies(logits: Array, batch: Split) -> Array:
    """The cross entropy of each target."""
    targets = jnp.asarray(batch.targets, jnp.int32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)
