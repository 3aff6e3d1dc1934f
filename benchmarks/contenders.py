"""The optimizers whose steps are compared: Adam, Muon, and LNB in each of its forms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lnb
from lnb._backprop import Due
from lnb._optimizer import ScaleByLNBState
from lnb_experiments.optimizers import muon

from .workloads import Workload

Step = Callable[..., tuple[Any, Any]]  # (params, opt_state, *args) -> (params, opt_state)
LATER = 1000  # steps, after which turns are as rare as they get


@dataclass(frozen=True)
class Plain:
    """An optimizer of gradients."""

    optimizer: optax.GradientTransformation
    every: int | None = None  # steps from turn to turn: there are none

    def init(self, workload: Workload) -> Any:
        return self.optimizer.init(workload.params)

    def step(self, workload: Workload) -> Step:
        def step(params, opt_state, *args):
            grads = jax.grad(workload.loss_fn)(params, *args)
            updates, opt_state = self.optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        return step

    def counted_steps(self, workload: Workload) -> list[tuple[float, Step]]:
        """Steps that XLA can count the flops of, each with how often it is taken."""
        return [(1.0, self.step(workload))]


@dataclass(frozen=True)
class Boosted:
    """An optimizer of gradients and features."""

    make: Callable[..., optax.GradientTransformationExtraArgs]
    metric: str = "auto"
    every: int | None = 10

    def neurons(self, workload: Workload) -> lnb.Neurons:
        loss_fn, params, args, _ = workload
        return lnb.find_neurons(loss_fn, params, *args, metric=self.metric)

    def init(self, workload: Workload) -> Any:
        """The state after many steps, except for its values."""
        state = self.make(1e-3, self.neurons(workload)).init(workload.params)
        is_lnb = lambda x: isinstance(x, ScaleByLNBState)
        later = lambda x: x._replace(count=x.count + LATER) if is_lnb(x) else x
        return jax.tree.map(later, state, is_leaf=is_lnb)

    def step(self, workload: Workload, turn: bool | None = None) -> Step:
        """A step; given `turn`, one at which all neurons have their turn, or none has."""
        neurons = self.neurons(workload)
        if turn is None:
            optimizer = self.make(1e-3, neurons)
        else:
            optimizer = self.make(1e-3, neurons, solver=Turn(turn=turn))

        def step(params, opt_state, *args):
            opt_state = opt_state if turn is None else with_turn(opt_state, turn)
            backprop = lnb.backprop(workload.loss_fn, neurons, opt_state=opt_state)
            _, grads, features = backprop(params, *args)
            updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
            return optax.apply_updates(params, updates), opt_state

        return step

    def counted_steps(self, workload: Workload) -> list[tuple[float, Step]]:
        """XLA counts a `cond` as its dearest branch, so these have none but the guard's."""
        if self.every is None:
            return [(1.0, self.step(workload))]
        return [
            (1 / self.every, self.step(workload, turn=True)),
            (1 - 1 / self.every, self.step(workload, turn=False)),
        ]


@dataclass(frozen=True)
class Turn(lnb.Cholesky):
    """`lnb.Cholesky`, where all neurons have their turn at every step or at none."""

    turn: bool = True

    def due(self, neuron: lnb.Neuron, step: jax.Array) -> jax.Array:
        return jnp.asarray(self.turn) if neuron.has_gram else self.fallback.due(neuron, step)


def with_turn(opt_state: Any, turn: bool) -> Any:
    is_due = lambda node: isinstance(node, Due)
    full = lambda flags: dict.fromkeys(flags, jnp.asarray(turn))
    replace = lambda node: Due(full(node.flags)) if is_due(node) else node
    return jax.tree.map(replace, opt_state, is_leaf=is_due)


def _with_norm(norm: str) -> Boosted:
    return Boosted(partial(lnb.lnb, norm=norm))


ADAM, MUON, NEURON = "optax.adam", "optax.contrib.muon", 'lnb, norm="neuron"'
CONTENDERS: dict[str, Plain | Boosted] = {
    ADAM: Plain(optax.adam(1e-3)),
    MUON: Plain(muon(1e-3)),
    NEURON: _with_norm("neuron"),
    "lnb, its defaults": Boosted(lnb.lnb),
    'lnb, norm="spectral"': _with_norm("spectral"),
    'lnb, norm="network"': _with_norm("network"),
    "lnb, CG on grams": Boosted(
        partial(lnb.lnb, solver=lnb.CG(), norm="neuron"), metric="gram", every=None
    ),
    "Algorithm 2, CG on features": Boosted(lnb.algorithm2, metric="matrix-free", every=None),
}
