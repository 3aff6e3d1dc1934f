"""Linear Neuron Boosting as optax transformations."""

from __future__ import annotations

import dataclasses
import math
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._average import average_gradient
from ._features import Residuals, Rows
from ._guard import at_least_float32, guard
from ._jaxpr import is_parameter, varying_axes
from ._metric import Damping, Theta
from ._neurons import Neuron, Neurons
from ._norms import NORMS, Boosted
from ._parameters import join, refuse_other_leaves, refuse_positional, split
from ._sharding import sharded_like
from ._solvers import Cholesky, Solver

MISSING: Any = object()  # tells a forgotten argument from `features=None`


class ScaleByLNBState(NamedTuple):
    """State of `scale_by_lnb`.

    Attributes:
      count: steps taken.
      known: what the solver knows of each neuron's M, by name; of neurons that share M, by the name
        of the first.
      memory: what the solver remembers of each neuron, by name.
      norm: sqrt(z) of the last step.
      capped: whether `min_norm` made the last step shorter.
      neuron_norms: the norm of each neuron's own direction in the last step, by name.
    """

    count: Array
    known: dict[str, Any]
    memory: dict[str, Any]
    norm: Array
    capped: Array
    neuron_norms: dict[str, Array]


def scale_by_lnb(
    neurons: Neurons,
    *,
    solver: Solver = Cholesky(),
    norm: str = "auto",
    damping: Damping = 1.0,
    min_norm: ArrayLike = 1e-2,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces gradients by normalised boosted directions.

    Each neuron's direction h solves :math:`(M + \gamma I) h = g`, the normal equation of the fit of
    the backpropagated errors to the neuron's features. Its norm as a function is
    :math:`\sqrt{h \cdot g}`, and what is returned is :math:`h / \max(min\_norm, \sqrt{h \cdot g})`.
    Parameters of no neuron have M = I: their direction is their gradient.

    Args:
      neurons: what `lnb.find_neurons` found.
      solver: how directions are found: `lnb.Cholesky`, `lnb.CG`, `lnb.Woodbury`, `lnb.Krylov`.
      norm: which trust region a step is measured in. `"network"`: one for all neurons; `"neuron"`:
        one for each; `"spectral"`: one for each, in the operator norm of its change, where the
        solver inverts M; `"auto"`: `"spectral"` for every layer where it is cheap (at most 256
        inputs or outputs), `"neuron"` with steps of the same size for the others.
      damping: :math:`\gamma`, as a multiple of the mean variance of a neuron's features (without a
        bias: of their mean power), or as it is: `lnb.Absolute(0.1)`. Not added for biases.
      min_norm: norms are raised to at least this, which keeps small gradients' steps small; the
        square root of the paper's :math:`z_0`.

    Returns:
      A transformation whose `update` takes the keyword argument `features`, from `lnb.backprop`.
    """
    if not isinstance(neurons, Neurons):
        raise TypeError(
            f"neurons must be what lnb.find_neurons returns, not {type(neurons).__name__}: "
            "lnb.lnb(learning_rate, neurons)."
        )
    if not hasattr(solver, "direction"):
        raise TypeError(f"solver={solver!r} is no solver. Pass one, such as solver=lnb.CG().")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is not one of {', '.join(map(repr, NORMS))}.")
    trust = NORMS[norm]
    solvers = {neuron.name: solver.serving(neuron) for neuron in neurons}

    def present(thetas: dict[str, Theta]) -> dict[str, Neuron]:
        """The neurons that are not masked out, in order; one whose bias is masked out has none."""
        without_bias = lambda n: dataclasses.replace(n, bias=None, bias_layout=None)
        return {
            n.name: without_bias(n) if thetas[n.name].bias is None else n
            for n in neurons
            if n.name in thetas
        }

    def init_fn(params: Any) -> ScaleByLNBState:
        refuse_other_leaves(params)
        thetas = _zeros(neurons, params)
        named, zero = present(thetas), jnp.zeros((), jnp.result_type(float))
        states = {name: solvers[name].init(named[name], thetas[name]) for name in thetas}
        state = ScaleByLNBState(
            count=jnp.zeros((), jnp.int32),
            known={name: states[name][0] for name in dict.fromkeys(_holders(named).values())},
            memory={name: memory for name, (_, memory) in states.items()},
            norm=zero,
            capped=jnp.zeros((), bool),
            neuron_norms=dict.fromkeys(thetas, zero),
        )
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def update_fn(
        updates, state, params=None, *further, features=MISSING, finite=True, **extra_args
    ):
        del params, extra_args
        refuse_positional(further)
        _check_state(state, jax.eval_shape(init_fn, updates))
        args = updates, state, features, jnp.asarray(finite)
        if features is None or features is MISSING:
            _refuse_no_features()
        return sharded_like((updates, state), step, *args)

    def step(updates, state, features, finite):
        """Lines 5 to 14 of Algorithm 2; the gradient is averaged and decayed elsewhere."""
        gradients, rest = split(neurons, at_least_float32(updates))
        named = present(gradients)
        features = _checked(features, neurons, gradients)
        held, known, memory, boosted = _holders(named), {}, {}, {}
        for name, gradient in gradients.items():  # 5: for each neuron
            neuron, served = named[name], solvers[name]
            if held[name] == name:  # 6 and 7: the moments of its features
                known[name] = served.update(
                    neuron, features[name], state.known[name], damping, state.count
                )
            own, old = known[held[name]], state.memory[name]
            direction, new = served.direction(  # 8 to 10: solve M h = g
                neuron, features[name], gradient, own, old, damping
            )
            memory[name] = optax.tree.where(finite, new, old)
            boosted[name] = Boosted(
                gradient,
                direction,
                _neuron_rank(neuron, gradient),
                served.inverse(neuron, own),
                trust.orthogonalizes(neuron),
            )
        parts = [*boosted.values(), *(Boosted(g, g, _rank(g)) for g in rest.values())]
        taken = trust(parts, min_norm)  # 13: the norm; 14: the direction over the norm
        directions = iter(taken.directions)
        thetas = {name: next(directions) for name in boosted}
        state = ScaleByLNBState(
            count=state.count + 1,
            known=known,
            memory=memory,
            norm=taken.norm,
            capped=taken.capped,
            neuron_norms=dict(zip(boosted, taken.norms, strict=False)),
        )
        return join(neurons, updates, thetas, dict(zip(rest, directions, strict=True))), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def lnb(
    learning_rate: optax.ScalarOrSchedule,
    neurons: Neurons,
    *,
    solver: Solver = Cholesky(),
    norm: str = "auto",
    gradient_decay: ArrayLike = 0.9,
    nesterov: bool = True,
    damping: Damping = 1.0,
    min_norm: ArrayLike = 1e-2,
    weight_decay: float | Array = 1e-4,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Linear Neuron Boosting.

    .. math::
      g_t &= \text{ema}(g_{t-1}, \nabla \ell(\theta_t)) \\
      h_t &= (M_t + \gamma I)^{-1} g_t \\
      \theta_{t+1} &= (1 - \alpha \rho) \theta_t - \alpha h_t / \max(min\_norm, \Vert h_t \Vert)

    with :math:`\Vert h \Vert^2 = h \cdot g`, the learning rate :math:`\alpha` (the paper's
    :math:`\sqrt{\epsilon}`) and the weight decay :math:`\rho`. A gradient or feature that is not
    finite changes neither parameters nor state.

    The defaults were chosen on a small MLP, a CNN and a vision transformer, and compared with other
    optimizers at equal trials of the learning rate, on fresh seeds, in `docs/results`. Of the rates
    tried, 0.03 was best on an MLP, a vision transformer and a character model, 0.0095 on an
    autoencoder and a U-Net. In a coarse search, damping 0.1 did as well as 1 on the CNN and the
    transformer but not on the MLP, and `norm="neuron"` was behind on all three.

    Args:
      learning_rate: a number or a schedule; 0.01 to 0.03 is a good start.
      neurons: what `lnb.find_neurons` found.
      solver: how directions are found, see `lnb.scale_by_lnb`.
      norm: `"network"`, `"neuron"`, `"spectral"` or `"auto"`, see `lnb.scale_by_lnb`.
      gradient_decay: decay of the gradient's moving average.
      nesterov: whether that average looks one step ahead.
      damping: see `lnb.scale_by_lnb`.
      min_norm: see `lnb.scale_by_lnb`.
      weight_decay: the paper's :math:`\rho`; biases decay too.
      weight_decay_mask: a pytree of booleans, or a function from parameters to one: what decays.

    Returns:
      A transformation whose `update` takes the keyword argument `features`, from `lnb.backprop`.

    >>> import jax.numpy as jnp, lnb, optax
    >>> def loss_fn(params, x, y):
    ...     return jnp.mean((jnp.tanh(x @ params["w"] + params["b"][None]) @ params["v"] - y) ** 2)
    >>> params = {"w": jnp.eye(3), "b": jnp.zeros(3), "v": jnp.ones((3, 1))}
    >>> batch = jnp.eye(3), jnp.ones((3, 1))
    >>> neurons = lnb.find_neurons(loss_fn, params, *batch)
    >>> optimizer = lnb.lnb(0.01, neurons)
    >>> state = optimizer.init(params)
    >>> for _ in range(5):
    ...     loss, grads, features = lnb.backprop(loss_fn, neurons)(params, *batch)
    ...     updates, state = optimizer.update(grads, state, params, features=features)
    ...     params = optax.apply_updates(params, updates)
    >>> bool(loss < 0.01)
    True

    References:
      Munoz, `Simple Linear Neuron Boosting <https://arxiv.org/abs/2502.01131>`_, 2025
    """
    _check_learning_rate(learning_rate)
    direction = scale_by_lnb(
        neurons,
        solver=solver,
        norm=norm,
        damping=damping,
        min_norm=min_norm,
    )
    return guard(
        optax.chain(
            average_gradient(gradient_decay, nesterov),
            direction,
            optax.add_decayed_weights(weight_decay, weight_decay_mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def _check_learning_rate(learning_rate: Any) -> None:
    if isinstance(learning_rate, Real) and not float(learning_rate) >= 0:
        raise ValueError(f"learning_rate={learning_rate} should be a number that is not negative.")


def _holders(named: dict[str, Neuron]) -> dict[str, str]:
    """The neuron under whose name a neuron's M is held: the first of those fed the same rows."""
    first: dict[Any, str] = {}
    key = lambda n: (n.fed, n.bias is None) if n.has_matrix else n.name
    return {name: first.setdefault(key(neuron), name) for name, neuron in named.items()}


def _zeros(neurons: Neurons, params: Any) -> dict[str, Theta]:
    """Zeros for the parameters of each neuron, on no particular device."""
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_parameter(x) else x
    thetas, _ = jax.eval_shape(lambda p: split(neurons, p), jax.tree.map(shape, params))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), thetas)


def _neuron_rank(neuron: Neuron, theta: Theta) -> int:
    if not neuron.has_matrix:
        return min(neuron.d_in, neuron.d_out)
    blocks, inputs, outputs = theta.weight.shape
    bias = 0 if theta.bias is None else outputs
    return blocks * (min(inputs, outputs) + bias)


def _rank(array: Array) -> int:
    """That of a parameter of no neuron, seen as vectors along its last axis: 1 for one vector."""
    last = array.shape[-1] if array.ndim else 1
    return min(math.prod(array.shape[:-1]), last)


def _check_state(state: ScaleByLNBState, expected: ScaleByLNBState) -> None:
    """Refuses a state that another optimizer made: what it holds would mean something else."""
    if not isinstance(state, ScaleByLNBState):
        raise TypeError(f"this is no state of lnb.scale_by_lnb but {type(state).__name__}.")
    theirs, ours = ({**s.memory, **s.known} for s in (state, expected))
    for name in {**ours, **theirs}:
        here, there = ours.get(name), theirs.get(name)
        shapes = lambda tree: [leaf.shape for leaf in jax.tree.leaves(tree)]
        same = jax.tree.structure(here) == jax.tree.structure(there)
        if not same or shapes(here) != shapes(there):
            raise ValueError(
                f"the state holds {type(there).__name__} for the neuron {name!r}, where this "
                f"optimizer would hold {type(here).__name__}: it was made with another solver or "
                "norm, or for other neurons. Make a new one, optimizer.init(params), or use the "
                "optimizer that made it."
            )


def _refuse_no_features() -> None:
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


def _checked(features: Any, neurons: Neurons, gradients: dict[str, Theta]) -> Any:
    """The features, if they are those of these neurons; averaged as their gradients are."""
    advice = "Give `lnb.backprop` and the optimizer the same `neurons`."
    named = {neuron.name: neuron for neuron in neurons}
    for name in features:
        if name not in named:
            raise ValueError(f"There are features for {name!r}, which is no neuron here. {advice}")
    for name in gradients:
        if name not in features:
            raise ValueError(f"There are no features for the neuron {name!r}. {advice}")
        if not _fits(features[name], named[name]):
            raise ValueError(
                f"The features of {name!r} are those of another neuron: they are for weights of "
                f"{_seen_shapes(features[name])}, not of {list(named[name].layout.shape)}. {advice}"
            )
    devices = tuple(sorted(varying_axes(features) - varying_axes(gradients)))
    return {name: own.averaged_over(devices) if devices else own for name, own in features.items()}


def _fits(features: Any, neuron: Neuron) -> bool:
    """Whether features are those of a neuron, and have the shapes that they had."""
    if isinstance(features, Residuals):
        return features.layout == neuron.layout and not neuron.has_matrix
    if not isinstance(features, Rows):
        return False
    if neuron.has_matrix:
        own = neuron.layout, neuron.bias_layout
        if any((site.layout, site.bias_layout) != own for site in features.sites):
            return False
    shapes = (site.layout.shape == neuron.layout.shape for site in features.sites)
    kept = (site.arrangement.kept(x) for site, x, _ in features)
    return all(shapes) and all(kept)


def _seen_shapes(features: Any) -> Any:
    layouts = [s.layout for s in features.sites] if isinstance(features, Rows) else []
    return [list(layout.shape) for layout in layouts] or type(features).__name__
