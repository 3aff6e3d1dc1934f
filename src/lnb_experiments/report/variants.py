"""Which runs are compared with which: by variant of an experiment, then by optimizer."""

import json
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..records import Record


class Entry(NamedTuple):
    """The runs of one optimizer at one learning rate, one a seed."""

    optimizer: str
    rate: float
    decay: float
    runs: list[Record]

    @property
    def rate_label(self) -> str:
        return f"{self.rate:g}" + (f", decay {self.decay:g}" if self.decay != 1 else "")

    @property
    def done(self) -> list[Record]:
        return [run for run in self.runs if run.status == "done"]

    @property
    def seeds(self) -> list[int]:
        return sorted({run.config["seed"] for run in self.runs})


@dataclass(frozen=True)
class Variant:
    """Runs of the same experiment on the same data at the same sizes.

    Attributes:
      title: the experiment, and what tells this variant from the others.
      slug: the title, as a file name.
      runs: those of winners of a search, or those that no search belongs to.
      trials: the runs that chose a learning rate.
    """

    title: str
    slug: str
    runs: list[Record]
    trials: list[Record]

    @property
    def config(self) -> Any:
        """A configuration: what it says of the experiment holds for all runs."""
        return (self.runs or self.trials)[0].config

    @property
    def headline(self) -> str:
        return self.config["headline"]

    @property
    def larger_is_better(self) -> bool:
        return self.config["larger_is_better"]

    @property
    def other_metrics(self) -> list[str]:
        """Those beside the headline and the loss."""
        names = {name for run in self.runs for name in run.evaluations.values}
        return sorted(names - {self.headline, "loss"})

    @property
    def optimizers(self) -> list[str]:
        return sorted({run.config["optimizer"] for run in self.runs + self.trials})

    @property
    def entries(self) -> list[Entry]:
        return entries(self.runs)


def entries(runs: Iterable[Record]) -> list[Entry]:
    """Runs by optimizer and learning rate, sorted."""

    def setting(run: Record) -> tuple[str, float, float]:
        config = run.config
        return config["optimizer"], config["learning_rate"], config.get("decay", 1.0)

    groups = sorted(_group(runs, setting).items())
    return [Entry(name, rate, decay, group) for (name, rate, decay), group in groups]


def variants(records: Sequence[Record]) -> list[Variant]:
    """Groups runs; sorted by experiment."""
    result = []
    for _, same_name in sorted(_group(records, lambda run: run.config["experiment"]).items()):
        groups = _group(same_name, _key)
        several_presets = len({run.config["preset"] for run in same_name}) > 1
        for _, group in sorted(groups.items()):
            words = _words(group[0], same_name, several_presets)
            single = [run for run in group if run.config["role"] == "run"]
            searched = [run for run in group if run.config["role"] != "run"]
            if searched:
                result.append(_variant(words, searched))
            if single:
                result.append(_variant([*words, "single runs"] if searched else words, single))
    return result


def _variant(words: list[str], group: list[Record]) -> Variant:
    roles = defaultdict(list, _group(group, lambda run: run.config["role"]))
    title = words[0] + (f" ({', '.join(words[1:])})" if words[1:] else "")
    slug = re.sub(r"[^a-z0-9.]+", "-", " ".join(words).lower()).strip("-.")
    return Variant(title, slug, roles["final"] or roles["run"], roles["trial"])


def _key(run: Record) -> tuple[str, str, str]:
    return run.config["data"], run.config["preset"], json.dumps(run.config["sizes"], sort_keys=True)


def _words(run: Record, others: Sequence[Record], several_presets: bool) -> list[str]:
    """What tells a run's variant from the others; a preset stands for its sizes."""
    config = run.config
    words = [config["experiment"]]
    if config["data"] != "real":
        words.append(f"{config['data']} data")
    if several_presets:
        words.append(config["preset"])
    alike = [
        other.config["sizes"] for other in others if other.config["preset"] == config["preset"]
    ]
    for name, value in config["sizes"].items():
        if any(sizes.get(name) != value for sizes in alike):
            label = name.replace("_", " ")
            signs = {True: label, False: f"not {label}"}
            words.append(signs[value] if isinstance(value, bool) else f"{label} {value}")
    return words


def _group(runs: Iterable[Record], key) -> dict[Any, list[Record]]:
    groups: defaultdict[Hashable, list[Record]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return dict(groups)
