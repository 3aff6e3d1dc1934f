"""Training: compiled once for an experiment and an optimizer, then run at any rate and seed."""

import math
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from .checkpoints import Checkpoints
from .data import Batches, Data, Source, Split
from .experiment import Experiment
from .folder import RunFolder, available_cores, diverged
from .method import Problem
from .optimizers import find_optimizer

WARM_UP = 0.05  # part of the steps
CALIBRATION = 512  # training examples for batch normalisation's statistics, in an evaluation


@dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
      decay: the learning rate falls exponentially, to this part of itself by the last step.
      schedule: `"constant"`, apart from the decay; or `"cosine"`: a linear warm-up, then half a
        cosine down to zero. Optimizers that ask for no schedule have the warm-up only.
      role: `"trial"` chooses a learning rate on held-out training data; `"final"` is a trial's
        winner, on all training data; `"run"` is like it, at a given learning rate.
    """

    experiment: Experiment
    preset: str
    optimizer: str
    learning_rate: float
    decay: float = 1.0
    seed: int = 0
    role: Literal["run", "trial", "final"] = "run"
    schedule: Literal["constant", "cosine"] = "constant"
    source: Source = field(default=Source())

    def rate(self, step: int) -> float:
        done = (step - 1) / self.experiment.steps
        rate = self.learning_rate * self.decay**done
        if self.schedule == "cosine":
            rate *= min(1.0, step / (WARM_UP * self.experiment.steps))
            if find_optimizer(self.optimizer).anneals:
                rate *= (1 + math.cos(math.pi * done)) / 2
        return rate

    def config(self, data: Data, steps_per_epoch: int) -> dict[str, Any]:
        """As JSON: all that the run's numbers depend on."""
        return {
            "experiment": self.experiment.name,
            "preset": self.preset,
            "sizes": self.experiment.sizes(),
            "optimizer": self.optimizer,
            "learning_rate": self.learning_rate,
            "decay": self.decay,
            "schedule": self.schedule,
            "seed": self.seed,
            "role": self.role,
            "evaluated_on": "held-out" if self.role == "trial" else "test",
            "headline": self.experiment.headline,
            "larger_is_better": self.experiment.larger_is_better,
            "steps_per_epoch": steps_per_epoch,
            "data": self.source.kind,
            "examples": [len(data.train.targets), len(data.test.targets)],
            "note": data.note,
        }


class Programs(NamedTuple):
    """An experiment with an optimizer, compiled."""

    init: Callable  # seed -> state
    step: Callable  # (learning_rate, seed, step, state, batch) -> state, loss
    evaluated: Callable  # (state, training examples) -> the model as it is evaluated
    counts: Callable  # (model, batch) -> what an evaluation adds up
    compile_seconds: float


def stopwatch() -> Callable[[], float]:
    """Seconds of this process alone where it has one core, so that other programs do not count.

    With more cores these would be the seconds of all of them: it is the time of day then.
    """
    return time.process_time if available_cores() == 1 else time.perf_counter


def compile_programs(experiment: Experiment, optimizer: str, batch: Split) -> Programs:
    """Compiles before the clock starts, and once for all learning rates and seeds."""
    start = time.perf_counter()
    params = jax.eval_shape(experiment.init, jax.random.key(0))
    problem = Problem(experiment.outputs, experiment.objective, experiment.decays_weights)
    method = find_optimizer(optimizer).make(problem, params, batch, jax.random.key(0))

    @jax.jit
    def init(seed):
        params = experiment.init(jax.random.key(seed))
        return params, method.init(params)

    def step(learning_rate, seed, number, state, batch):
        key = jax.random.fold_in(jax.random.key(seed), number)
        params, method_state = state
        *state, loss = method.step(learning_rate, params, method_state, batch, key)
        return tuple(state), loss

    @jax.jit
    def evaluated(state, batch):
        return experiment.calibrated(method.evaluated(*state), batch)

    state = jax.eval_shape(init, 0)
    lowered = jax.jit(step, donate_argnums=3).lower(
        np.float32(0), np.int32(0), np.int32(0), state, batch
    )
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    nothing = np.float32(0), np.int32(0), np.int32(0)
    jax.block_until_ready(compiled(*nothing, init(np.int32(0)), batch))  # a first call is slower
    return Programs(init, compiled, evaluated, jax.jit(experiment.counts), seconds)


def evaluate(
    experiment: Experiment, programs: Programs, state: Any, data: Data
) -> dict[str, float]:
    """The metrics of the test examples."""
    model = programs.evaluated(state, data.train.take(slice(CALIBRATION)))
    test = data.test.take(slice(experiment.test_examples))
    size = min(len(test.targets), 2 * experiment.batch_size)
    total: dict[str, Any] = defaultdict(float)
    for start in range(0, len(test.targets), size):
        counts = programs.counts(model, test.take(slice(start, start + size)))
        for name, value in jax.device_get(counts).items():
            total[name] += np.asarray(value, np.float64)
    return experiment.metrics(total)


def train(
    plan: Plan,
    make_programs: Callable[[], Programs],
    data: Data,
    folder: RunFolder,
    *,
    resume: bool = False,
    checkpoint_seconds: float = 30.0,
    on_step: Callable[[dict[str, Any]], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains to the end, from the last checkpoint if there is one; returns the result.

    Batches, random keys and learning rates are functions of the seed and the number of the step, so
    that a run that was killed goes on to the same curve. Nothing is compiled for one that is done.
    All that is there is read and checked before anything is written.
    """
    experiment, seed, clock = plan.experiment, np.int32(plan.seed), stopwatch()
    batches = Batches(data.train, experiment.batch_size, plan.seed, experiment.augment)
    config = plan.config(data, batches.per_epoch)
    folder.check(config, resume)
    if result := folder.result:
        folder.lines(result["step"])
        return result
    checkpoints = Checkpoints(folder)
    first = checkpoints.step
    lines = folder.lines(first)
    programs = make_programs()  # before there is a folder: not every method can serve every problem
    folder.open(config)
    with checkpoints:
        state = programs.init(seed)
        if first:
            state = checkpoints.restore(state)
        folder.rewind(lines)
        losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
        line: dict[str, Any] = (
            lines[-1] if lines else {"step": 0, "seconds": 0.0, "load_seconds": 0.0}
        )
        batch, saved = batches.batch(first), time.perf_counter()
        while not is_over(experiment, losses):
            number = len(losses) + 1
            start = clock()
            state, loss = programs.step(
                np.float32(plan.rate(number)), seed, np.int32(number), state, batch
            )
            dispatched = clock()  # the next batch is loaded while the step runs
            batch = batches.batch(number)
            loaded = clock()
            losses.append(float(loss))
            line = {
                "step": number,
                "epoch": number / batches.per_epoch,
                "loss": losses[-1],
                "seconds": line["seconds"] + clock() - start,
                "load_seconds": line["load_seconds"] + loaded - dispatched,
            }
            if is_over(experiment, losses) or number % experiment.evaluate_every == 0:
                line["evaluation"] = evaluate(experiment, programs, state, data)
            folder.append(line)
            on_step(line)
            if time.perf_counter() - saved > checkpoint_seconds:
                checkpoints.save(number, state)
                saved = time.perf_counter()
        if plan.role != "trial" and checkpoints.step != line["step"]:
            checkpoints.save(line["step"], state)
    result = {
        "status": "done" if math.isfinite(losses[-1]) else "diverged",
        "step": line["step"],
        "evaluation": line["evaluation"],
        "seconds": line["seconds"],
        "compile_seconds": programs.compile_seconds,
    }
    return folder.finish(result)


def is_over(experiment: Experiment, losses: list[float]) -> bool:
    """Whether a run with these losses so far is at its end: it went on for all of its steps,
    reached the tolerance, or diverged."""
    return len(losses) == experiment.steps or (
        bool(losses) and (losses[-1] < experiment.tolerance * losses[0] or diverged(losses))
    )
