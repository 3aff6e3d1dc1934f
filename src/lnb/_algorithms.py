"""The paper's two algorithms, as settings of `lnb`."""

from typing import Any

import optax
from jax import Array
from jax.typing import ArrayLike

from ._metric import Absolute
from ._neurons import Neurons
from ._optimizer import lnb
from ._solvers import CG, Krylov, Solver


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
      weight_decay_mask: see `lnb.lnb`.

    Returns:
      A transformation whose `update` takes the keyword argument `features`, from `lnb.backprop`.
    """
    return lnb(
        learning_rate,
        neurons,
        solver=solver,
        norm="network",
        gradient_decay=0.0,
        nesterov=False,
        damping=Absolute(damping),
        min_norm=min_norm,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
    )


def algorithm2(
    learning_rate: optax.ScalarOrSchedule,
    neurons: Neurons,
    *,
    solver: Solver = CG(),
    gradient_decay: ArrayLike = 0.9,
    damping: ArrayLike = 0.1,
    min_norm: ArrayLike = 1e-2,
    weight_decay: float | Array = 1e-4,
    weight_decay_mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Online Linear Neuron Boosting: the paper's Algorithm 2.

    Args:
      learning_rate: the paper's square root of epsilon, a number or a schedule.
      neurons: what `lnb.find_neurons` found.
      solver: the algorithm's `cg`; holds the decays of its moments.
      gradient_decay: decay of the gradient's moving average.
      damping: added to the metric's diagonal as it is, biases excluded.
      min_norm: the square root of the paper's z_0.
      weight_decay: the paper's rho.
      weight_decay_mask: see `lnb.lnb`.

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
