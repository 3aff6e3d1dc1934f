"""From a loss function to its jaxpr: which leaves are parameters, which data, which neither."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._versions import Body, make_body


def path_name(path: Sequence[Any]) -> str:
    """The key path as people write it, without the `.value` that NNX's variables end in."""
    if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_parameter(leaf: Any) -> bool:
    """As in `equinox.filter_value_and_grad`: the inexact arrays are the parameters."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Trace:
    """A loss as a program whose first inputs are the parameters."""

    body: Body
    names: list[str]
    parameters: list[Any]
    data: list[Any]
    output_tree: Callable[[Sequence[Any]], tuple[Any, Any]]
    gradient_tree: Callable[[Sequence[Any]], Any]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(leaf.shape) for leaf in self.parameters]


def trace_loss(
    loss_fn: Callable[..., Any],
    params: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    has_aux: bool,
) -> Trace:
    """Traces `loss_fn(params, *args, **kwargs)`, whatever else than arrays is among them."""
    _refuse_modules(params)
    with_paths, params_tree = jax.tree_util.tree_flatten_with_path(params)
    leaves, tree = jax.tree.flatten((params, tuple(args), dict(kwargs)))
    # Every leaf is in one of three lists, with `None` in the others, which JAX takes for no leaf.
    names = [path_name(path) for path, leaf in with_paths if is_parameter(leaf)]
    own = [leaf if is_parameter(leaf) else None for _, leaf in with_paths]
    parameters = own + [None] * (len(leaves) - len(own))
    data = [
        leaf if is_array(leaf) and p is None else None
        for leaf, p in zip(leaves, parameters, strict=True)
    ]
    rest = [None if is_array(leaf) else leaf for leaf in leaves]
    if not names:
        raise ValueError(
            "the parameters hold no floating-point array, so there is nothing to train. Pass the "
            "model itself after the loss: find_neurons(loss_fn, params, batch)."
        )
    aux_rest, aux_tree = [], None  # what the loss returns beside arrays

    def flat(parameters: Sequence[Any], data: Sequence[Any]) -> list[Any]:
        nonlocal aux_rest, aux_tree
        merged = map(_the_given_one, parameters, data, rest)
        params, args, kwargs = jax.tree.unflatten(tree, merged)
        result = loss_fn(params, *args, **kwargs)
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                "with has_aux=True the loss must return a pair (value, aux), but it returned "
                f"{type(result).__name__}. Leave has_aux out if it returns the value alone."
            )
        value, aux = result if has_aux else (result, None)
        _check_value(value)
        aux_leaves, aux_tree = jax.tree.flatten(aux)
        aux_rest = [None if is_array(leaf) else leaf for leaf in aux_leaves]
        return [value, *filter(is_array, aux_leaves)]

    body = make_body(jax.make_jaxpr(flat)(parameters, data))

    def output_tree(outs: Sequence[Any]) -> tuple[Any, Any]:
        arrays = iter(outs[1:])
        aux = [next(arrays) if leaf is None else leaf for leaf in aux_rest]
        return outs[0], jax.tree.unflatten(aux_tree, aux)

    def gradient_tree(gradients: Sequence[Any]) -> Any:
        return jax.tree.unflatten(
            params_tree, jax.tree.unflatten(jax.tree.structure(own), gradients)
        )

    arrays = jax.tree.leaves(parameters), jax.tree.leaves(data)
    return Trace(body, names, *arrays, output_tree, gradient_tree)


def _the_given_one(*choices: Any) -> Any:
    return next(choice for choice in choices if choice is not None)


def _refuse_modules(params: Any) -> None:
    """An NNX module changes while it runs, and what is traced here is thrown away."""
    is_module = lambda node: any(
        cls.__name__ == "Module" and cls.__module__.startswith("flax.nnx")
        for cls in type(node).__mro__
    )
    for node in jax.tree.leaves(params, is_leaf=is_module):
        if is_module(node):
            raise TypeError(
                f"the parameters hold {type(node).__name__}, an nnx.Module: what BatchNorm and "
                "dropout change inside of the loss would be lost. Pass its parameters, and merge "
                "them inside of the loss:\n"
                "    graphdef, params, rest = nnx.split(model, nnx.Param, ...)\n"
                "    def loss_fn(params, rest, batch):\n"
                "        model = nnx.merge(graphdef, params, rest)\n"
                "        ...\n"
                "        return loss, nnx.state(model, nnx.Not(nnx.Param))  # with has_aux=True"
            )


def _check_value(value: Any) -> None:
    if isinstance(value, tuple):
        raise TypeError(
            "the loss returned a tuple. If it is (value, aux), pass has_aux=True to find_neurons."
        )
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape != () or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"the loss must return a real scalar, but returned {dtype}{list(shape)}. Reduce it, "
            "for example with jnp.mean(losses)."
        )
