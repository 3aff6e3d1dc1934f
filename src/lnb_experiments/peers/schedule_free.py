"""Schedule-free AdamW: "The Road Less Scheduled"."""

from typing import Any

import jax.numpy as jnp
import optax

from .matrices import are_matrices

B1, B2, WEIGHT_DECAY = 0.9, 0.9955, 0.08


def schedule_free(
    learning_rate: Any, weight_decay: float = WEIGHT_DECAY
) -> optax.GradientTransformation:
    """Defazio et al. 2024, arXiv 2405.15682. It is tested at `schedule_free_eval_params`.

    As `optax.contrib.schedule_free_adamw`, but that only arrays of two and more axes decay. An
    iterate counts in the average by the square of the largest learning rate so far, which is kept
    in the state; so the learning rate of this step is all that it asks for.
    """
    adamw_without_momentum = optax.chain(
        optax.scale_by_rms(decay=B2, eps=1e-8, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(weight_decay, are_matrices),
        optax.scale_by_learning_rate(learning_rate),
    )
    return optax.contrib.schedule_free(adamw_without_momentum, jnp.asarray(learning_rate), b1=B1)
