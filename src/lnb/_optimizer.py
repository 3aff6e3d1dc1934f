"""Linear Neuron Boosting as a gradient transformation: lines 5 to 14 of the paper's Algorithm 2."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from ._checks import check_arguments, check_arrays, check_features, check_neurons, check_state
from ._jaxpr import varying_axes
from ._metric import Damping
from ._neurons import Neurons
from ._norms import NORMS, Boosted, rank
from ._numerics import at_least_float32
from ._parameters import join, present, split
from ._plan import holders
from ._renamed import renamed
from ._sharding import sharded_like
from ._solvers import Cholesky, Solver


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


@renamed(relative_damping="damping is relative, unless it is damping=lnb.Absolute(0.1)")
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
    check_neurons(neurons, "lnb.lnb(learning_rate, neurons)")
    if isinstance(solver, type) or not hasattr(solver, "direction"):
        raise TypeError(f"solver={solver!r} is no solver. Pass one, such as solver=lnb.CG().")
    if norm not in NORMS:
        raise ValueError(f"norm={norm!r} is not one of {', '.join(map(repr, NORMS))}.")
    trust_region = NORMS[norm]
    solvers = {neuron.name: solver.serving(neuron) for neuron in neurons}

    def init_fn(params: Any) -> ScaleByLNBState:
        check_arrays(params)
        # Zeros for the parameters of each neuron, on no particular device.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        thetas, _ = jax.eval_shape(lambda tree: split(neurons, tree), shapes)
        thetas = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), thetas)
        named, zero = present(neurons, thetas), jnp.zeros((), jnp.result_type(float))
        states = {k: solvers[k].init(neuron, thetas[k]) for k, neuron in named.items()}
        state = ScaleByLNBState(
            count=jnp.zeros((), jnp.int32),
            known={name: states[name][0] for name in holders(named.values()).values()},
            memory={name: memory for name, (_, memory) in states.items()},
            norm=zero,
            capped=jnp.zeros((), bool),
            neuron_norms=dict.fromkeys(thetas, zero),
        )
        return jax.tree.map(jnp.copy, state)  # a buffer each, so that they can be donated

    def update_fn(updates, state, params=None, *further, features=None, finite=True, **extra_args):
        del params, extra_args
        check_arguments(further, features)
        check_state(state, jax.eval_shape(init_fn, updates))
        args = updates, state, features, jnp.asarray(finite)
        return sharded_like((updates, state), step, *args)

    def step(updates, state, features, finite):
        """Algorithm 2 but for the gradient's average and decay, lines 4 and 12, see `lnb.lnb`."""
        gradients, rest = split(neurons, at_least_float32(updates))
        check_features(features, neurons, gradients)
        devices = tuple(sorted(varying_axes(features) - varying_axes(gradients)))
        named = present(neurons, gradients)
        holder, known, memory, boosted = holders(named.values()), {}, {}, {}
        for name, neuron in named.items():  # 5: for each neuron, its gradient and features
            g, x, serving = gradients[name], features[name], solvers[name]
            x = x.averaged_over(devices) if devices else x
            if holder[name] == name:  # 6, 7: the moments of its features
                known[name] = serving.update(neuron, x, state.known[name], damping, state.count)
            own, old = known[holder[name]], state.memory[name]
            h, new = serving.direction(neuron, x, g, own, old, damping)  # 8 to 10: solve M h = g
            memory[name] = optax.tree.where(finite, new, old)
            inverse = serving.inverse(neuron, own) if trust_region.orthogonalizes(neuron) else None
            boosted[name] = Boosted(g, h, rank(g, neuron), inverse)
        others = {name: Boosted(g, g, rank(g)) for name, g in rest.items()}  # M = I
        taken = trust_region({**boosted, **others}, min_norm)  # 13: the norm; 14: h over the norm
        state = ScaleByLNBState(
            count=state.count + 1,
            known=known,
            memory=memory,
            norm=taken.norm,
            capped=taken.capped,
            neuron_norms={name: taken.norms[name] for name in boosted},
        )
        directions = {name: taken.directions[name] for name in boosted}
        rest = {name: taken.directions[name] for name in rest}
        return join(neurons, updates, directions, rest), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
