"""K-FAC by kfac-jax, which does not run on the jax that this package needs."""

from importlib import metadata
from typing import Any, NoReturn

from ..method import MethodError, Problem


def check_kfac() -> NoReturn:
    """Raises an error that says which versions K-FAC can be had with."""
    raise MethodError(
        f"K-FAC cannot run here: jax is {metadata.version('jax')}, and kfac-jax 0.0.8, its newest "
        "release, fails at the first step on jax 0.10 (and with it tensorflow-probability 0.25, "
        "which it needs, on jax 0.7 and later). The two work together with jax 0.6.2, which lnb "
        'does not support: pip install "kfac-jax==0.0.8" "jax==0.6.2" in an environment of its '
        "own. Nearest to K-FAC among the methods here are foof, prong and levenberg-marquardt."
    )


def kfac(problem: Problem, params: Any, batch: Any, key: Any) -> NoReturn:
    """There is none: one of our own would be compared in its authors' place."""
    del problem, params, batch, key
    check_kfac()
