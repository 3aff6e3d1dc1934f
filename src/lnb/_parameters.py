"""A tree of parameters as its neurons see it: a matrix and a bias each."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import optax
from jax import Array

from ._checks import check_features, check_shapes
from ._features import Features, Layout, accumulator
from ._jaxpr import is_parameter, path_name
from ._metric import Theta, product
from ._neurons import Neuron, Neurons


def split(neurons: Neurons, tree: Any) -> tuple[dict[str, Theta], dict[str, Array]]:
    """Takes a tree shaped like the parameters apart: each neuron's share, and all other leaves.

    A neuron whose weight is masked out is not there; one whose bias is masked out has none.
    """
    masked = lambda node: isinstance(node, optax.MaskedNode)
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=masked)
    leaves = {path_name(path): leaf for path, leaf in paths if is_parameter(leaf)}
    check_shapes(neurons, {name: leaf.shape for name, leaf in leaves.items()}, masked=True)
    thetas, taken = {}, set()
    for neuron in neurons:
        if neuron.kind == "identity" or neuron.weight not in leaves:
            continue
        weight, bias = _matrix(neuron.layout, leaves[neuron.weight]), None
        if neuron.bias in leaves:
            bias = _matrix(neuron.bias_layout, leaves[neuron.bias])[:, 0, :]
        thetas[neuron.name] = Theta(weight, bias)
        taken |= {neuron.weight, neuron.bias}
    return thetas, {name: leaf for name, leaf in leaves.items() if name not in taken}


def join(
    neurons: Neurons, tree: Any, thetas: Mapping[str, Theta], rest: Mapping[str, Array]
) -> Any:
    """The inverse of `split`, with the structure and dtypes of `tree`."""
    arrays = dict(rest)

    def add(name: str | None, layout: Layout | None, matrix: Array) -> None:
        assert name is not None
        assert layout is not None
        share = layout.from_matrix(matrix)
        arrays[name] = arrays[name] + share if name in arrays else share

    for neuron in neurons:
        if neuron.name in thetas:
            weight, bias = thetas[neuron.name]
            add(neuron.weight, neuron.layout, weight)
            if bias is not None:
                add(neuron.bias, neuron.bias_layout, bias[:, None, :])
    place = lambda path, leaf: (
        arrays[path_name(path)].astype(leaf.dtype) if is_parameter(leaf) else leaf
    )
    return jax.tree_util.tree_map_with_path(place, tree)


def present(neurons: Neurons, thetas: Mapping[str, Theta]) -> dict[str, Neuron]:
    """The neurons that are not masked out, by name; one whose bias is masked out has none."""
    without_bias = lambda neuron: dataclasses.replace(neuron, bias=None, bias_layout=None)
    return {
        neuron.name: without_bias(neuron) if thetas[neuron.name].bias is None else neuron
        for neuron in neurons
        if neuron.name in thetas
    }


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
    check_features(features, neurons, thetas)
    products = {
        name: product(features[name], thetas[name], neuron.layout, neuron.bias_layout)
        for name, neuron in present(neurons, thetas).items()
    }
    return join(neurons, vector, products, rest)


def _matrix(layout: Layout | None, leaf: Array) -> Array:
    assert layout is not None
    return layout.to_matrix(leaf.astype(accumulator(leaf.dtype)))
