"""A fair search: as many trials for every optimizer, judged on held-out data, then fresh seeds."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .folder import RunError
from .optimizers import rate_range, search_rates, two_digits
from .runner import Runner
from .training import Plan

TRIAL_SEED = 0  # final runs have the seeds that follow


def coarse(plan: Plan, count: int) -> list[Plan]:
    """The plan at learning rates over its optimizer's range, times the experiment's decays."""
    decays = plan.experiment.decays
    if count < 2 * len(decays):
        raise RunError(
            f"too few --trials: of {plan.experiment.name}, three quarters of them must be at least "
            f"{2 * len(decays)}."
        )
    rates = search_rates(rate_range(plan.experiment, plan.optimizer), count // len(decays))
    trial = replace(plan, role="trial", seed=TRIAL_SEED)
    return [replace(trial, learning_rate=r, decay=d) for d in decays for r in rates]


def refined(plans: list[Plan], results: list[dict[str, Any]], judge: str | None = None) -> Plan:
    """The best so far, halfway to the better of its neighbours, or at the edge half as far out."""
    winner = best(plans, results, judge)
    pairs = zip(plans, results, strict=True)
    alike = {p.learning_rate: (p, r) for p, r in pairs if p.decay == winner.decay}
    rates = sorted(alike)
    at = rates.index(winner.learning_rate)
    around = [rates[i] for i in (at - 1, at + 1) if 0 <= i < len(rates)]
    neighbours = zip(*(alike[rate] for rate in around), strict=True)
    neighbour = best(*neighbours, judge=judge).learning_rate
    inside = len(around) == 2
    rate = winner.learning_rate * (neighbour / winner.learning_rate) ** (0.5 if inside else -0.5)
    return replace(winner, learning_rate=two_digits(rate))


def best(
    plans: Iterable[Plan], results: Iterable[dict[str, Any]], judge: str | None = None
) -> Plan:
    """The plan with the best headline, or the best of another metric of which less is better; of
    equal ones the one with the lowest loss.

    One that diverged loses to all that did not.
    """

    def badness(pair: tuple[Plan, dict[str, Any]]) -> tuple[float, float]:
        plan, result = pair
        evaluation = result["evaluation"]
        value = evaluation[judge or plan.experiment.headline]
        if result["status"] == "diverged" or value is None:
            return math.inf, math.inf
        loss = evaluation["loss"]
        value = -value if plan.experiment.larger_is_better and not judge else value
        return value, math.inf if loss is None else loss

    return min(zip(plans, results, strict=True), key=badness)[0]


def sweep(runner: Runner, plan: Plan, count: int, seeds: int, judge: str | None = None) -> None:
    """All trials of one optimizer, then its winner on fresh seeds.

    Three trials of four are spread over the range of learning rates, the rest close in on the best.
    """
    plans = coarse(plan, count - count // 4)
    results = runner.run(plans)
    while len(plans) < count:
        plans.append(refined(plans, results, judge))
        results += runner.run(plans[-1:])
    winner = best(plans, results, judge)
    runner.console.print(f"{winner.optimizer}: best learning rate {winner.learning_rate:g}")
    finals = range(TRIAL_SEED + 1, TRIAL_SEED + 1 + seeds)
    runner.run(replace(winner, role="final", seed=seed) for seed in finals)
