"""Prodigy: "An Expeditiously Adaptive Parameter-Free Learner"."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def prodigy(learning_rate: Any, weight_decay: float = 0.01) -> optax.GradientTransformation:
    """Mishchenko and Defazio 2023, arXiv 2306.06101; a learning rate of 1 is the usual one."""
    own = optax.contrib.prodigy(
        learning_rate, estim_lr0=1e-4, weight_decay=weight_decay, safeguard_warmup=True
    )
    # optax's state holds the first parameters themselves, whose buffers a step could not donate.
    init = lambda params: own.init(jax.tree.map(jnp.copy, params))
    return optax.GradientTransformation(init, own.update)
