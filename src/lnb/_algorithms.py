"""Linear Neuron Boosting as it is used: `lnb`, and the paper's two algorithms as its settings."""

from typing import Any

import optax
from jax import Array
from jax.typing import ArrayLike

from ._average import average_gradient
from ._checks import check_learning_rate
from ._guard import guard
from ._metric import Absolute, Damping
from ._neurons import Neurons
from ._optimizer import scale_by_lnb
from ._renamed import renamed
from ._solvers import CG, Cholesky, Krylov, Solver


@renamed(relative_damping="damping is relative, unless it is damping=lnb.Absolute(0.1)")
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
    weight_decay: float | Array = 0.1,
    weight_decay_mask: Any = "weights",
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
    optimizers at equal trials of the learning rate, on fresh seeds, in `docs/results`. Momentum,
    damping and weight decay were compared again on five networks: `docs/results/ablations.md`.

    Args:
      learning_rate: a number or a schedule; 0.01 to 0.03 is a good start.
      neurons: what `lnb.find_neurons` found.
      solver: how directions are found, see `lnb.scale_by_lnb`.
      norm: `"network"`, `"neuron"`, `"spectral"` or `"auto"`, see `lnb.scale_by_lnb`.
      gradient_decay: decay of the gradient's moving average.
      nesterov: whether that average looks one step ahead.
      damping: see `lnb.scale_by_lnb`.
      min_norm: see `lnb.scale_by_lnb`.
      weight_decay: the paper's :math:`\rho`.
      weight_decay_mask: what decays. `"weights"` (default): the weights of neurons, but no biases,
        scales of norms or positions; `None`: everything; or, as in optax, a pytree of booleans, or
        a function from parameters to one.

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
    direction = scale_by_lnb(neurons, solver=solver, norm=norm, damping=damping, min_norm=min_norm)
    check_learning_rate(learning_rate)
    mask = neurons.are_weights if weight_decay_mask == "weights" else weight_decay_mask
    return guard(
        optax.chain(  # the lines of the paper's Algorithm 2, inside its loop
            average_gradient(gradient_decay, nesterov),  # 4
            direction,  # 5 to 11, 13, and 14 but for the learning rate
            optax.add_decayed_weights(weight_decay, mask),  # 12
            optax.scale_by_learning_rate(learning_rate),  # 14
        )
    )


def algorithm1(
    learning_rate: optax.ScalarOrSchedule,
    neurons: Neurons,
    *,
    solver: Solver = Krylov(),
    damping: ArrayLike = 0.0,
    min_norm: ArrayLike = 0.0,
    weight_decay: float | Array = 0.0,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Linear Neuron Boosting without memory: the paper's Algorithm 1, for whole batches.

    Args:
      learning_rate: the paper's square root of epsilon, a number or a schedule.
      neurons: what `lnb.find_neurons` found.
      solver: the algorithm's `linear_solver`.
      damping: added to the metric's diagonal as it is, biases excluded.
      min_norm: norms are raised to at least this; the paper's algorithm has none.
      weight_decay: the paper's rho.
      weight_decay_mask: see `lnb.lnb`; everything decays by default.

    Returns:
      A transformation whose `update` takes the keyword argument `features`, from `lnb.backprop`.
    """
    return algorithm2(  # without averages of the gradient, and by another solver
        learning_rate,
        neurons,
        solver=solver,
        gradient_decay=0.0,
        damping=damping,
        min_norm=min_norm,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )


def algorithm2(
    learning_rate: optax.ScalarOrSchedule,
    neurons: Neurons,
    *,
    solver: Solver = CG(careful=False),
    gradient_decay: ArrayLike = 0.9,
    damping: ArrayLike = 0.1,
    min_norm: ArrayLike = 1e-2,
    weight_decay: float | Array = 1e-4,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Online Linear Neuron Boosting: the paper's Algorithm 2, as printed.

    What the paper leaves open is as in its author's code: decays, damping, the shrinkage of P.

    Args:
      learning_rate: the paper's square root of epsilon, a number or a schedule.
      neurons: what `lnb.find_neurons` found.
      solver: the algorithm's `cg`; holds the decays of its moments.
      gradient_decay: decay of the gradient's moving average.
      damping: added to the metric's diagonal as it is, biases excluded.
      min_norm: the square root of the paper's z_0.
      weight_decay: the paper's rho.
      weight_decay_mask: see `lnb.lnb`; everything decays by default.

    Returns:
      A transformation whose `update` takes the keyword argument `features`, from `lnb.backprop`.
    """
    return lnb(
        learning_rate,
        neurons,
        solver=solver,
        norm="network",
        gradient_decay=gradient_decay,
        nesterov=False,
        damping=Absolute(damping),
        min_norm=min_norm,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )
