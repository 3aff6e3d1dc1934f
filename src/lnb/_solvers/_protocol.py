"""What a solver is."""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import Array

from .._damping import Damping
from .._inverse import Inverse
from .._metric import Theta
from .._neurons import Neuron


class Solver(Protocol):
    """Finds directions: M h = g, one neuron at a time.

    A solver is a frozen dataclass whose fields are its settings. Subclass this and write
    `direction`; what the solver remembers about a neuron is a pytree of its own choice. All methods
    are pure. If the state has a field `residual`, the relative error |M h - g| / |g| of the last
    direction, `lnb.diagnostics` reports it.
    """

    def init(self, neuron: Neuron, theta: Theta) -> Any:
        """The state before the first step; `theta` gives shapes and dtypes."""
        del neuron, theta
        return ()

    def update(
        self, neuron: Neuron, features: Any, state: Any, damping: Damping, step: Array
    ) -> Any:
        """Absorbs the features of this step's batch; none, if these count nothing.

        They are empty unless it was the neuron's turn; `step` is the number of steps before.
        """
        del neuron, features, damping, step
        return state

    def due(self, neuron: Neuron, step: Array) -> Array:
        """Whether `update` has a use for features at a step; if not, they may be empty."""
        del neuron, step
        return jnp.asarray(True)

    def remembers(self, neuron: Neuron) -> bool:
        """Whether directions need no features, once there were some.

        The state is then made from features alone, and neurons that are fed alike share it.
        """
        del neuron
        return False

    def direction(
        self, neuron: Neuron, features: Any, gradient: Theta, state: Any, damping: Damping
    ) -> tuple[Theta, Any]:
        """The direction and the next state. `state` comes from `update` on the same features."""
        ...

    def factored(self) -> "Solver":
        """The same solver, with inverses as factors where it can have them."""
        return self

    def inverse(self, neuron: Neuron, state: Any) -> Inverse | None:
        """That of M, where the solver has it: `norm="spectral"` needs it."""
        del neuron, state
        return None


def check_settings(*decays: float, **counts: int) -> None:
    """Refuses decays outside of [0, 1) and counts below 1."""
    for decay in decays:
        if not 0 <= decay < 1:
            raise ValueError(f"a decay must be at least 0 and below 1, not {decay}.")
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, not {count}.")
