"""Writes run folders of known numbers, as the runner writes them."""

import json
import math
from pathlib import Path

STEPS, EVERY, PER_EPOCH = 40, 10, 20
SIZES = {"steps": STEPS, "batch_size": 50, "evaluate_every": EVERY, "inverted": False}


def score(step: int, speed: float, seed: int) -> float:
    return 1 - math.exp(-step * speed) + 0.001 * seed


def loss(step: int, speed: float, seed: int) -> float:
    return 2 * math.exp(-step * speed) + 0.01 * seed + 0.001 * (step % 3)


def make_run(
    folder: Path, speed: float = 0.1, steps: int = STEPS, status: str | None = "done", **changes
) -> Path:
    """Writes a run, as the runner does; the sizes among the changes are put with the others."""
    sizes = SIZES | {name: changes.pop(name) for name in SIZES if name in changes}
    config = {
        "experiment": "mnist",
        "preset": "laptop",
        "sizes": sizes,
        "optimizer": "adam",
        "learning_rate": 0.001,
        "seed": 1,
        "role": "run",
        "evaluated_on": "test",
        "headline": "accuracy",
        "larger_is_better": True,
        "steps_per_epoch": PER_EPOCH,
        "data": "real",
        "note": "",
    } | changes
    seed, milliseconds = config["seed"], config.pop("milliseconds", 10)
    environment = {"python": "3.11.7", "device": "cpu", "cores": 2, "versions": {"jax": "0.10.2"}}
    lines = []
    for step in range(steps + 1):
        seconds = step * milliseconds / 1e3
        line = {"step": step, "epoch": step / PER_EPOCH, "seconds": seconds}
        line["load_seconds"] = seconds / 8
        if step:
            line["loss"] = loss(step, speed, seed)
        if step % EVERY == 0:
            line["evaluation"] = {"loss": 1.0, "accuracy": score(step, speed, seed)}
        lines.append(line)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if status:
        result = {"status": status, "step": steps, "evaluation": {}, "seconds": 1.0}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def make_trials(folder: Path, optimizer: str, speeds: dict[float, float | None]) -> None:
    """Trials by learning rate; None for one that diverges."""
    for rate, speed in speeds.items():
        make_run(
            folder / optimizer / f"{rate}",
            speed or 0.01,
            optimizer=optimizer,
            learning_rate=rate,
            role="trial",
            evaluated_on="held-out",
            status="done" if speed else "diverged",
        )
