"""Muon for hidden weights, AdamW for all else.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon. Its steps are scaled as in Liu et al.
2025 (arXiv 2502.16982), so that one learning rate, about AdamW's, serves both.
"""

from typing import Any

import jax
import optax
from jax import Array
from optax.contrib import MuonDimensionNumbers

from .adamw import WEIGHT_DECAY
from .matrices import are_matrices

# The first and the last layer of a network, and what is added to the first one's outputs.
OUTER = {"embedding", "patches", "positions", "class_token", "stem", "head"}
RMS = 0.2  # about the root mean square of AdamW's steps, in units of the learning rate


def muon(learning_rate: Any, weight_decay: float = WEIGHT_DECAY) -> optax.GradientTransformation:
    """Muon with Nesterov's momentum of 0.95; AdamW has momentums of 0.9 and 0.95."""
    return optax.chain(
        optax.contrib.muon(
            -1.0,  # the direction itself: the sign and the rate come last
            adam_b2=0.95,
            muon_weight_dimension_numbers=dimension_numbers,
        ),
        optax.stateless(lambda updates, _: jax.tree.map(_scale, updates, hidden(updates))),
        optax.add_decayed_weights(weight_decay, are_matrices),
        optax.scale_by_learning_rate(learning_rate),
    )


def hidden(params: Any) -> Any:
    """Which parameters Muon trains: the weights of hidden layers."""
    last = _last_layer(params)

    def is_hidden(path: tuple[Any, ...], x: Array) -> bool:
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        # "For a ConvNet [...] all the convolutional filters except the first one" (Muon's README).
        outer = OUTER & {*names} or names[:3] == ("down", "0", "0") or names[: len(last)] == last
        return 2 <= x.ndim <= 4 and not outer

    return jax.tree_util.tree_map_with_path(is_hidden, params)


def dimension_numbers(params: Any) -> Any:
    """What is a row and what a column of the matrices that Muon trains; None for the others."""
    kinds = {
        2: MuonDimensionNumbers(0, 1),
        3: MuonDimensionNumbers(1, 2),
        4: MuonDimensionNumbers((0, 1, 2), 3),
    }
    return jax.tree.map(lambda x, own: kinds[x.ndim] if own else None, params, hidden(params))


def _last_layer(params: Any) -> tuple[str, ...]:
    """The path of the output layer of an MLP, or of an autoencoder; of others it is a "head"."""
    layers, path = params, ()
    if isinstance(params, dict) and "decoder" in params:
        layers, path = params["decoder"], ("decoder",)
    return (*path, str(len(layers) - 1)) if isinstance(layers, list) else ("head",)


def _scale(update: Array, own: bool) -> Array:
    """From optax's scale, sqrt(max(1, outputs / inputs)), to 0.2 sqrt(max(inputs, outputs)).

    From 0.2.7 on, optax has this as `consistent_rms=0.2`.
    """
    if not own:
        return update
    inputs = update.shape[1] if update.ndim == 3 else update.size // update.shape[-1]
    return RMS * inputs**0.5 * update
