"""The folder of a run: what was asked for, where it ran, what happened, and how to go on."""

import json
import math
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from .records import CONFIG_FIELDS, RESULT_FIELDS, damaged, read_log, read_object

CONFIG, ENVIRONMENT, LOG, RESULT = "config.json", "environment.json", "log.jsonl", "result.json"
CHECKPOINT = "checkpoint.json"  # which checkpoint is complete, with its checksums
PACKAGES = "lnb jax jaxlib optax numpy orbax-checkpoint".split()


class RunError(Exception):
    """A run that cannot start; the message says why and what to do."""


def environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device.platform,
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "cores": available_cores(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def available_cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def make_folder(path: Path) -> None:
    """Makes a folder and those around it, or says why that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"cannot make the folder {path}: {error.strerror}. Give --out a folder that can be "
            "written to."
        ) from None


class RunFolder:
    """One run's files. Whole files are replaced in one go, the log grows line by line."""

    def __init__(self, path: Path):
        self.path = path
        self.checkpoints = path / "checkpoints"

    @property
    def result(self) -> dict[str, Any] | None:
        """What came out, once the run is finished."""
        file = self.path / RESULT
        return read_object(file, RESULT_FIELDS) if file.exists() else None

    def check(self, config: dict[str, Any], resume: bool) -> None:
        """Refuses a folder with another run than the one to go on with, or with a damaged one."""
        if not (self.path / CONFIG).exists():
            for name in (LOG, RESULT, CHECKPOINT, self.checkpoints.name):  # all written later
                if (self.path / name).exists():
                    raise damaged(self.path / CONFIG, f"is missing beside {name}", self.path)
            return
        there, now = _flat(read_object(self.path / CONFIG, CONFIG_FIELDS)), _flat(config)
        changed = [key for key in {**there, **now} if there.get(key) != now.get(key)]
        if changed:
            lines = [f"  {key}: {there.get(key)} there, {now.get(key)} now" for key in changed]
            raise RunError(
                "\n".join([f"{self.path} holds a run of another configuration:", *lines])
                + "\nChoose another --out, or ask for the same; a run cannot be made longer."
            )
        if not resume:
            raise RunError(
                f"{self.path} holds this run already. Go on with it by --resume, or choose another "
                "--out."
            )
        read_object(self.path / ENVIRONMENT, {})

    def open(self, config: dict[str, Any]) -> None:
        """Makes the folder, or notes that its run goes on in another environment."""
        make_folder(self.path)
        file, now = self.path / ENVIRONMENT, environment()
        there = read_object(file, {}) if file.exists() else now
        same = now == {key: there.get(key) for key in now}
        self.write(ENVIRONMENT, there if same else {**there, "resumed_in": now})
        self.write(CONFIG, config)  # last: a folder with a configuration is complete

    def write(self, name: str, content: Any) -> None:
        file = self.path / name
        new = file.with_suffix(".new")
        new.write_text(json.dumps(_strict(content), indent=2) + "\n")
        os.replace(new, file)

    def finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """Writes what came out; returns it as it can be read again."""
        self.write(RESULT, result)
        return _strict(result)

    def lines(self, step: int) -> list[dict[str, Any]]:
        """The log up to a step, none of which may be missing."""
        return [line for line in read_log(self.path / LOG, step) if 0 < line["step"] <= step]

    def rewind(self, lines: list[dict[str, Any]]) -> None:
        """Drops what was logged after these lines."""
        file = self.path / LOG
        new = file.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        os.replace(new, file)

    def append(self, line: dict[str, Any]) -> None:
        with (self.path / LOG).open("a") as file:
            file.write(json.dumps(_strict(line)) + "\n")


def _strict(content: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(content, dict):
        return {key: _strict(value) for key, value in content.items()}
    return None if isinstance(content, float) and not math.isfinite(content) else content


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(config))  # tuples are lists there
    return {**config, **config["sizes"], "sizes": None}


def diverged(losses: list[float], patience: int = 10) -> bool:
    """Whether the last losses were not finite; some optimizers recover from one."""
    return len(losses) >= patience and not any(map(math.isfinite, losses[-patience:]))
