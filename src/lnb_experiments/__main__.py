"""The `lnb` command: says what is missing where the `experiments` extra is not installed."""

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec

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
    from .cli import main

    main()


if __name__ == "__main__":
    main()
