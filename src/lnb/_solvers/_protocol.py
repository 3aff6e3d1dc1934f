"""What a solver is."""

from __future__ import annotations

from typing import Any, Protocol

from jax import Array

from .._inverse import Inverse
from .._metric import Damping, Features, Theta
from .._neurons import Neuron


class Solver(Protocol):
    """Finds directions: M h = g, one neuron at a time.

    A solver is a frozen dataclass whose fields are its settings. Subclass this and write
    `direction`. What it remembers comes in two parts, pytrees of its own choice: what it knows of
    M, which neurons that are fed the same rows share; and a memory for each neuron. All methods are
    pure. If the memory has a field `residual`, the relative error |M h - g| / |g| of the last
    direction, `lnb.diagnostics` reports it.
    """

    def init(self, neuron: Neuron, theta: Theta) -> tuple[Any, Any]:
        """What is known of M, and the memory, before the first step; `theta` gives shapes."""
        return (), ()

    def update(
        self, neuron: Neuron, features: Features, known: Any, damping: Damping, step: Array
    ) -> Any:
        """What is known of M after this step's batch; `step` is the number of steps before."""
        return known

    def direction(
        self,
        neuron: Neuron,
        features: Features,
        gradient: Theta,
        known: Any,
        memory: Any,
        damping: Damping,
    ) -> tuple[Theta, Any]:
        """The direction and the next memory. `known` comes from `update` on the same features."""
        ...

    def inverse(self, neuron: Neuron, known: Any) -> Inverse | None:
        """That of M, where the solver has it: `norm="spectral"` needs it."""
        return None

    def serving(self, neuron: Neuron) -> Solver:
        """The solver that serves a neuron: another one, where this one cannot."""
        return self


def check_settings(*decays: float, **counts: int) -> None:
    """Refuses decays outside of [0, 1) and counts below 1."""
    for decay in decays:
        if not 0 <= decay < 1:
            raise ValueError(f"a decay must be at least 0 and below 1, not {decay}.")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}.")
