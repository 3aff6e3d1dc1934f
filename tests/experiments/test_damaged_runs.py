"""Run folders that a kill, a disk or a person left damaged: they go on to the same curve, or are
refused with the name of the file, and nothing in them is changed."""

import json
import shutil
import sys
from pathlib import Path

import jax
import orbax.checkpoint as ocp
import pytest
from rich.console import Console

from lnb_experiments import cli
from lnb_experiments.data import Source
from lnb_experiments.experiments import EXPERIMENTS
from lnb_experiments.folder import RunFolder
from lnb_experiments.records import RecordError, read_run
from lnb_experiments.report import report
from lnb_experiments.runner import Runner, run_folder
from lnb_experiments.training import Plan

STEPS, KILLED = 10, 8
ADAM = EXPERIMENTS["mnist"].preset("tiny", steps=STEPS)
PLAN = Plan(ADAM, "tiny", "adam", 0.003, source=Source("synthetic"))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Which optax's Adam needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Killed(BaseException):
    """Stands for a signal that ends the process: nothing after it happens."""


def run(out: Path, resume: bool = False) -> Path:
    """A run with a checkpoint after each step; its folder."""
    Runner(out, resume, 0.0, Console(quiet=True)).run([PLAN])
    return run_folder(out, PLAN).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    with jax.numpy_dtype_promotion("standard"):
        return run(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """All runs of one that was killed when a step was logged, and its checkpoint not yet begun."""
    out = tmp_path_factory.mktemp("killed")
    append = RunFolder.append

    def append_and_kill(self, line):
        append(self, line)
        if line["step"] == KILLED:
            raise Killed

    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "append", append_and_kill)
        with pytest.raises(Killed):
            run(out)
    return out


@pytest.fixture
def out(killed, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(killed, tmp_path / "runs"))


@pytest.fixture
def folder(out) -> Path:
    return run_folder(out, PLAN).path


def curve(folder: Path) -> list[tuple]:
    """All that is logged but times."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line.get("evaluation")) for line in lines]


def files(out: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def refused(out: Path, message: str) -> str:
    """Asserts that a run is refused, that the message is right, and that no file changed."""
    before = files(out)
    with pytest.raises(RecordError, match=message) as caught:
        run(out, resume=True)
    assert files(out) == before
    assert "move" in str(caught.value)  # what to do
    return str(caught.value)


# The log and the checkpoint


def test_a_log_longer_than_the_checkpoint_goes_on_to_the_same_curve(out, folder, whole):
    assert len(curve(folder)) == KILLED
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == KILLED - 1
    run(out, resume=True)
    assert curve(folder) == curve(whole)


def test_a_last_line_cut_off_goes_on_to_the_same_curve(out, folder, whole):
    log = folder / "log.jsonl"
    log.write_text(log.read_text()[:-20])
    run(out, resume=True)
    assert curve(folder) == curve(whole)


@pytest.mark.parametrize(
    ("lines", "missing"),
    [(slice(5), 6), (slice(0), 1), (slice(1, None), 1), (slice(None, None, 2), 2)],
    ids=["cut short", "empty", "without the first", "every other"],
)
def test_a_log_that_lacks_steps_of_the_checkpoint_is_refused(out, folder, lines, missing):
    log = folder / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[lines]))
    refused(out, rf"log\.jsonl lacks step {missing}")


def test_a_log_cut_within_a_line_of_the_checkpoint_is_refused(out, folder):
    log = folder / "log.jsonl"
    log.write_text("\n".join(log.read_text().splitlines()[: KILLED - 1])[:-20])
    refused(out, rf"log\.jsonl lacks step {KILLED - 1}")


def test_a_log_that_is_missing_is_refused(out, folder):
    (folder / "log.jsonl").unlink()
    refused(out, r"log\.jsonl lacks step 1")


def test_a_finished_run_with_a_log_cut_short_is_refused(whole, tmp_path):
    out = Path(shutil.copytree(whole.parents[3], tmp_path / "runs"))
    log = run_folder(out, PLAN).path / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:5]))
    refused(out, r"log\.jsonl lacks step 6")
    with pytest.raises(RecordError, match=r"log\.jsonl lacks step 6"):
        report(out)


# Checkpoints


def test_every_byte_of_a_checkpoint_counts(out, folder):
    written = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    assert len(written) > 5
    for path in written:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        good = path.read_bytes()
        path.write_bytes(content)
        assert str(path) in refused(out, "SHA-256")
        path.write_bytes(good)


def test_every_file_of_a_checkpoint_is_needed(out, folder, tmp_path):
    written = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    for path in written:
        path.rename(tmp_path / "aside")
        assert str(path) in refused(out, "is missing")
        (tmp_path / "aside").rename(path)
    shutil.rmtree(folder / "checkpoints")
    refused(out, r"checkpoints.* is missing")


def test_a_checkpoint_without_its_checksums_is_refused(out, folder):
    """As of a folder that was written before there were any."""
    manifest = folder / "checkpoint.json"
    text = manifest.read_text()
    manifest.unlink()
    refused(out, r"checkpoint\.json is missing")
    for step in (0, KILLED - 2, KILLED):
        manifest.write_text(text.replace(f'"step": {KILLED - 1}', f'"step": {step}'))
        refused(out, "is missing")


@pytest.mark.parametrize("step", [1, 5])
def test_killed_between_a_checkpoint_and_its_checksums(step, whole, tmp_path, monkeypatch):
    write = RunFolder.write

    def write_or_kill(self, name, content):
        if name == "checkpoint.json" and content["step"] == step:
            raise Killed
        write(self, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", write_or_kill)
        with pytest.raises(Killed):
            run(tmp_path)
    folder = run_folder(tmp_path, PLAN).path
    assert json.loads((folder / "checkpoint.json").read_text())["step"] == step - 1
    assert (folder / "checkpoints" / str(step)).exists()
    assert curve(run(tmp_path, resume=True)) == curve(whole)


def test_killed_while_an_old_checkpoint_was_removed(whole, tmp_path, monkeypatch):
    def remove_half_and_kill(self, step):
        shutil.rmtree(self.directory / str(step) / "default")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "delete", remove_half_and_kill)
        with pytest.raises(Killed):
            run(tmp_path)
    folder = run(tmp_path, resume=True)
    assert curve(folder) == curve(whole)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(STEPS)]


def test_killed_before_the_configuration_was_written(out, folder, whole):
    for path in folder.iterdir():
        if path.name != "environment.json":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    run(out, resume=True)
    assert curve(folder) == curve(whole)


# What the commands say

COMMAND = "mnist --preset tiny --data synthetic --steps 4 --optimizer adam --checkpoint-seconds 0"
COMMANDS = {"run": "--learning-rate 0.01 --seeds 1", "sweep": "--trials 2 --seeds 1"}


def lnb(monkeypatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["lnb", *args])
    cli.main()


def failure(monkeypatch, *args: str) -> str:
    """What a command says when it fails."""
    with pytest.raises(SystemExit) as end:
        lnb(monkeypatch, *args)
    assert isinstance(end.value.code, str)  # Python writes it to stderr; the exit status is 1
    return end.value.code


@pytest.fixture(scope="module", params=COMMANDS)
def commanded(request, tmp_path_factory) -> tuple[list[str], Path]:
    """A command and the runs that it left behind."""
    out = tmp_path_factory.mktemp(request.param)
    args = [request.param, *COMMAND.split(), *COMMANDS[request.param].split(), "--resume", "--out"]
    with jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        lnb(patch, *args, str(out))
    return args, out


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def garble(file: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b"\x00\xff garbage {\n", *lines[2:]]))


def falsify(file: Path) -> None:
    file.write_text(file.read_text().replace('"step": 2', '"step": "two"'))


DAMAGES = {
    "truncated config": (truncate, "config.json"),
    "empty config": (lambda file: file.write_text(""), "config.json"),
    "config of nothing": (lambda file: file.write_text("{}"), "config.json"),
    "config missing": (Path.unlink, "config.json"),
    "truncated environment": (truncate, "environment.json"),
    "environment missing": (Path.unlink, "environment.json"),
    "truncated result": (truncate, "result.json"),
    "empty result": (lambda file: file.write_text(""), "result.json"),
    "result of nothing": (lambda file: file.write_text("{}"), "result.json"),
    "garbage in the log": (garble, "log.jsonl"),
    "a step of another type": (falsify, "log.jsonl"),
}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(damage, finished, commanded, tmp_path, monkeypatch):
    """By the same command with --resume, and by `lnb report`."""
    args, made = commanded
    out = Path(shutil.copytree(made, tmp_path / "runs"))
    change, name = DAMAGES[damage]
    folder = sorted(file.parent for file in out.rglob("config.json"))[0]
    if name != "result.json" and not finished:
        (folder / "result.json").unlink()
    change(folder / name)
    before = files(out)
    for command in ([*args, str(out)], ["report", str(out)]):
        message = failure(monkeypatch, *command)
        assert str(folder / name) in message
        assert f"move {folder} away" in message
        assert files(out) == before


def test_a_damaged_checkpoint_is_named(commanded, tmp_path, monkeypatch):
    args, made = commanded
    out = Path(shutil.copytree(made, tmp_path / "runs"))
    file = next(out.rglob("checkpoint*/*/default/_METADATA"))
    folder = file.parents[3]
    (folder / "result.json").unlink()
    file.unlink()
    before = files(out)
    message = failure(monkeypatch, *args, str(out))
    assert str(file) in message
    assert f"move {folder} away" in message
    assert files(out) == before


def test_the_reader_and_the_runner_agree(out, folder):
    assert read_run(folder).last_step == KILLED
    run(out, resume=True)
    assert read_run(folder).status == "done"
