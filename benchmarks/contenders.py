"""The optimizers whose steps are compared: Adam, Muon, and LNB in each of its forms."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

import lnb
from lnb._optimizer import ScaleByLNBState
from lnb_experiments.peers import muon

from .workloads import Workload

Step = Callable[..., tuple[Any, Any]]  # (params, opt_state, *args) -> (params, opt_state)
LATER = 1000  # steps, after which refreshes are as rare as they get


@dataclass(frozen=True)
class Plain:
    """An optimizer of gradients."""

    optimizer: optax.GradientTransformation
    every: int | None = None  # steps from one refresh of M to the next: there are none

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
    rows: str = "auto"
    every: int | None = 10

    def neurons(self, workload: Workload) -> lnb.Neurons:
        loss_fn, params, args, _ = workload
        return lnb.find_neurons(loss_fn, params, *args, rows=self.rows)

    def init(self, workload: Workload) -> Any:
        """The state after many steps, except for its values."""
        state = self.make(1e-3, self.neurons(workload)).init(workload.params)
        is_lnb = lambda x: isinstance(x, ScaleByLNBState)
        later = lambda x: x._replace(count=x.count + LATER) if is_lnb(x) else x
        return jax.tree.map(later, state, is_leaf=is_lnb)

    def step(self, workload: Workload, **settings: Any) -> Step:
        """A step; the settings are those of the optimizer."""
        neurons = self.neurons(workload)
        optimizer = self.make(1e-3, neurons, **settings)
        backprop = lnb.backprop(workload.loss_fn, neurons)

        def step(params, opt_state, *args):
            _, grads, features = backprop(params, *args)
            updates, opt_state = optimizer.update(grads, opt_state, params, features=features)
            return optax.apply_updates(params, updates), opt_state

        return step

    def counted_steps(self, workload: Workload) -> list[tuple[float, Step]]:
        """XLA counts a `cond` as its dearest branch: every M is refreshed at every step."""
        if self.every is None:
            return [(1.0, self.step(workload))]
        return [
            (1 / self.every, self.step(workload)),
            (1 - 1 / self.every, self.step(workload, solver=Resting())),
        ]


class Resting(lnb.Cholesky):
    """`lnb.Cholesky` between refreshes."""

    def update(self, neuron, features, known, damping, step):
        return known


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
    "lnb, CG": Boosted(partial(lnb.lnb, solver=lnb.CG(), norm="neuron"), every=None),
    "Algorithm 2": Boosted(lnb.algorithm2, rows="all", every=None),
}
