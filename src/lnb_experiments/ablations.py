"""LNB with one thing changed, to see what it is worth: `lnb run mnist --optimizer lnb+adam-rest`.

Each is a function like `lnb.lnb`, of a learning rate and neurons.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

import lnb
from lnb._jaxpr import path_name

from .peers.matrices import are_matrices

MATRICES = {"dense", "conv"}  # kinds of neurons


def adam_rest(learning_rate, neurons: lnb.Neurons, *, ratio: float = 0.1, biases: bool = True):
    """Adam for all that is no matrix: embeddings, positions, norm scales, and maybe biases.

    Args:
      ratio: of Adam's learning rate to that of LNB.
      biases: whether Adam has the biases of matrices too. Their neurons are centred all the same.
    """
    matrices = [n for n in neurons if n.kind in MATRICES and n.has_matrix]  # none tied
    solved = {n.weight for n in matrices} | (set() if biases else {n.bias for n in matrices})
    adam = optax.adamw(ratio * learning_rate, b2=0.99, weight_decay=0.0)
    return chosen(solved, lnb.lnb(learning_rate, neurons), adam)


def chosen(
    names: set[str | None],
    ours: optax.GradientTransformationExtraArgs,
    others: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """The updates of one transformation for the parameters of these names, of another for others.

    Both see all gradients.
    """

    def init(params):
        return ours.init(params), others.init(params)

    def update(updates, state, params=None, **extra_args):
        first, first_state = ours.update(updates, state[0], params, **extra_args)
        second, second_state = others.update(updates, state[1], params)

        choose = lambda path, a, b: a if path_name(path) in names else b
        new = jax.tree_util.tree_map_with_path(choose, first, second)
        return new, (first_state, second_state)

    return optax.GradientTransformationExtraArgs(init, update)


def decayed(learning_rate, neurons: lnb.Neurons, *, weight_decay: float):
    """Weight decay that matters, but none for biases and norms."""
    masked = {"weight_decay": weight_decay, "weight_decay_mask": are_matrices}
    return lnb.lnb(learning_rate, neurons, **masked)


ABLATIONS: dict[str, Callable[..., Any]] = {
    "adam-rest": adam_rest,
    "adam-rest-but-biases": partial(adam_rest, biases=False),
    "adam-rest-0.3": partial(adam_rest, ratio=0.3),
    "momentum-0.95": partial(lnb.lnb, gradient_decay=0.95),
    "no-nesterov": partial(lnb.lnb, nesterov=False),
    "damping-0.1": partial(lnb.lnb, damping=0.1),
    "damping-10": partial(lnb.lnb, damping=10.0),
    "decay-0.01": partial(decayed, weight_decay=0.01),
    "decay-0.1": partial(decayed, weight_decay=0.1),
    "memory-0.99": partial(lnb.lnb, solver=lnb.Cholesky(decay=0.99)),
    "every-5": partial(lnb.lnb, solver=lnb.Cholesky(every=5)),
    "every-20": partial(lnb.lnb, solver=lnb.Cholesky(every=20)),
    "spectral": partial(lnb.lnb, norm="spectral"),
}
