"""Runs, sweeps and the command line, on synthetic data at the smallest sizes."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from lnb_experiments.data import Source
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.folder import RunError, diverged
from lnb_experiments.optimizers import (
    NORMS,
    OPTIMIZERS,
    SOLVERS,
    rate_range,
    search_rates,
    with_settings,
)
from lnb_experiments.runner import Runner, run_folder
from lnb_experiments.sweep import best, coarse, refined, sweep
from lnb_experiments.training import Plan


@pytest.fixture(autouse=True)
def standard_promotion():
    """Which optax's Adam needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def make_plan(experiment: str = "mnist", optimizer: str = "adam", **changes) -> Plan:
    kind = EXPERIMENTS[experiment].preset("tiny", **changes)
    return Plan(kind, "tiny", optimizer, 0.003, source=Source("synthetic"))


def make_runner(out: Path, resume: bool = False) -> Runner:
    return Runner(out, resume, 1e9, Console(quiet=True))


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def curve(folder: Path) -> list[tuple]:
    """All that is logged but times."""
    return [(line["step"], line["loss"], line.get("evaluation")) for line in read_log(folder)]


@pytest.mark.parametrize(
    ("experiment", "optimizer"), [("mnist", "adam"), *((name, "lnb") for name in EXPERIMENTS)]
)
def test_every_experiment_runs_from_end_to_end(experiment, optimizer, tmp_path):
    plan = make_plan(experiment, optimizer)
    (rate,) = search_rates(plan.experiment.rates.get(optimizer, OPTIMIZERS[optimizer].rates), 1)
    plan = replace(plan, learning_rate=rate)
    (result,) = make_runner(tmp_path).run([plan])
    log = read_log(run_folder(tmp_path, plan).path)
    assert [line["step"] for line in log] == list(range(1, plan.experiment.steps + 1))
    assert result["status"] == "done"
    assert result["evaluation"] == log[-1]["evaluation"]
    losses = [line["loss"] for line in log]
    assert np.mean(losses[-3:]) < losses[0]


# Each solver with the default norm, each norm with the default solver, one pair, one ablation.
EVERY = [name for name in OPTIMIZERS if name.count(":") < 2 and "+" not in name]


@pytest.mark.parametrize("optimizer", [*EVERY, "lnb:cg:network", "lnb+adam-rest"])
def test_every_optimizer_learns(optimizer, tmp_path):
    plan = make_plan("mnist", optimizer)
    (rate,) = search_rates(OPTIMIZERS[optimizer].rates, 1)
    make_runner(tmp_path).run([replace(plan, learning_rate=rate)])
    losses = [line["loss"] for line in read_log(next(tmp_path.rglob("log.jsonl")).parent)]
    assert losses[-1] < 0.9 * losses[0]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "lnb_experiments", *args]


def test_killed_run_goes_on_to_the_same_curve(tmp_path):
    """With dropout, crops and flips: everything random is a function of the seed and the step."""
    args = "run vit --preset tiny --data synthetic --optimizer lnb --steps 60".split()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    often = ["--checkpoint-seconds", "0.2"]
    subprocess.run(command(*args, "--out", str(whole)), check=True, capture_output=True)
    process = subprocess.Popen(
        command(*args, *often, "--out", str(killed)), stdout=subprocess.DEVNULL
    )
    wait_for(lambda: checkpointed(killed), process)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    folder = next(killed.rglob("config.json")).parent
    assert not (folder / "result.json").exists()
    before = len((folder / "log.jsonl").read_text().splitlines())
    assert 0 < before < 60
    subprocess.run(
        command(*args, *often, "--out", str(killed), "--resume"), check=True, capture_output=True
    )
    assert len(curve(folder)) == 60
    assert curve(folder) == curve(next(whole.rglob("config.json")).parent)


def checkpointed(out: Path) -> bool:
    files = out.glob("*/run/*/*/checkpoint.json")
    return any(json.loads(file.read_text())["step"] for file in files)


def wait_for(condition, process, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_log_that_was_cut_off_within_a_line(tmp_path):
    plan = make_plan()
    make_runner(tmp_path).run([plan])
    folder = run_folder(tmp_path, plan)
    lines = read_log(folder.path)
    text = (folder.path / "log.jsonl").read_text()
    (folder.path / "log.jsonl").write_text(text[:-20])
    assert folder.lines(len(lines) - 1) == lines[:-1]
    folder.rewind(folder.lines(2))
    assert lines[:2] == read_log(folder.path)


@pytest.mark.parametrize("ending", ["steps", "divergence"])
def test_run_killed_before_its_result_was_written(ending, tmp_path):
    plan = make_plan(steps=12)
    if ending == "divergence":
        plan = replace(make_plan(optimizer="sgd", steps=50), learning_rate=1e38)
    (result,) = make_runner(tmp_path).run([plan])
    folder = run_folder(tmp_path, plan)
    log = (folder.path / "log.jsonl").read_text()
    (folder.path / "result.json").unlink()
    (again,) = make_runner(tmp_path, resume=True).run([plan])
    assert (folder.path / "log.jsonl").read_text() == log
    assert {**again, "compile_seconds": 0} == {**result, "compile_seconds": 0}


def test_run_that_goes_on_in_another_environment(tmp_path):
    plan = make_plan(steps=2)
    make_runner(tmp_path).run([plan])
    folder = run_folder(tmp_path, plan)
    first = json.loads((folder.path / "environment.json").read_text())
    first["versions"]["jax"] = "0.9.9"
    (folder.path / "environment.json").write_text(json.dumps(first))
    (folder.path / "result.json").unlink()
    make_runner(tmp_path, resume=True).run([plan])
    both = json.loads((folder.path / "environment.json").read_text())
    assert both["versions"]["jax"] == "0.9.9"
    assert both["resumed_in"]["versions"]["jax"] == jax.__version__


def test_run_that_is_there_already(tmp_path):
    plan = make_plan(steps=2)
    first = make_runner(tmp_path).run([plan])
    with pytest.raises(RunError, match="--resume"):
        make_runner(tmp_path).run([plan])
    assert make_runner(tmp_path, resume=True).run([plan]) == first
    with pytest.raises(RunError, match="steps: 2 there, 3 now"):
        make_runner(tmp_path).run([make_plan(steps=3)])


def test_diverged_run_stops(tmp_path):
    plan = replace(make_plan(optimizer="sgd", steps=50), learning_rate=float("inf"))
    (result,) = make_runner(tmp_path).run([plan])
    assert result["status"] == "diverged"
    assert result["step"] < 50
    assert result["evaluation"]["loss"] is None  # JSON has no NaN
    assert "NaN" not in "".join(file.read_text() for file in tmp_path.rglob("*.json*"))
    (short,) = make_runner(tmp_path).run(
        [replace(plan, experiment=make_plan(steps=3).experiment, seed=1)]
    )
    assert short["status"] == "diverged"
    assert not diverged([1.0, *[float("nan")] * 9])
    assert diverged([1.0, *[float("nan")] * 10])


def test_sweep_gives_equal_trials_and_fresh_seeds(tmp_path):
    runner = make_runner(tmp_path)
    for optimizer in ("adam", "sgd"):
        sweep(runner, make_plan(optimizer=optimizer, steps=5), count=4, seeds=2)
    configs = [json.loads(file.read_text()) for file in tmp_path.rglob("config.json")]
    for optimizer in ("adam", "sgd"):
        mine = [config for config in configs if config["optimizer"] == optimizer]
        tried = [config for config in mine if config["role"] == "trial"]
        final = [config for config in mine if config["role"] == "final"]
        assert len({config["learning_rate"] for config in tried}) == len(tried) == 4
        assert {config["evaluated_on"] for config in tried} == {"held-out"}
        assert {config["evaluated_on"] for config in final} == {"test"}
        assert {config["seed"] for config in tried}.isdisjoint({c["seed"] for c in final})
        assert len(final) == 2
        assert {config["learning_rate"] for config in final} == {winner(tmp_path, optimizer)}
        assert tried[0]["examples"][0] < final[0]["examples"][0]


def winner(out: Path, optimizer: str) -> float:
    """The best rate by held-out accuracy, from the files alone."""
    results = {}
    for file in out.rglob(f"trial/{optimizer}/*/result.json"):
        config = json.loads((file.parent / "config.json").read_text())
        results[config["learning_rate"]] = json.loads(file.read_text())["evaluation"]["accuracy"]
    return max(sorted(results), key=results.__getitem__)


def test_coarse_trials_of_a_space_with_decays():
    plan = make_plan("matrix-factorization")
    assert len({(p.learning_rate, p.decay) for p in coarse(plan, 6)}) == 6
    with pytest.raises(RunError, match="too few"):
        coarse(plan, 3)


def finished(accuracy: float, loss: float | None) -> dict:
    return {"status": "done", "evaluation": {"accuracy": accuracy, "loss": loss}}


@pytest.mark.parametrize(
    ("accuracies", "rate"),
    [
        ([0.5, 0.9, 0.6], 0.032),  # to the better side
        ([0.6, 0.9, 0.5], 0.0032),
        ([0.5, 0.6, 0.9], 0.32),  # beyond the range
        ([0.9, 0.6, 0.5], 0.00032),
    ],
)
def test_refined_trial(accuracies, rate):
    plans = [replace(make_plan(), learning_rate=rate) for rate in (0.001, 0.01, 0.1)]
    results = [finished(a, 1.0) for a in accuracies]
    assert refined(plans, results).learning_rate == rate


def test_the_best_is_not_one_that_diverged():
    plans = [make_plan(), replace(make_plan(), learning_rate=1.0)]
    results = [finished(0.1, 1.0), {**finished(0.9, 1.0), "status": "diverged"}]
    assert best(plans, results) is plans[0]


def test_the_best_of_equals_has_the_lowest_loss():
    plans = [replace(make_plan(), learning_rate=rate) for rate in (0.001, 0.01, 0.1)]
    assert best(plans, [finished(1.0, 0.2), finished(1.0, 0.1), finished(0.9, 0.0)]) is plans[1]
    assert best(plans, [finished(1.0, None), finished(1.0, 0.1), finished(1.0, None)]) is plans[1]


def test_rates_of_all_forms_of_lnb():
    experiment = EXPERIMENTS["matrix-factorization"].preset("tiny")
    assert rate_range(experiment, "lnb:cg:neuron") == rate_range(experiment, "lnb") == (1.0, 100.0)
    assert rate_range(EXPERIMENTS["mnist"].preset("tiny"), "lnb:neuron") == (0.01, 1.0)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot make the folder .*file.* --out"):
        make_runner(tmp_path / "file").run([make_plan(steps=2)])


def test_search_rates():
    assert search_rates((1e-4, 1e-2), 5) == [1e-4, 3.2e-4, 1e-3, 3.2e-3, 1e-2]
    assert search_rates((1e-4, 1e-2), 1) == [1e-3]


# The command line


def lnb(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args), capture_output=True, text=True, **options)


def test_list_names_everything():
    output = lnb("list", env={**os.environ, "COLUMNS": "200"})
    assert output.returncode == 0, output.stderr
    names = [name for name in OPTIMIZERS if not {":", "+"} & {*name}]
    for name in (*EXPERIMENTS, *names, *SOLVERS, *NORMS, "laptop", "arena", "paper"):
        assert name in output.stdout


def test_run_and_report(tmp_path):
    args = "run mnist --inverted --preset tiny --data synthetic --steps 4".split()
    args += "--optimizer adam sgd --seeds 2 --learning-rate 0.01 --out".split()
    assert lnb(*args, str(tmp_path)).returncode == 0
    assert len(list(tmp_path.glob("mnist-inverted/run/*/*/result.json"))) == 4
    output = lnb("report", str(tmp_path))
    assert output.returncode == 0, output.stderr
    assert (tmp_path / "report" / "index.html").exists()
    assert lnb(*args, str(tmp_path), "--held-out", "--seeds", "1").returncode == 0
    (config, *_) = tmp_path.glob("mnist-inverted/trial/*/*/config.json")
    assert json.loads(config.read_text())["evaluated_on"] == "held-out"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("run mnist --data-dir nowhere", "nowhere"),
        ("run vit --inverted --data synthetic", "--inverted is an option of mnist, not of vit"),
        ("run mnist --steps 0 --data synthetic", "--steps should be at least 1, not 0"),
        ("run mnist --learning-rate nan --data synthetic", "--learning-rate"),
        ("run mnist --seeds 0 --data synthetic", "--seeds"),
        ("run mnist --optimizer lnb:adam --data synthetic", "woodbury"),
        ("sweep mnist --trials 1 --data synthetic", "--trials should be at least 2"),
        ("run mnist --preset tiny --batch-size 100000 --data synthetic", "100,000"),
        ("run mnist --optimizer adam --clip 1 --data synthetic", "settings of lnb"),
        ("run mnist --damping 0 --data synthetic", "--damping should be positive"),
        ("run nothing", "matrix-factorization"),
        ("report nowhere", "nowhere"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(args, message, tmp_path):
    output = lnb(*args.split(), cwd=tmp_path)
    assert output.returncode != 0
    assert message in output.stderr + output.stdout
    assert "Traceback" not in output.stderr


def test_without_the_extra(tmp_path):
    """A folder in front of the path hides tyro as if it were not installed."""
    code = (
        "import sys; sys.modules['tyro'] = None\nfrom lnb_experiments.__main__ import main; main()"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.returncode == 1
    assert "tyro" in output.stderr
    assert "pip install 'lnb[experiments]'" in output.stderr


def test_damping_and_clipping_change_the_run_and_its_name(tmp_path):
    names = "algorithm2", "algorithm2@damping=9", "algorithm2@clip=0.0001"
    assert with_settings("algorithm2", damping=9.0, clip=None) == names[1]
    curves = []
    for name in names:
        plan = replace(make_plan(optimizer=name, steps=4), learning_rate=0.1)
        make_runner(tmp_path).run([plan])
        curves.append([loss for _, loss, *_ in curve(run_folder(tmp_path, plan).path)])
    assert [found[0] for found in curves] == [curves[0][0]] * 3
    assert len({found[-1] for found in curves}) == 3
