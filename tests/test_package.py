"""What holds of the package as a whole."""

import subprocess
import sys
from importlib import metadata

import lnb


def test_version():
    assert lnb.__version__ == metadata.version("lnb")


def test_import_needs_nothing_but_jax_and_optax():
    optional = {"equinox", "flax", "haiku", "lineax", "matplotlib", "rich", "sklearn"}
    program = "import sys, lnb; print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", program], text=True).split()
    assert not optional.intersection(modules)
