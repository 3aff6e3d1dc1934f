"""Bad arguments, refused early: every message names the cause and shows what to do."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import jax

from ._features import Features, Form, Layout
from ._jaxpr import is_array, path_name
from ._neurons import Neurons


def check_neurons(neurons: Any, call: str) -> None:
    if not isinstance(neurons, Neurons):
        found = type(neurons).__name__
        raise TypeError(f"neurons must be what lnb.find_neurons returns, not {found}: {call}.")


def check_learning_rate(learning_rate: Any) -> None:
    """Takes a finite number that is not negative, a scalar array, or a schedule."""
    if isinstance(learning_rate, Real) and not isinstance(learning_rate, bool):
        if not 0 <= float(learning_rate) < math.inf:
            raise ValueError(f"learning_rate={learning_rate} should be finite and not negative.")
    elif not callable(learning_rate) and getattr(learning_rate, "shape", None) != ():
        raise TypeError(
            f"learning_rate={learning_rate!r} is neither a number nor an optax schedule. Write "
            "lnb.lnb(0.03, neurons)."
        )


def check_arrays(params: Any) -> None:
    """Only arrays can have a state."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not is_array(leaf):
            raise TypeError(
                f"{path_name(path)} is no array but {leaf!r}. Pass the arrays alone; of an Equinox "
                "model: optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
            )


def check_shapes(
    neurons: Neurons, shapes: Mapping[str, tuple[int, ...]], masked: bool = False
) -> None:
    """Refuses other parameters than `find_neurons` saw; some may be missing if `masked`."""
    expected = dict(neurons.shapes)
    for name in (*expected, *shapes):
        if name not in expected:
            problem = "was not there when find_neurons was called"
        elif name not in shapes:
            problem = "" if masked else "is gone"
        elif shapes[name] != expected[name]:
            problem = f"has shape {shapes[name]}, but find_neurons saw {expected[name]}"
        else:
            problem = ""
        if problem:
            raise ValueError(
                f"the parameter {name!r} {problem}. Call find_neurons again on these parameters, "
                "or pass those that it saw."
            )


def check_arguments(further: tuple, features: Any) -> None:
    """Checks what comes after `params` in a call of `update`."""
    if further:
        raise TypeError(
            "features are a keyword argument: "
            "optimizer.update(grads, state, params, features=features)."
        )
    if features is None:
        raise ValueError(
            "LNB needs the features of the batch that the gradients come from:\n"
            "    value, grads, features = lnb.backprop(loss_fn, neurons)(params, batch)\n"
            "    updates, state = optimizer.update(grads, state, params, features=features)\n"
            "apply_gradients of Flax's TrainState cannot pass them on. Write instead:\n"
            "    updates, opt_state = state.tx.update(\n"
            "        grads, state.opt_state, state.params, features=features)\n"
            "    params = optax.apply_updates(state.params, updates)\n"
            "    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)"
        )
    if not isinstance(features, Mapping) or any(
        not isinstance(x, Features) for x in features.values()
    ):
        raise TypeError(
            f"features={type(features).__name__} are not the third result of lnb.backprop: "
            "loss, grads, features = lnb.backprop(loss_fn, neurons)(params, batch)."
        )


def check_features(
    features: Mapping[str, Features], neurons: Neurons, names: Iterable[str]
) -> None:
    """Refuses features of other neurons than these, or too few for the neurons with these names."""
    advice = "Give `lnb.backprop` and the optimizer the same `neurons`."
    named = {neuron.name: neuron for neuron in neurons}
    for name in features:
        if name not in named:
            raise ValueError(f"There are features for {name!r}, which is no neuron here. {advice}")
    for name in names:
        if name not in features:
            raise ValueError(f"There are no features for the neuron {name!r}. {advice}")
        own, neuron = features[name], named[name]
        if own.count.ndim:
            raise ValueError(
                f"The features of {name!r} are those of {own.count.size} batches, stacked by a "
                "loop or by vmap. Take one: jax.tree.map(lambda x: x[-1], features)."
            )
        if not _layouts(own.sites) <= _layouts(neuron.forms):
            seen = [site.layout.shape for site in own.sites]
            raise ValueError(
                f"The features of {name!r} are those of another neuron: they are for weights of "
                f"{seen}, not of {neuron.layout.shape}. {advice}"
            )


def _layouts(sites: Iterable[Form]) -> set[tuple[Layout, Layout | None]]:
    """How sites see the weight and the bias."""
    return {(site.layout, site.bias_layout) for site in sites}


def check_state(state: Any, expected: Any) -> None:
    """Refuses a state that another optimizer made: what it holds would mean something else."""
    if type(state) is not type(expected):
        raise TypeError(f"this is no state of lnb.scale_by_lnb but {type(state).__name__}.")
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
    for theirs, ours in ((state.memory, expected.memory), (state.known, expected.known)):
        differ = [k for k in {**ours, **theirs} if shapes(theirs.get(k)) != shapes(ours.get(k))]
        if differ:
            raise ValueError(
                f"the state of the neuron {differ[0]!r} was made with another solver or norm, or "
                "for other neurons. Make a new one, optimizer.init(params), or use the optimizer "
                "that made it."
            )
