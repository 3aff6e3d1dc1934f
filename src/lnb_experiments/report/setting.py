"""Under which conditions an experiment's runs were made, in one line."""

from collections.abc import Iterable
from typing import Any

from .variants import Variant


def setting(variant: Variant) -> str:
    """Preset, length, data, seeds, device and versions; all of them where runs differ."""
    runs = variant.runs or variant.trials
    configs = [run.config for run in runs]
    environments = [run.environment for run in runs]
    parts = [
        f"preset {_all(config['preset'] for config in configs)}",
        f"{_sizes(configs, 'steps')} steps of {_sizes(configs, 'batch_size')} examples",
        f"{_all(config['data'] for config in configs)} data"
        + "".join(
            f" ({note})" for note in [_all(config.get("note") for config in configs)] if note
        ),
        f"evaluated on {_all(config['evaluated_on'] for config in configs)} data",
        f"seeds {', '.join(map(str, sorted({config['seed'] for config in configs})))}",
        _all(map(_device, environments)),
        _all(map(_versions, environments)),
    ]
    return "; ".join(filter(None, parts))


def _sizes(configs, name: str) -> str:
    return _all(config["sizes"].get(name, "?") for config in configs)


def _device(environment) -> str:
    kind = environment.get("device_kind") or environment.get("device")
    count = environment.get("device_count", 1)
    device = f"{count} x {kind}" if count > 1 else str(kind or "")
    cores = environment.get("cores")
    return device + (f" ({cores} cores)" if cores else "")


def _versions(environment) -> str:
    versions = {"Python": environment.get("python"), **environment.get("versions", {})}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _all(values: Iterable[Any]) -> str:
    return " / ".join(dict.fromkeys(str(value) for value in values if value not in (None, "")))
