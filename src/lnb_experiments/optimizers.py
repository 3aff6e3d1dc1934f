"""The optimizers that can be compared, by name, each with the learning rates to try."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import optax

import lnb

from . import related
from .experiment import Experiment
from .folder import RunError
from .method import MakeMethod, Method, Problem


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its search space.

    Attributes:
      summary: one line for `lnb list`.
      make: makes its method for a problem.
      check: raises an error where it cannot run at all.
      anneals: whether a schedule that ends at zero suits it; some methods ask for none.
      rates: the lowest and the highest learning rate of its search space: two decades for all but
        Levenberg-Marquardt, whose step has a length of its own. A run that names no learning rate
        has the one in the middle.
    """

    summary: str
    make: MakeMethod
    rates: tuple[float, float]
    check: Callable[[], Any] = lambda: None
    anneals: bool = True


def rate_range(experiment: Experiment, optimizer: str) -> tuple[float, float]:
    """The lowest and the highest learning rate that an experiment tries with an optimizer."""
    return experiment.rates.get(optimizer.split(":")[0], OPTIMIZERS[optimizer].rates)


def search_rates(rates: tuple[float, float], count: int) -> list[float]:
    """Learning rates evenly spaced on a logarithmic scale, to two digits; one is the middle."""
    low, high = np.log10(rates)
    points = np.linspace(low, high, count) if count > 1 else [(low + high) / 2]
    return [two_digits(10**point) for point in points]


def two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")


def from_gradients(make: Callable[[Any], optax.GradientTransformation]) -> MakeMethod:
    """A transformation of gradients, given the learning rate."""

    def make_method(problem: Problem, *_) -> Method:
        def step(learning_rate, params, state, batch, key):
            loss, gradients = jax.value_and_grad(problem.loss)(params, batch, key)
            updates, state = make(learning_rate).update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        return Method(make(0.0).init, step)

    return make_method


def from_features(
    make: Callable[..., optax.GradientTransformationExtraArgs], **settings: Any
) -> MakeMethod:
    """A transformation of gradients and features, given the learning rate and the neurons.

    The settings are those of `lnb.find_neurons`.
    """

    def make_method(problem: Problem, params, batch, key) -> Method:
        neurons = lnb.find_neurons(problem.loss, params, batch, key, **settings)
        backprop = lnb.backprop(problem.loss, neurons)

        def step(learning_rate, params, state, batch, key):
            loss, gradients, features = backprop(params, batch, key)
            optimizer = make(learning_rate, neurons)
            updates, state = optimizer.update(gradients, state, params, features=features)
            return optax.apply_updates(params, updates), state, loss

        return Method(make(0.0, neurons).init, step)

    return make_method


def muon(learning_rate) -> optax.GradientTransformation:
    """Muon, which also takes stacks of matrices and convolutions (height, width, inputs, outputs).

    Its own default takes only arrays of two axes for matrices.
    """

    def as_matrix(weight):
        dims = optax.contrib.MuonDimensionNumbers
        return {2: dims(0, 1), 3: dims(1, 2), 4: dims((0, 1, 2), 3)}.get(weight.ndim)

    def dimension_numbers(params):
        return jax.tree.map(as_matrix, params)

    return optax.contrib.muon(learning_rate, muon_weight_dimension_numbers=dimension_numbers)


SOLVERS = {
    "cholesky": lnb.Cholesky(),
    "cg": lnb.CG(),
    "woodbury": lnb.Woodbury(),
    "krylov": lnb.Krylov(),
}
NORMS = ("auto", "spectral", "neuron", "network")


def _variants() -> dict[str, Optimizer]:
    """`lnb`, `lnb:cg`, `lnb:neuron`, `lnb:cg:neuron` and so on: every solver with every norm."""
    variants = {}
    for solver, norm in product((None, *SOLVERS), (None, *NORMS)):
        settings: dict[str, Any] = {"solver": SOLVERS[solver]} if solver else {}
        settings |= {"norm": norm} if norm else {}
        names = [name for name in (solver, norm) if name]
        summary = f"Linear Neuron Boosting, {' and '.join(names) or 'its defaults'}"
        make = from_features(partial(lnb.lnb, **settings))
        rates = (0.01, 1.0) if norm in {"neuron", "network"} else (0.003, 0.3)
        variants[":".join(["lnb", *names])] = Optimizer(summary, make, rates)
    return variants


OPTIMIZERS: dict[str, Optimizer] = {
    **_variants(),
    "lnb-damped": Optimizer(
        "Linear Neuron Boosting with damping=100, which keeps it from fitting noise",
        from_features(partial(lnb.lnb, damping=100.0)),
        (0.003, 0.3),
    ),
    "algorithm1": Optimizer(
        "the paper's Algorithm 1: whole batches, conjugate gradients to the end",
        from_features(lnb.algorithm1, rows="all"),
        (0.003, 0.3),
    ),
    "algorithm2": Optimizer(
        "the paper's Algorithm 2: two steps of conjugate gradients",
        from_features(lnb.algorithm2, rows="all"),
        (0.01, 1.0),
    ),
    "sgd": Optimizer(
        "gradient descent with a momentum of 0.9",
        from_gradients(partial(optax.sgd, momentum=0.9)),
        (0.01, 1.0),
    ),
    "adam": Optimizer("optax.adam", from_gradients(optax.adam), (1e-4, 1e-2)),
    "adamw": Optimizer("optax.adamw", from_gradients(optax.adamw), (1e-4, 1e-2)),
    "muon": Optimizer("optax.contrib.muon", from_gradients(muon), (1e-3, 1e-1)),
    "foof": Optimizer("FOOF: input covariances without biases", related.foof, (0.01, 1.0)),
    "prong": Optimizer(
        "PRONG: gradient descent on the whitened network", related.prong, (0.03, 3.0)
    ),
    "locoprop": Optimizer(
        "LocoProp-S: gradient descent on local squared losses", related.locoprop, (0.05, 5.0)
    ),
    "boosted-backprop": Optimizer(
        "boosted backpropagation: regressions on backpropagated errors",
        related.boosted_backprop,
        (0.03, 3.0),
    ),
    "levenberg-marquardt": Optimizer(
        "damped Gauss-Newton steps, for small problems", related.levenberg_marquardt, (0.3, 1.0)
    ),
    "kfac": Optimizer(
        "K-FAC by kfac-jax: says which versions it needs (no jax that lnb supports)",
        related.kfac,
        (1e-3, 1e-1),
        related.check_kfac,
    ),
}


def check_optimizer(name: str) -> None:
    """Raises an error where there is no such optimizer, or where it cannot run."""
    if name not in OPTIMIZERS:
        known = ", ".join(name for name in OPTIMIZERS if ":" not in name)
        raise RunError(
            f"There is no optimizer {name!r}. There are {known}; and lnb:SOLVER, lnb:NORM and "
            f"lnb:SOLVER:NORM with the solvers {', '.join(SOLVERS)} and the norms "
            f"{', '.join(NORMS)}."
        )
    OPTIMIZERS[name].check()
