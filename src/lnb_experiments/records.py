"""What runs left behind: reads the folders that the runner writes."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Fields = dict[str, Any]  # the type of each field, or a union of types

CONFIG_FIELDS: Fields = {
    **dict.fromkeys("experiment preset optimizer role evaluated_on headline data".split(), str),
    "sizes": dict,
    "learning_rate": int | float,
    "seed": int,
    "larger_is_better": bool,
}
RESULT_FIELDS: Fields = {"status": str, "step": int, "evaluation": dict, "seconds": int | float}
EVALUATION_FIELDS: Fields = {"step": int, "evaluation": dict}
STEP_FIELDS: Fields = {
    "step": int,
    **dict.fromkeys("epoch seconds load_seconds".split(), int | float),
    "loss": int | float | None,
}


class RecordError(Exception):
    """Runs that are missing or damaged; the message says which file, and what is wrong with it."""


def damaged(where: Path | str, what: str, folder: Path) -> RecordError:
    """An error that names the file, says what is wrong with it, and what to do with its run.

    Args:
      where: the file, or a line of it.
      what: what is wrong, as the rest of a sentence that begins with the file.
      folder: the folder of the run.
    """
    return RecordError(
        f"{where} {what}. Put back a copy of it, or move {folder} away: `lnb run` and `lnb sweep` "
        "then start its run again, and `lnb report` leaves it out."
    )


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
    # A run may be under way, whose checkpoints come and go: `os.walk` passes over what is gone.
    folders = sorted(
        Path(path) for path, _, files in os.walk(folder) if {"config.json", "log.jsonl"} & {*files}
    )
    if not folders:
        found = "holds no run" if Path(folder).is_dir() else "is no folder"
        raise RecordError(
            f"{folder} {found}. Give the folder "
            "that runs were written to: after `lnb run ... --out FOLDER`, `lnb report FOLDER`."
        )
    return [read_run(folder) for folder in folders]


def read_run(folder: Path) -> Record:
    """Reads one run, finished or not."""
    folder = Path(folder)
    config = read_object(folder / "config.json", CONFIG_FIELDS)
    environment = read_object(folder / "environment.json", {})
    result = folder / "result.json"
    result = read_object(result, RESULT_FIELDS) if result.exists() else None
    lines = read_log(folder / "log.jsonl", result["step"] if result else 0)
    return Record(
        folder,
        config,
        environment,
        _series([line for line in lines if "loss" in line], lambda line: line),
        _series(
            [line for line in lines if line.get("evaluation")], lambda line: line["evaluation"]
        ),
        result,
    )


def read_object(file: Path, fields: Fields) -> dict[str, Any]:
    """Reads a file that holds an object with these fields, and maybe others."""
    return _check(_parse(_read(file), file, file.parent), fields, file, file.parent)


def read_log(file: Path, until: int = 0) -> list[dict[str, Any]]:
    """The lines of a log, in the order of steps; none if the run was killed before the first.

    A killed run may have cut off its last line, which is then ignored. No other step may be missing
    up to the last, nor up to step `until`.
    """
    *whole, rest = _read(file).split("\n") if file.exists() else [""]
    if _is_json(rest):  # all but the line break
        whole.append(rest)
    lines = [_parse_line(text, file, number) for number, text in enumerate(whole, 1)]
    # A run that went on from a checkpoint may have logged a step twice: the later line counts.
    steps = {line["step"]: line for line in lines}
    last = max([until, *steps])
    missing = next(step for step in count(1) if step not in steps)
    if missing <= last:
        raise damaged(
            file, f"lacks step {missing}, though its run came to step {last}", file.parent
        )
    return [line for _, line in sorted(steps.items())]


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError as error:
        raise damaged(file, f"cannot be read: {error.strerror}", file.parent) from None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse_line(text: str, file: Path, number: int) -> dict[str, Any]:
    where = f"{file}, line {number}"
    line = _parse(text, where, file.parent)
    if line.get("step") == 0:
        line = {"epoch": 0.0, "seconds": 0.0, **line}
        return _check(line, EVALUATION_FIELDS, where, file.parent)
    _check({"evaluation": {}, **line}, EVALUATION_FIELDS | STEP_FIELDS, where, file.parent)
    return line


def _parse(text: str, where: Path | str, folder: Path) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise damaged(where, f"is not JSON ({error})", folder) from None
    if not isinstance(content, dict):
        raise damaged(where, f"holds {type(content).__name__} where an object belongs", folder)
    return content


def _check(
    content: dict[str, Any], fields: Fields, where: Path | str, folder: Path
) -> dict[str, Any]:
    wrong = [
        name
        for name, kind in fields.items()
        if name not in content or not isinstance(content[name], kind)
    ]
    if wrong:
        names = ", ".join(wrong)
        raise damaged(where, f"lacks {names}, or holds them in another form than a run's", folder)
    return content


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
