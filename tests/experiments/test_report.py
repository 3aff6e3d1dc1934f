"""The report of runs of known numbers, against what the standard library makes of them."""

import json
import math
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
from matplotlib.lines import Line2D
from written_runs import EVERY, PER_EPOCH, STEPS, loss, make_run, make_trials, score

from lnb_experiments.records import RecordError, find_runs, read_run
from lnb_experiments.report import report
from lnb_experiments.report.curves import running_mean
from lnb_experiments.report.figures import Look, curves_figure, search_figure
from lnb_experiments.report.search import search
from lnb_experiments.report.table import table
from lnb_experiments.report.variants import variants


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The cells of the first variant's table, by optimizer and column."""
    variant, *_ = variants(find_runs(folder))
    content = table(variant)
    return {row[0]: dict(zip(content.columns, row, strict=True)) for row in content.rows}


def points(line: Line2D) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def test_cells_of_several_seeds(tmp_path):
    seeds, speeds = (1, 2, 4), {"adam": 0.05, "lnb": 0.2}
    for seed in seeds:
        make_run(tmp_path / f"a{seed}", speeds["adam"], seed=seed, milliseconds=10 + seed)
        make_run(
            tmp_path / f"l{seed}", speeds["lnb"], seed=seed, optimizer="lnb", milliseconds=seed * 30
        )
    cells = rows(tmp_path)
    target = statistics.median(score(STEPS, speeds["adam"], seed) for seed in seeds)
    for name, speed in speeds.items():
        finals = [score(STEPS, speed, seed) for seed in seeds]
        expected = f"{statistics.mean(finals):.4g} ({min(finals):.4g} to {max(finals):.4g}; n = 3)"
        assert cells[name]["accuracy ↑"] == expected
        ends = [statistics.mean(loss(step, speed, seed) for step in (39, 40)) for seed in seeds]
        expected = f"{statistics.mean(ends):.4g} ({min(ends):.4g} to {max(ends):.4g}; n = 3)"
        assert cells[name]["training loss ↓"] == expected
        steps = next(
            step
            for step in range(0, STEPS + 1, EVERY)
            if statistics.median(score(step, speed, seed) for seed in seeds) >= target
        )
        seconds = steps * {"adam": 12, "lnb": 60}[name] / 1e3
        expected = f"{steps} ({steps / PER_EPOCH:.3g} epochs, {seconds:.3g} s)"
        assert cells[name][f"steps to accuracy {target:.4g}"] == expected
        assert cells[name]["loading"] == "12.5%"
        assert cells[name]["seeds"] == "3"
        assert cells[name]["runs"] == "3 done"
    assert [cells[name]["ms a step"] for name in ("adam", "lnb")] == ["12", "60"]
    assert [cells[name]["x Adam's"] for name in ("adam", "lnb")] == ["1.00", "5.00"]


def test_smaller_is_better(tmp_path):
    changes = {"headline": "loss", "larger_is_better": False}
    make_run(tmp_path / "a", **changes)
    make_run(tmp_path / "b", optimizer="lnb", **changes)
    cells = rows(tmp_path)
    assert cells["lnb"]["loss ↓"] == "1 (n = 1)"
    assert cells["lnb"]["steps to loss 1"] == "0 (0 epochs, 0 s)"


def test_trials(tmp_path):
    make_trials(tmp_path, "adam", {0.001: 0.05, 0.01: 0.2, 0.1: 0.1})
    make_trials(tmp_path, "lnb", {0.01: 0.05, 0.03: 0.2, 0.1: None})
    make_trials(tmp_path, "muon", {0.01: 0.05, 0.03: 0.2})
    make_trials(tmp_path, "sgd", {0.01: 0.2, 0.03: 0.05})
    make_trials(tmp_path, "kfac", {0.01: 0.2})
    make_run(tmp_path / "final", 0.05, learning_rate=0.01, role="final")
    make_run(tmp_path / "run", 0.3, learning_rate=0.5)
    cells = rows(tmp_path)
    assert {name: row["trials"] for name, row in cells.items()} == {
        "adam": "3", "lnb": "3 (1 diverged)", "muon": "2", "sgd": "2", "kfac": "1"
    }  # fmt: skip
    assert {name: row["best rate"] for name, row in cells.items()} == {
        "adam": "0.01 (of 0.001 to 0.1)",
        "lnb": "0.03 (of 0.01 to 0.1)",  # what diverged was searched as well
        "muon": "⚠ 0.03 (upper edge of 0.01 to 0.03)",
        "sgd": "⚠ 0.01 (lower edge of 0.01 to 0.03)",
        "kfac": "⚠ 0.01 (the only one tried)",
    }
    # Trials are in no other column, and runs beside a search are shown by themselves.
    assert cells["adam"]["accuracy ↑"] == f"{score(STEPS, 0.05, 1):.4g} (n = 1)"
    assert cells["lnb"]["accuracy ↑"] == "-"
    variant, single = variants(find_runs(tmp_path))
    assert single.title == f"{variant.title} (single runs)"
    assert [entry.rate for entry in single.entries] == [0.5]
    assert [line.get_label() for line in curves_figure(variant, Look(["adam"])).axes[0].lines] == [
        "adam, rate 0.01 (1 seed)"
    ]


def test_trials_figure(tmp_path):
    make_trials(tmp_path, "lnb", {0.01: 0.05, 0.03: 0.2, 0.1: None})
    [variant] = variants(find_runs(tmp_path))
    curve, circle = search_figure(variant, Look(["lnb"])).axes[0].lines
    expected = [score(STEPS, 0.05, 1), score(STEPS, 0.2, 1), math.nan]
    np.testing.assert_allclose(points(curve)[1], expected)
    assert points(circle)[0].tolist() == [0.03]
    [cross] = search_figure(variant, Look(["lnb"])).axes[1].lines
    assert np.asarray(cross.get_xdata()).tolist() == [0.1]
    assert search(variant, "lnb").edge is None


def test_curves_are_medians(tmp_path):
    for seed in (1, 2, 4):
        make_run(tmp_path / f"{seed}", seed=seed, optimizer="lnb", milliseconds=seed)
    [variant] = variants(find_runs(tmp_path))
    epochs, seconds, *metrics = curves_figure(variant, Look(["lnb", "adam"])).axes
    assert epochs.get_yscale() == "log"  # from 1.8 to 0.06
    for axes, x in zip((epochs, seconds), (1 / PER_EPOCH, 2e-3), strict=True):
        [line] = axes.lines
        assert line.get_color() == "tab:red"
        np.testing.assert_allclose(points(line)[0], x * np.arange(1, STEPS + 1))
        expected = [loss(step, 0.1, 2) for step in range(1, STEPS + 1)]
        np.testing.assert_allclose(points(line)[1], expected)  # a window of one
    for axes in metrics:
        expected = [score(step, 0.1, 2) for step in range(0, STEPS + 1, EVERY)]
        np.testing.assert_allclose(points(axes.lines[0])[1], expected)


def test_running_mean():
    values = np.array([1.0, 3.0, 5.0, 7.0, 100.0])
    np.testing.assert_allclose(running_mean(values, 3), [1, 2, 3, 5, 112 / 3])


def test_looks_are_distinct():
    names = ["adam", "lnb", "lnb:cg", "muon", "sgd", "kfac", "foof", "prong", "locoprop", "adamw"]
    look = Look(names)
    assert len({look[name][0] for name in names}) == len(names)
    assert look["lnb"][0] == Look(["x", "lnb"])["lnb"][0] == "tab:red"


def test_unfinished_run_with_a_line_cut_off(tmp_path):
    make_run(tmp_path / "1", seed=1)
    cut = make_run(tmp_path / "2", seed=2, steps=25, status=None)
    with (cut / "log.jsonl").open("a") as log:
        log.write('{"step": 26, "epoch": 1.3, "loss": 0.1, "evaluation": {"loss": 2.0}')
    assert read_run(cut).last_step == 25
    cells = rows(tmp_path)["adam"]
    assert cells["runs"] == "1 done (seed 2 unfinished at 25 of 40)"
    assert cells["seeds"] == "2"
    assert cells["accuracy ↑"] == f"{score(STEPS, 0.1, 1):.4g} (n = 1)"


def test_run_killed_before_its_first_step(tmp_path):
    (make_run(tmp_path / "1", status=None) / "log.jsonl").unlink()
    assert rows(tmp_path)["adam"]["runs"] == "0 done (seed 1 unfinished at 0 of 40)"
    assert report(tmp_path).exists()


def test_losses_that_are_not_finite(tmp_path):
    make_run(tmp_path / "1", seed=1)
    bad = make_run(tmp_path / "2", seed=2, steps=20, status="diverged")
    lines = [json.loads(line) for line in (bad / "log.jsonl").read_text().splitlines()]
    lines[19]["loss"], lines[20]["loss"] = math.inf, math.nan
    lines[20]["evaluation"]["accuracy"] = math.nan
    (bad / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "NaN" in (bad / "log.jsonl").read_text()
    cells = rows(tmp_path)["adam"]
    assert cells["runs"] == "1 done (seed 2 diverged at 20 of 40)"
    assert cells["accuracy ↑"] == f"{score(STEPS, 0.1, 1):.4g} (n = 1)"
    shutil.rmtree(tmp_path / "1")
    assert rows(tmp_path)["adam"]["accuracy ↑"] == "-"
    assert report(tmp_path).exists()


@pytest.mark.parametrize("bad", ['{"step": 1, "epo', "[1, 2]", '{"step": 7, "epoch": 0.1}', ""])
def test_bad_line_is_named(tmp_path, bad):
    folder = make_run(tmp_path / "1")
    lines = (folder / "log.jsonl").read_text().splitlines()
    lines[3] = bad
    (folder / "log.jsonl").write_text("\n".join(lines))
    with pytest.raises(RecordError, match=r"log\.jsonl, line 4 "):
        read_run(folder)


def test_nothing_to_report(tmp_path):
    with pytest.raises(RecordError, match="holds no run"):
        report(tmp_path)
    with pytest.raises(RecordError, match="is no folder"):
        report(tmp_path / "missing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RecordError, match=r"config\.json lacks experiment"):
        report(tmp_path)


def test_variants(tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", inverted=True, optimizer="lnb")
    make_run(tmp_path / "c", data="synthetic")
    make_run(tmp_path / "d", preset="paper", batch_size=1000)
    make_run(tmp_path / "e", experiment="vit")
    found = {variant.slug: variant.title for variant in variants(find_runs(tmp_path))}
    assert found == {
        "mnist-laptop-not-inverted": "mnist (laptop, not inverted)",
        "mnist-laptop-inverted": "mnist (laptop, inverted)",
        "mnist-paper": "mnist (paper)",
        "mnist-synthetic-data-laptop-not-inverted": "mnist (synthetic data, laptop, not inverted)",
        "vit": "vit",
    }


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"status": "do', "\udcff{}"])
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_damaged_file_is_named(tmp_path, name, content):
    file = make_run(tmp_path / "1") / name
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(RecordError, match=rf"{file} (is|holds|lacks) .*move {file.parent} away"):
        report(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_missing_file_is_named(tmp_path, name):
    (make_run(tmp_path / "1") / name).unlink()
    with pytest.raises(RecordError, match=rf"{name} cannot be read: No such file"):
        report(tmp_path)


@pytest.mark.parametrize("kept", [slice(20), slice(0), slice(0, None, 2)])
def test_log_that_lacks_steps_of_a_finished_run(tmp_path, kept):
    log = make_run(tmp_path / "1") / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[kept]))
    with pytest.raises(RecordError, match=rf"log\.jsonl lacks step \d+, .* step {STEPS}\."):
        report(tmp_path)
