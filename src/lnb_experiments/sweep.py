"""A fair search: as many trials for every optimizer, judged on held-out data, then fresh seeds."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .folder import RunError
from .optimizers import rate_range, search_rates
from .runner import Runner
from .training import Plan

TRIAL_SEED = 0  # final runs have the seeds that follow


def trials(plan: Plan, count: int) -> list[Plan]:
    """The plan at every point of its optimizer's search space: learning rates times decays."""
    decays = plan.experiment.decays
    if count % len(decays):
        raise RunError(
            f"{plan.experiment.name} tries every learning rate with {len(decays)} schedules: "
            f"--trials {count} should be a multiple of that."
        )
    rates = search_rates(rate_range(plan.experiment, plan.optimizer), count // len(decays))
    trial = replace(plan, role="trial", seed=TRIAL_SEED)
    return [replace(trial, learning_rate=r, decay=d) for d in decays for r in rates]


def best(plans: Iterable[Plan], results: Iterable[dict[str, Any]]) -> Plan:
    """The plan with the best headline; one that diverged loses to all that did not."""

    def loss(pair: tuple[Plan, dict[str, Any]]) -> float:
        plan, result = pair
        value = result["evaluation"][plan.experiment.headline]
        if result["status"] == "diverged" or not math.isfinite(value):
            return math.inf
        return -value if plan.experiment.larger_is_better else value

    return min(zip(plans, results, strict=True), key=loss)[0]


def sweep(runner: Runner, plan: Plan, count: int, seeds: int) -> None:
    """All trials of one optimizer, then its winner on fresh seeds."""
    plans = trials(plan, count)
    winner = best(plans, runner.run(plans))
    finals = range(TRIAL_SEED + 1, TRIAL_SEED + 1 + seeds)
    runner.run(replace(winner, role="final", seed=seed) for seed in finals)
