"""The benchmarks run from end to end, on a network that takes no time."""

import io
import json
from functools import partial

import jax
import pytest
from rich.console import Console

from benchmarks.cli import Bench
from benchmarks.contenders import CONTENDERS
from benchmarks.workloads import WORKLOADS, Target, perceptron

TINY = "tiny MLP"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Optax's own optimizers rely on the usual promotion of dtypes."""
    monkeypatch.setitem(WORKLOADS, TINY, (partial(perceptron, (6, 9, 3), 40), Target(9, 9)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(**settings) -> str:
    output = io.StringIO()
    Bench(workload=(TINY,), **settings)(Console(width=150, file=output))
    return output.getvalue()


def test_steps(tmp_path):
    names = tuple(CONTENDERS)[:3]
    files = tmp_path / "costs.json", tmp_path / "costs.png"
    text = run(optimizer=names, blocks=1, json=files[0], chart=files[1])
    assert all(name in text for name in (*names, "its targets"))
    costs = json.loads(files[0].read_text())["costs"]
    assert [cost["optimizer"] for cost in costs] == list(names)
    assert all(cost["flops"] > 0 and len(cost["seconds"]) == 1 for cost in costs)
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_charts_of_no_known_kind_are_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(SystemExit, match=r"chart.nope.*\.png"):
        run(chart=tmp_path / "chart.nope")


def test_growth_has_networks_of_its_own():
    with pytest.raises(SystemExit, match="leave --workload and --optimizer out"):
        run(mode="growth")


def test_names_that_are_not_known():
    with pytest.raises(SystemExit, match="no optimizer is called 'adma'"):
        run(optimizer=("adma",))
