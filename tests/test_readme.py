"""Runs the Python in the README, from top to bottom in one namespace."""

import pathlib
import re
import runpy

import jax

ROOT = pathlib.Path(__file__).parent.parent
README = ROOT / "README.md"


def python_blocks(text: str):
    """The fenced Python blocks, each after as many empty lines as stand above it in the file."""
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1]


def test_readme():
    blocks = list(python_blocks(README.read_text(encoding="utf-8")))
    assert blocks
    namespace = {"__name__": "readme"}
    # With JAX's own settings, as users have them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)


def test_table():
    """The table is the one that the example prints."""
    neurons = runpy.run_path(str(ROOT / "examples" / "vit.py"))["find"]()
    assert f"```text\n{neurons}\n```" in README.read_text(encoding="utf-8")
