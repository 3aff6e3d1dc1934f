"""A tree of parameters as its neurons see it: a matrix and a bias each."""

from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax import Array

from ._features import Layout, accumulator
from ._jaxpr import is_array, is_parameter, path_name
from ._metric import Features, Theta, product
from ._neurons import Neurons


def split(neurons: Neurons, tree: Any) -> tuple[dict[str, Theta], dict[str, Array]]:
    """Takes a tree shaped like the parameters apart: each neuron's share, and all other leaves.

    A neuron whose weight is masked out is not there; one whose bias is masked out has none.
    """
    leaves = _named_leaves(neurons, tree)
    thetas: dict[str, Theta] = {}
    taken: set[str] = set()
    for neuron in neurons:
        if neuron.kind == "identity" or neuron.weight not in leaves:
            continue
        taken |= {neuron.weight, neuron.bias or neuron.weight}
        bias = leaves.get(neuron.bias) if neuron.bias is not None else None
        thetas[neuron.name] = Theta(
            _to_matrix(neuron.layout, leaves[neuron.weight]),
            None if bias is None else _to_matrix(neuron.bias_layout, bias)[:, 0, :],
        )
    return thetas, {name: leaf for name, leaf in leaves.items() if name not in taken}


def join(
    neurons: Neurons, tree: Any, thetas: Mapping[str, Theta], rest: Mapping[str, Array]
) -> Any:
    """The inverse of `split`, with the structure and dtypes of `tree`."""
    arrays = dict(rest)
    for neuron in neurons:
        if neuron.name not in thetas:
            continue
        theta = thetas[neuron.name]
        shares = [(neuron.weight, neuron.layout.from_matrix(theta.weight))]
        if theta.bias is not None and neuron.bias is not None:
            assert neuron.bias_layout is not None
            shares.append((neuron.bias, neuron.bias_layout.from_matrix(theta.bias[:, None, :])))
        for name, share in shares:  # of slices of one parameter
            arrays[name] = arrays[name] + share if name in arrays else share
    place = lambda path, leaf: (
        arrays[path_name(path)].astype(leaf.dtype) if is_parameter(leaf) else leaf
    )
    return jax.tree_util.tree_map_with_path(place, tree)


def refuse_other_leaves(params: Any) -> None:
    """Only arrays can have a state."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_array(leaf):
            raise TypeError(
                f"{path_name(path)} is no array but {leaf!r}. Pass the arrays alone; of an Equinox "
                "model: optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
            )


def refuse_positional(further: tuple) -> None:
    if further:
        raise TypeError(
            "features are a keyword argument: "
            "optimizer.update(grads, state, params, features=features)."
        )


def metric_product(neurons: Neurons, features: Mapping[str, Features], vector: Any) -> Any:
    """M times a tree shaped like the parameters: for tests, spectra and solvers of one's own.

    M is block-diagonal over the neurons, and the identity on all other parameters.

    Args:
      neurons: the `Neurons`.
      features: what `backprop` or `forward_features` returned.
      vector: a tree shaped like the parameters.

    Returns:
      A tree shaped like the parameters.
    """
    thetas, rest = split(neurons, vector)
    for name in thetas:
        if name not in features:
            raise ValueError(
                f"there are no features for the neuron {name!r}, but for {', '.join(features)}. "
                "Take them with the same neurons: lnb.backprop(loss_fn, neurons)(params, batch)."
            )
    products = {
        n.name: product(features[n.name], thetas[n.name], n.layout, n.bias_layout)
        for n in neurons
        if n.name in thetas
    }
    return join(neurons, vector, products, rest)


def _to_matrix(layout: Layout | None, leaf: Array) -> Array:
    assert layout is not None
    return layout.to_matrix(leaf.astype(accumulator(leaf.dtype)))


def _named_leaves(neurons: Neurons, tree: Any) -> dict[str, Array]:
    shapes = dict(neurons.shapes)
    leaves: dict[str, Array] = {}
    masked = lambda node: isinstance(node, optax.MaskedNode)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=masked):
        if not is_parameter(leaf):
            continue
        name = path_name(path)
        if name not in shapes:
            raise ValueError(
                f"parameter {name!r} is not among those that find_neurons saw "
                f"({', '.join(shapes) or 'none'}). Call find_neurons again on these parameters."
            )
        if tuple(leaf.shape) != shapes[name]:
            raise ValueError(
                f"parameter {name!r} has shape {tuple(leaf.shape)}, but find_neurons saw "
                f"{shapes[name]}. Call find_neurons again on these parameters."
            )
        leaves[name] = leaf
    return leaves
