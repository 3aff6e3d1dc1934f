"""Arguments of earlier versions: an error that says what to write now."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed(**advice: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Refuses arguments that a function no longer has; `advice` says what replaces each."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() & advice.keys():
                raise TypeError(f"{function.__name__} has no argument {name}: {advice[name]}.")
            return function(*args, **kwargs)

        return checked

    return decorate
