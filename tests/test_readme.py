"""Runs the Python in the README and in the guide, each from top to bottom in one namespace."""

import pathlib
import re
import runpy

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"
GUIDE = ROOT / "docs" / "guide.md"


def python_blocks(text: str, sign: str = "+"):
    """The fenced Python, each block after as many empty lines as stand above it in the file.

    A block that shows a difference is read with the lines of one sign.
    """
    for block in re.finditer(r"^```(python|diff)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        code = block[2]
        if block[1] == "diff":
            lines = code.splitlines()
            code = "\n".join(line[1:] for line in lines if line[:1] in (sign, " ", ""))
        yield "\n" * text.count("\n", 0, block.start(2)) + code


def run(path: pathlib.Path, sign: str = "+", first: int | None = None) -> dict:
    """Runs the blocks, or the first few of them, with JAX's own settings, as users have them."""
    blocks = list(python_blocks(path.read_text(encoding="utf-8"), sign))[:first]
    assert blocks
    namespace = {"__name__": path.stem}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, str(path), "exec"), namespace)
    return namespace


def shows(path: pathlib.Path, neurons) -> bool:
    return f"```text\n{neurons}\n```" in path.read_text(encoding="utf-8")


def test_readme():
    """The table is the one that the example prints."""
    assert shows(README, run(README)["neurons"])


def test_readme_before():
    """What the README starts from, AdamW, runs as well."""
    assert "neurons" not in run(README, sign="-", first=2)


def test_guide():
    run(GUIDE)


def test_guide_table():
    assert shows(GUIDE, runpy.run_path(str(ROOT / "examples" / "vit.py"))["find"]())


@pytest.mark.parametrize("path", [README, GUIDE, ROOT / "docs" / "experiments.md"])
def test_lines_are_short(path):
    """As far as they are prose: the guide's table of neurons is as wide as it is printed."""
    prose = re.sub(r"^```text\n.*?^```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    assert max(map(len, prose.splitlines())) <= 100
