"""AdamW as nanoGPT runs it at small sizes, and the same with Nesterov's momentum."""

from typing import Any

import optax

from .matrices import are_matrices

B2, WEIGHT_DECAY = 0.99, 0.1


def adamw(learning_rate: Any, weight_decay: float = WEIGHT_DECAY) -> optax.GradientTransformation:
    """Loshchilov and Hutter 2019. Only arrays of two and more axes decay."""
    return optax.adamw(learning_rate, b2=B2, weight_decay=weight_decay, mask=are_matrices)


def nadamw(learning_rate: Any, weight_decay: float = WEIGHT_DECAY) -> optax.GradientTransformation:
    """Dozat 2016, with AdamW's weight decay."""
    return optax.nadamw(learning_rate, b2=B2, weight_decay=weight_decay, mask=are_matrices)
