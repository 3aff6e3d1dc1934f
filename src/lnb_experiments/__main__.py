"""The `lnb` command: says what is missing where the `experiments` extra is not installed."""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

NEEDED = ("matplotlib", "orbax.checkpoint", "PIL", "pooch", "rich", "tyro")


def _is_missing(name: str) -> bool:
    try:
        return find_spec(name) is None
    except ModuleNotFoundError:  # of the package that it is in
        return True


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        sys.exit(print(f"lnb {version('lnb')}"))
    missing = [name for name in NEEDED if _is_missing(name)]
    if missing:
        sys.exit(
            f"lnb: the command needs {', '.join(missing)}. Install the extra `experiments`:\n"
            "    pip install 'lnb[experiments]'      (in a clone: pip install -e '.[experiments]')"
        )
    # On a CPU, factorisations call OpenBLAS, whose threads wait for the cores that XLA's hold.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.argv[1:2] == ["bench"]:
        _bench()
    else:
        from .cli import main

        main()


def _bench() -> None:
    """Runs the benchmarks, which are a part of the source tree, not of the package."""
    source = Path(__file__).parents[2]
    if not (source / "benchmarks" / "cli.py").exists():
        sys.exit(
            "lnb: the benchmarks come with the source: in a clone, after pip install -e "
            "'.[experiments]', run lnb bench (or make bench)."
        )
    sys.path.insert(0, str(source))
    del sys.argv[1]
    from benchmarks.cli import main

    main("lnb bench")


if __name__ == "__main__":
    main()
