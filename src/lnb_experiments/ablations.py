"""LNB with one thing changed, to see what it is worth: `lnb run mnist --optimizer lnb+adam-rest`.

Each is a function like `lnb.lnb`, of a learning rate and neurons. Where weight decay is
not what is changed, it is that of `before`, the default until docs/results/ablations.md.
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

before = partial(lnb.lnb, weight_decay=1e-4, weight_decay_mask=None)


def adam_rest(learning_rate, neurons: lnb.Neurons, *, ratio: float = 0.1, biases: bool = True):
    """Adam for all that is no matrix: embeddings, positions, norm scales, and maybe biases.

    Args:
      ratio: of Adam's learning rate to that of LNB.
      biases: whether Adam has the biases of matrices too. Their neurons are centred all the same.
    """
    matrices = [n for n in neurons if n.kind in MATRICES and n.has_matrix]  # none tied
    solved = {n.weight for n in matrices} | (set() if biases else {n.bias for n in matrices})
    adam = optax.adamw(ratio * learning_rate, b2=0.99, weight_decay=0.0)
    return chosen(solved, before(learning_rate, neurons), adam)


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


decayed = partial(lnb.lnb, weight_decay_mask=are_matrices)

ABLATIONS: dict[str, Callable[..., Any]] = {
    "before": before,
    "adam-rest": adam_rest,
    "momentum-0.95": partial(before, gradient_decay=0.95),
    "no-nesterov": partial(before, nesterov=False),
    "damping-0.1": partial(before, damping=0.1),
    "damping-10": partial(before, damping=10.0),
    "decay-0.3": partial(decayed, weight_decay=0.3),
    "decay-0.1": partial(decayed, weight_decay=0.1),
    "damping-0.3-decay-0.1": partial(decayed, weight_decay=0.1, damping=0.3),
}
