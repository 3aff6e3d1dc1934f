"""The optimizers that can be compared, by name, each with the learning rates to try."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import numpy as np
import optax

import lnb

from . import peers, related
from .ablations import ABLATIONS
from .experiment import Experiment
from .folder import RunError
from .method import MakeMethod, Method, Problem


@dataclass(frozen=True)
class Optimizer:
    """An optimizer and its search space.

    Attributes:
      summary: one line for `lnb list`.
      make: makes its method for a problem.
      anneals: whether a schedule that ends at zero suits it; some methods ask for none.
      advice: where its settings come from: a paper, a README, the documentation of a package.
      varied: makes its method with another `damping`, or with gradients that are clipped to a norm
        of `clip`; only LNB and the paper's algorithms have this.
      rates: the lowest and the highest learning rate of its search space: two decades for all but
        Levenberg-Marquardt, whose step has a length of its own. A run that names no learning rate
        has the one in the middle.
    """

    summary: str
    make: MakeMethod
    rates: tuple[float, float]
    anneals: bool = True
    advice: str = ""
    varied: Callable[..., MakeMethod] | None = None


def rate_range(experiment: Experiment, optimizer: str) -> tuple[float, float]:
    """The lowest and the highest learning rate that an experiment tries with an optimizer."""
    name = optimizer.split(":")[0].split("@")[0]
    return experiment.rates.get(name, find_optimizer(optimizer).rates)


def search_rates(rates: tuple[float, float], count: int) -> list[float]:
    """Learning rates evenly spaced on a logarithmic scale, to two digits; one is the middle."""
    low, high = np.log10(rates)
    points = np.linspace(low, high, count) if count > 1 else [(low + high) / 2]
    return [two_digits(10**point) for point in points]


def two_digits(rate: float) -> float:
    return float(f"{rate:.1e}")


def from_gradients(
    with_decay: Callable[..., optax.GradientTransformation],
    evaluated: Callable[[Any, Any], Any] = lambda params, state: params,
    decays: bool = True,
) -> MakeMethod:
    """A transformation of gradients, given the learning rate, and maybe a `weight_decay` of 0."""

    def make_method(problem: Problem, *_) -> Method:
        make = with_decay if problem.decays or not decays else partial(with_decay, weight_decay=0.0)

        def step(learning_rate, params, state, batch, key):
            loss, gradients = jax.value_and_grad(problem.loss)(params, batch, key)
            updates, state = make(learning_rate).update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        return Method(make(0.0).init, step, evaluated)

    return make_method


def from_features(
    make: Callable[..., optax.GradientTransformationExtraArgs],
    clip: float | None = None,
    **settings: Any,
) -> MakeMethod:
    """A transformation of gradients and features, given the learning rate and the neurons.

    Gradients are first clipped to a norm of `clip`. The settings are those of `lnb.find_neurons`.
    """
    clipping = optax.identity() if clip is None else optax.clip_by_global_norm(clip)

    def make_method(problem: Problem, params, batch, key) -> Method:
        neurons = lnb.find_neurons(problem.loss, params, batch, key, **settings)
        backprop = lnb.backprop(problem.loss, neurons)

        def step(learning_rate, params, state, batch, key):
            loss, gradients, features = backprop(params, batch, key)
            gradients, _ = clipping.update(gradients, clipping.init(params))
            optimizer = make(learning_rate, neurons)
            updates, state = optimizer.update(gradients, state, params, features=features)
            return optax.apply_updates(params, updates), state, loss

        return Method(make(0.0, neurons).init, step)

    return make_method


def boosting(summary: str, make: Callable, rates: tuple[float, float], **settings) -> Optimizer:
    """An optimizer whose transformation takes features, and damping."""

    def varied(damping: float | None = None, clip: float | None = None) -> MakeMethod:
        chosen = make if damping is None else partial(make, damping=damping)
        return from_features(chosen, clip, **settings)

    return Optimizer(summary, varied(), rates, varied=varied)


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
        rates = (0.01, 1.0) if norm in {"neuron", "network"} else (0.003, 0.3)
        make = partial(lnb.lnb, **settings)
        variants[":".join(["lnb", *names])] = boosting(summary, make, rates)
    return variants


def _ablations() -> dict[str, Optimizer]:
    """`lnb+adam-rest` and so on: the defaults, with one thing changed."""
    return {
        f"lnb+{name}": Optimizer(f"LNB with {name}", from_features(make), (0.003, 0.3))
        for name, make in ABLATIONS.items()
    }


OPTIMIZERS: dict[str, Optimizer] = {
    **_variants(),
    **_ablations(),
    "algorithm1": boosting(
        "the paper's Algorithm 1: whole batches, conjugate gradients to the end",
        lnb.algorithm1,
        (0.003, 0.3),
        rows="all",
    ),
    "algorithm2": boosting(
        "the paper's Algorithm 2: two steps of conjugate gradients",
        lnb.algorithm2,
        (0.01, 1.0),
        rows="all",
    ),
    "sgd": Optimizer(
        "gradient descent with a momentum of 0.9",
        from_gradients(partial(optax.sgd, momentum=0.9), decays=False),
        (0.01, 1.0),
        advice="Sutskever et al., ICML 2013: a momentum of 0.9 or more.",
    ),
    "adam": Optimizer(
        "optax.adam with its defaults",
        from_gradients(optax.adam, decays=False),
        (1e-4, 1e-2),
        advice="Kingma and Ba 2015, arXiv 1412.6980: b1 = 0.9, b2 = 0.999, a rate of 0.001.",
    ),
    "adamw": Optimizer(
        "AdamW, weight decay of matrices only",
        from_gradients(peers.adamw),
        (3e-4, 3e-2),
        advice="nanoGPT, config/train_shakespeare_char.py (a small run): b2 = 0.99, a rate of "
        "0.001; train.py: weight decay 0.1, arrays of two and more axes only (it also clips "
        "gradients, which is left out here). https://github.com/karpathy/nanoGPT",
    ),
    "nadamw": Optimizer(
        "AdamW with Nesterov's momentum",
        from_gradients(peers.nadamw),
        (3e-4, 3e-2),
        advice="AdamW's settings. AlgoPerf's own baseline: Kasimbeg et al. 2025, arXiv 2505.24005.",
    ),
    "muon": Optimizer(
        "Muon for hidden weights, AdamW for all else",
        from_gradients(peers.muon),
        (1e-3, 1e-1),
        advice="Its README: embeddings, the first convolution, the head, gains and biases by AdamW "
        "with b2 = 0.95; Nesterov, 0.95, 5 iterations. https://github.com/KellerJordan/Muon. One "
        "rate for both by an RMS of 0.2, weight decay 0.1: Liu et al. 2025, arXiv 2502.16982. A "
        "dense first layer counts as hidden here.",
    ),
    "soap": Optimizer(
        "SOAP: Adam in the eigenbasis of Shampoo",
        from_gradients(peers.soap),
        (1e-3, 1e-1),
        advice="Its README: a rate of 0.003, betas (0.95, 0.95), weight decay 0.01, a new basis "
        "every 10 steps; the code skips the first step. https://github.com/nikhilvyas/SOAP",
    ),
    "psgd": Optimizer(
        "PSGD Kron: a learned triangular preconditioner",
        from_gradients(peers.psgd),
        (1e-4, 1e-2),
        advice="The README of psgd-jax: weight decay like Adam's, a rate somewhat smaller; update "
        "probabilities, momentum and all else by its defaults. distributed-kron, its successor, "
        "has a default rate of 0.0003. https://github.com/evanatyourservice/psgd_jax",
    ),
    "schedule-free": Optimizer(
        "schedule-free AdamW, tested at the average",
        from_gradients(
            peers.schedule_free,
            lambda params, state: optax.contrib.schedule_free_eval_params(state, params),
        ),
        (1e-3, 1e-1),
        anneals=False,
        advice="Its README: warm-up and no schedule, b1 = 0.9, rates 1 to 10 times AdamW's. "
        "https://github.com/facebookresearch/schedule_free. b2 = 0.9955 and weight decay 0.08 are "
        "those of its submission that won AlgoPerf 2024 (arXiv 2502.15015), at a rate of 0.0025.",
    ),
    "shampoo": Optimizer(
        "Shampoo, as long a step as AdamW's",
        from_gradients(peers.shampoo),
        (3e-4, 3e-2),
        advice="The README of PyTorch's Distributed Shampoo: AdamW's own settings, grafted from "
        "Adam, begins with AdamW's steps. https://github.com/facebookresearch/optimizers. A ridge "
        "of 1e-6: the JAX version of Anil et al. 2020, arXiv 2002.09018. Roots every 10 steps, as "
        "runs here are short.",
    ),
    "prodigy": Optimizer(
        "Prodigy, which finds its learning rate by itself",
        from_gradients(peers.prodigy),
        (0.1, 10.0),
        advice="Its README: a rate of 1 with a cosine schedule, safeguard_warmup with a warm-up, "
        "bias correction, weight decay 0.01, and d0 = 1e-4 where the estimate grows too slowly "
        "(runs here are short). https://github.com/konstmish/prodigy",
    ),
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
    "natural-gradient": Optimizer(
        "natural gradient descent, by conjugate gradients",
        related.natural_gradient,
        (0.01, 1.0),
        advice="Martens, ICML 2010: conjugate gradients that begin with the last solution.",
    ),
    "kfac": Optimizer(
        "K-FAC, a small one of our own",
        related.kfac,
        (1e-3, 1e-1),
        advice="The examples of https://github.com/gpauloski/kfac-pytorch: a rate of 0.1, momentum "
        "0.9, damping 0.003, averages of 0.95, inverses every 10 steps, kl-clip 0.001. Targets "
        "drawn from the model: Martens and Grosse 2015, arXiv 1503.05671.",
    ),
    "tensor-normal": Optimizer(
        "tensor normal training: the Fisher matrix from shapes alone",
        related.tensor_normal,
        (1e-3, 1e-1),
        advice="Ren and Goldfarb 2021, arXiv 2106.02925, for the method. The settings are K-FAC's "
        "here, not the authors'.",
    ),
    "proxprop": Optimizer(
        "ProxProp: implicit gradient steps of every layer",
        related.proxprop,
        (0.005, 0.5),
        advice="The authors' experiment with an MLP: tau = 0.05, Nesterov's momentum of 0.95, a "
        "rate of 1 (here 0.05). https://github.com/tfrerix/proxprop",
    ),
}


def with_settings(name: str, **settings: float | None) -> str:
    """The name of an optimizer with settings of its own, such as `algorithm2@damping=1@clip=1`."""
    return "".join([name, *(f"@{key}={x:g}" for key, x in settings.items() if x is not None)])


def find_optimizer(name: str) -> Optimizer:
    """The optimizer of a name, which may be one of `with_settings`."""
    name, *settings = name.split("@")
    optimizer = OPTIMIZERS[name]
    if not settings:
        return optimizer
    assert optimizer.varied is not None
    pairs = (setting.split("=") for setting in settings)
    varied = optimizer.varied(**{key: float(value) for key, value in pairs})
    return replace(optimizer, make=varied)


def check_optimizer(name: str) -> None:
    """Raises an error where there is no such optimizer, or where it has no such settings."""
    name, *settings = name.split("@")
    if name not in OPTIMIZERS:
        known = ", ".join(name for name in OPTIMIZERS if not {":", "+"} & {*name})
        raise RunError(
            f"There is no optimizer {name!r}. There are {known}; and lnb:SOLVER, lnb:NORM and "
            f"lnb:SOLVER:NORM with the solvers {', '.join(SOLVERS)} and the norms "
            f"{', '.join(NORMS)}."
        )
    if settings and OPTIMIZERS[name].varied is None:
        raise RunError(
            f"--damping and --clip are settings of lnb and of the paper's algorithms, not of "
            f"{name}: run it apart."
        )
