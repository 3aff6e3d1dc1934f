"""The arena: what counts as reaching a target, who is ahead, and a small one from end to end."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lnb_experiments.arena.published import publish, published
from lnb_experiments.arena.report import place, report_arena
from lnb_experiments.arena.scores import (
    Contest,
    Entrant,
    contests,
    geometric_mean,
    lowest,
    p_value,
    profile,
    reach,
    speedup,
)
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.optimizers import OPTIMIZERS
from lnb_experiments.records import Record, RecordError, Series
from lnb_experiments.training import WARM_UP, Plan


def record(
    losses, optimizer="adamw", role="final", rate=0.01, seconds_a_step=0.5, seed=1, steps=None
):
    """A run of 10 steps for each of these test losses, evaluated every 10.

    It diverges then, if it was to have more steps.
    """
    step = 10.0 * np.arange(1, len(losses) + 1)
    every = np.arange(1.0, step[-1] + 1)
    config = {
        "experiment": "mnist",
        "optimizer": optimizer,
        "role": role,
        "learning_rate": rate,
        "seed": seed,
        "sizes": {"steps": steps or int(step[-1])},
    }
    return Record(
        Path("run"),
        config,
        {},
        Series(every, every, seconds_a_step * every, {"loss": every}),
        Series(step, step, seconds_a_step * step, {"loss": np.array(losses, float)}),
        {"status": "done", "compile_seconds": 1.0},
    )


def test_reach_is_between_two_evaluations():
    run = record([4, 2, 1, 1.5])
    assert reach(run, 2.0, "step") == 20
    assert reach(run, 3.0, "step") == 15
    assert reach(run, 3.0, "seconds") == 7.5
    assert reach(run, 5.0, "step") == 10  # before the first evaluation: no later than it
    assert reach(run, 0.5, "step") == math.inf


def test_a_loss_that_is_not_finite_is_no_success():
    run = record([math.nan, 2, math.nan, 1])
    assert reach(run, 2.0, "step") == 20
    assert reach(run, 1.0, "step") == 40
    assert lowest(run, 0.5) == 2
    assert lowest(record([math.nan])) == math.inf


def test_targets_are_medians_of_the_baselines_lowest_losses():
    seeds = [[5, 4, 3, 2, 3], [6, 5, 4, 3, 2.5], [7, 6, 5, 4, 1]]
    runs = [record(losses, seed=seed) for seed, losses in enumerate(seeds, 1)]
    trial = record([1, 1, 1, 1, 1], role="trial")
    (contest,) = contests([*runs, trial])
    assert contest.targets == (4, 2)
    assert contest.entrants["adamw"].trials == [trial]
    assert contest.entrants["adamw"].cost(2, "step") == pytest.approx(140 / 3)
    assert contest.entrants["adamw"].reach(2, "step")[1] == math.inf


def test_runs_at_other_rates_than_the_untuned_one_are_left_out():
    runs = [record([2, 1]), record([2, 1], "lnb", "run", 0.02), record([2, 1], "lnb", "run", 0.5)]
    (contest,) = contests(runs)
    assert set(contest.entrants) == {"adamw", "lnb untuned"}
    assert len(contest.entrants["lnb untuned"].runs) == 1
    with pytest.raises(RecordError, match="adamw yet"):
        contests(runs[1:])


def test_runs_that_differ_are_not_compared():
    with pytest.raises(RecordError, match="differ in sizes"):
        contests([record([2, 1]), record([2, 1, 1])])
    with pytest.raises(RecordError, match="differ in learning_rate"):
        contests([record([2, 1]), record([2, 1], rate=0.02)])


def test_a_run_that_diverged_is_not_fast():
    broken = Entrant("broken", [record([4, math.nan], steps=1000)], [])
    steady = Entrant("steady", [record([4, 3, 2, 1], steps=40)], [])
    contest = Contest("mnist", {"broken": broken, "steady": steady}, (1.0, 1.0))
    assert broken.least_cost(1.0, "step") == 1000
    assert speedup([contest], "broken", "steady", 0, "step") == {"mnist": 0.04}


def test_one_that_misses_is_not_ahead():
    quick = Entrant("quick", [record([4, 3], seconds_a_step=0.01)], [])
    steady = Entrant("steady", [record([4, 3, 2, 1])], [])
    contest = Contest("mnist", {"quick": quick, "steady": steady}, (1.0, 1.0))
    assert speedup([contest], "quick", "steady", 0, "seconds") == {"mnist": 1.0}
    assert speedup([contest], "steady", "quick", 0, "seconds") == {"mnist": 1.0}


def test_most_seeds_of_the_baseline_reach_their_own_target():
    (contest,) = contests([record([2, 1]), record([2, 1.5], seed=2)])
    assert contest.targets[-1] == 1.5
    assert not contest.entrants["adamw"].misses(1.5)


def test_speedup_counts_a_miss_with_its_whole_length():
    slow = Entrant("slow", [record([4, 3, 2, 2])], [])
    fast = Entrant("fast", [record([1, 1, 1, 1], seconds_a_step=1.0)], [])
    contest = Contest("mnist", {"slow": slow, "fast": fast}, (2.0, 1.0))
    assert speedup([contest], "fast", "slow", 0, "step") == {"mnist": 3.0}
    assert speedup([contest], "fast", "slow", 0, "seconds") == {"mnist": 1.5}
    assert speedup([contest], "fast", "slow", 1, "step") == {"mnist": 4.0}
    assert slow.cost(1.0, "step") == math.inf


def test_places():
    trial = [record([1], role="trial")]
    costs = {"a": [4, 1, 1], "b": [4, 4, 1], "c": [4, 4, 4], "d": [4, 4, 4]}
    entrants = {name: Entrant(name, [record(losses)], trial) for name, losses in costs.items()}
    contest = Contest("mnist", entrants, (1.0, 1.0))
    assert [place(contest, name) for name in "abcd"] == [1, 2, 4, 4]


def test_profile():
    costs = {"a": {"x": 1.0, "y": 4.0}, "b": {"x": 2.0, "y": 2.0}, "c": {"x": 3.0, "y": math.inf}}
    shares = profile(costs, np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(shares["a"], [0.5, 1, 1])
    np.testing.assert_array_equal(shares["b"], [0.5, 1, 1])
    np.testing.assert_array_equal(shares["c"], [0, 0, 0.5])


def test_nobody_is_best_where_all_miss():
    shares = profile({"a": {"x": math.inf}, "b": {"x": math.inf}}, np.array([1.0, 100.0]))
    np.testing.assert_array_equal(shares["a"], [0, 0])


def test_p_value_is_exact():
    assert p_value([2.0] * 5) == 2 / 32  # all signs alike: two of the 32 are as far from 1
    assert p_value([2.0, 0.5]) == 1
    assert geometric_mean([2.0, 0.5]) == pytest.approx(1)


def test_cosine_schedule():
    experiment = EXPERIMENTS["mnist"].preset("tiny", steps=200)
    plan = Plan(experiment, "tiny", "adamw", 0.1, schedule="cosine")
    rates = np.array([plan.rate(step) for step in range(1, 201)])
    warm = int(WARM_UP * 200)
    assert rates[0] == pytest.approx(0.1 / warm)
    assert rates.argmax() == warm - 1
    assert rates[100] == pytest.approx(0.05)
    assert 0 < rates[-1] < 1e-4
    assert all(np.diff(rates[warm:]) < 0)


def test_entries_exist():
    from lnb_experiments.arena.entries import CONTESTANTS, FEW_WORKLOADS, FURTHER, WORKLOADS

    assert set(CONTESTANTS) | set(FURTHER) <= OPTIMIZERS.keys()
    assert set(FEW_WORKLOADS) <= WORKLOADS.keys() <= EXPERIMENTS.keys()
    assert sum(workload.develops for workload in WORKLOADS.values()) * 2 == len(WORKLOADS)
    for name in WORKLOADS:
        assert EXPERIMENTS[name].preset("arena").steps >= 300


def lnb(*arguments, cwd):
    command = [sys.executable, "-m", "lnb_experiments", "arena", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ)


def test_a_small_arena_runs_reports_and_goes_on(tmp_path):
    arguments = (
        "--workload mnist --optimizer sgd --preset tiny --data synthetic --trials 3 --seeds 1 "
        "--out runs"
    ).split()
    first = lnb(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "[2/2]" in first.stdout
    page = (tmp_path / "runs/report/arena.md").read_text()
    assert "| sgd |" in page
    assert "| adamw |" in page
    assert (tmp_path / "runs/report/arena-profiles.png").stat().st_size > 1000
    if hasattr(os, "sched_setaffinity"):
        files = list(tmp_path.rglob("environment.json"))
        assert {json.loads(file.read_text())["cores"] for file in files} == {1}
    logs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.jsonl")}
    assert len(logs) == 2 * (3 + 1)
    again = lnb(*arguments, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.jsonl")} == logs
    # On another machine, from what was published: only what is new is run.
    arguments = ["--known", "runs/report", *arguments[:-1], "elsewhere"]
    known = lnb(*arguments, "--optimizer", "adam", cwd=tmp_path)
    assert known.returncode == 0, known.stderr
    assert "[1/1] mnist with adam: done" in known.stdout
    whole = (tmp_path / "elsewhere/report/arena.md").read_text()
    rows = lambda page: [line for line in page.splitlines() if line.startswith("| sgd |")]
    assert rows(whole)[-1] == rows(page)[-1]
    assert "| adam |" in whole
    # A run that is both known and in the folder is one run.
    report_arena(tmp_path / "runs", tmp_path / "twice", tmp_path / "runs/report")
    count = lambda folder: len((tmp_path / folder / "mnist.jsonl").read_text().splitlines())
    assert count("twice") == count("runs/report") == 2 * (3 + 1)


def test_published_runs_are_the_same_runs(tmp_path):
    ending = {"status": "done", "step": 30, "seconds": 15.0}
    run = replace(record([4, math.nan, 1]), result=ending)
    publish([run, replace(run, result=None)], tmp_path)
    (read,) = published(tmp_path)
    assert (read.config, read.result, read.last_step) == (run.config, run.result, 30)
    assert reach(read, 1.0, "seconds") == reach(run, 1.0, "seconds")
    assert Entrant("adamw", [read], []).milliseconds == Entrant("adamw", [run], []).milliseconds
    with (tmp_path / "mnist.jsonl").open("a") as file:
        file.write("{}")
    with pytest.raises(RecordError, match=r"mnist.jsonl, line 2, is not a run \(KeyError"):
        published(tmp_path)


def test_dry_run_prints_commands(tmp_path):
    result = lnb("--workload", "mnist", "--optimizer", "lnb", "--dry-run", cwd=tmp_path)
    lines = result.stdout.splitlines()
    assert lines[0].startswith("lnb sweep mnist --preset arena --optimizer adamw --judge loss")
    assert lines[2].startswith("lnb run mnist --preset arena --optimizer lnb --learning-rate 0.02")
    assert not list(tmp_path.iterdir())


def test_unknown_workload(tmp_path):
    result = lnb("--workload", "minst", cwd=tmp_path)
    assert result.returncode != 0
    assert "There is no workload 'minst'. There are mnist," in result.stderr
