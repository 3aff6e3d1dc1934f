"""Finished runs in one small file a workload, to go on from on another machine, or to check.

A line is a run: what was run, where, its evaluations, and how it ended.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..records import Record, RecordError, Series

DIGITS = 6


def publish(runs: Sequence[Record], folder: Path) -> None:
    """Writes all finished runs, one file for each workload."""
    lines: dict[str, list[str]] = {}
    for run in runs:
        if run.result:
            lines.setdefault(run.config["experiment"], []).append(_line(run))
    for workload, own in lines.items():
        (folder / f"{workload}.jsonl").write_text("\n".join(own) + "\n", encoding="utf-8")


def published(folder: Path) -> list[Record]:
    """The runs that were written into a folder."""
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise RecordError(f"{folder} holds no runs of an arena: no file that ends in .jsonl.")
    return [
        _record(line, file, number)
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
    ]


def _line(run: Record) -> str:
    series = run.evaluations
    columns = {"step": series.step, "epoch": series.epoch, "seconds": series.seconds}
    content = {
        "config": run.config,
        "environment": run.environment,
        "result": run.result,
        "columns": {name: _numbers(column) for name, column in columns.items()},
        "values": {name: _numbers(column) for name, column in series.values.items()},
    }
    return json.dumps(content)


def _numbers(column: np.ndarray) -> list[float | None]:
    """JSON has no NaN: null."""
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in column]


def _record(line: str, file: Path, number: int) -> Record:
    try:
        content = json.loads(line)
        columns = {name: _array(column) for name, column in content["columns"].items()}
        values = {name: _array(column) for name, column in content["values"].items()}
        result: dict[str, Any] = content["result"]
        # Of the log of steps, only how far it came.
        step, seconds = np.array([result["step"]]), np.array([result["seconds"]])
        last = Series(step, np.array([np.nan]), seconds, {})
        evaluations = Series(**columns, values=values)
        where = file.with_suffix("") / str(number)
        return Record(where, content["config"], content["environment"], last, evaluations, result)
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{file}, line {number}, is not a run ({type(error).__name__}: {error}). Remove the "
            "line, or put back a copy of the file."
        ) from None


def _array(column: list[float | None]) -> np.ndarray:
    return np.array(column, dtype=np.float64)  # None is NaN
