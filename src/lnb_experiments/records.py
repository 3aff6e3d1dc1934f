"""What runs left behind: reads the folders that the runner writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CONFIG_FIELDS = (
    "experiment preset sizes optimizer learning_rate seed role evaluated_on headline "
    "larger_is_better data"
).split()


class RecordError(Exception):
    """Runs that are missing or damaged; the message says which file, and what is wrong with it."""


class Series(NamedTuple):
    """What was measured along a run.

    Attributes:
      step: after how many training steps.
      epoch: the same, in passes over the training data.
      seconds: of training until then, without compilation and evaluation.
      values: the measurements by name, one a step; NaN where there is none.
    """

    step: np.ndarray
    epoch: np.ndarray
    seconds: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Record:
    """A run.

    Attributes:
      folder: where it was read.
      config: what was run.
      environment: where it ran.
      steps: "loss" and "load_seconds" (cumulative, of loading batches) at each training step.
      evaluations: the metrics, at each evaluation.
      result: how it ended; None if it has not.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    steps: Series
    evaluations: Series
    result: Mapping[str, Any] | None

    @property
    def status(self) -> str:
        """`"done"`, `"diverged"` or `"unfinished"`."""
        return self.result["status"] if self.result else "unfinished"

    @property
    def last_step(self) -> int:
        return int(max(self.steps.step, default=0))

    def last(self, metric: str) -> float:
        """A metric at the last evaluation; NaN without one."""
        values = self.evaluations.values.get(metric)
        return float("nan") if values is None else float(values[-1])

    @property
    def headline(self) -> float:
        return self.last(self.config["headline"])


def find_runs(folder: Path) -> list[Record]:
    """All runs in a folder and below it, ordered by path."""
    files = sorted(Path(folder).rglob("config.json"))
    if not files:
        found = "holds no run" if Path(folder).is_dir() else "is no folder"
        raise RecordError(
            f"{folder} {found}. Give the folder "
            "that runs were written to: after `lnb run ... --out FOLDER`, `lnb report FOLDER`."
        )
    return [read_run(file.parent) for file in files]


def read_run(folder: Path) -> Record:
    """Reads one run, finished or not."""
    folder = Path(folder)
    config = _read_object(folder / "config.json")
    missing = [name for name in CONFIG_FIELDS if name not in config]
    if missing:
        raise RecordError(
            f"{folder / 'config.json'} lacks {', '.join(missing)}, which every run writes; "
            "move it away if it is not that of a run."
        )
    lines = _read_log(folder / "log.jsonl")
    result = folder / "result.json"
    return Record(
        folder,
        config,
        _read_object(folder / "environment.json"),
        _series([line for line in lines if "loss" in line], lambda line: line),
        _series(
            [line for line in lines if line.get("evaluation")], lambda line: line["evaluation"]
        ),
        _read_object(result) if result.exists() else None,
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecordError(f"{file} is missing: the folder is not that of a run.") from None
    except ValueError as error:
        raise RecordError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RecordError(f"{file} holds {type(content).__name__} where an object belongs.")
    return content


def _read_log(file: Path) -> list[dict[str, Any]]:
    """The lines of a log, in the order of steps; none if the run was killed before the first.

    A killed run may have cut off its last line, which is then ignored.
    """
    if not file.exists():
        return []
    *whole, rest = file.read_text().split("\n")
    lines = [_parse(line, f"{file}, line {number}") for number, line in enumerate(whole, 1)]
    if _is_json(rest):  # all but the line break
        lines.append(_parse(rest, f"{file}, line {len(whole) + 1}"))
    # A run that went on from a checkpoint may have logged a step twice: the later line counts.
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{where} is not JSON ({error}): {text[:80]!r}") from None
    if isinstance(line, dict) and line.get("step") == 0:
        line = {"epoch": 0.0, "seconds": 0.0, **line}
        needed = ("step", "epoch", "seconds", "evaluation")
    else:
        needed = ("step", "epoch", "seconds", "loss")
    missing = [name for name in needed if not isinstance(line, dict) or name not in line]
    if missing:
        raise RecordError(f"{where} lacks {', '.join(missing)}: {text[:80]!r}")
    return line


def _series(lines: Sequence[Mapping[str, Any]], values) -> Series:
    def column(rows, name: str) -> np.ndarray:
        return np.array([row.get(name, np.nan) for row in rows], dtype=np.float64)

    rows = [values(line) for line in lines]
    numbers = {
        name: column(rows, name)
        for name in dict.fromkeys(name for row in rows for name in row)
        if all(isinstance(row.get(name), int | float | None) for row in rows)
    }
    step, epoch, seconds = (column(lines, name) for name in ("step", "epoch", "seconds"))
    return Series(step, epoch, seconds, numbers)
