"""What an optimizer is here: a state, and a step that knows the loss and its parts.

Optax's transformations see gradients only. Some of the paper's related methods need more: the
features, the errors at the outputs of neurons, the Gauss-Newton matrix. So a method is given the
problem itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax import Array


@dataclass(frozen=True)
class Problem:
    """A loss, in two parts.

    Attributes:
      outputs: (params, batch, key) -> what the network says.
      objective: (outputs, batch) -> the loss, a scalar.
      decays: whether optimizers that advise weight decay use it.
    """

    outputs: Callable[[Any, Any, Array | None], Array]
    objective: Callable[[Array, Any], Array]
    decays: bool = True

    def loss(self, params: Any, batch: Any, key: Array | None) -> Array:
        return self.objective(self.outputs(params, batch, key), batch)


class MethodError(ValueError):
    """A method that cannot serve a problem; the message says why, and what can."""


class Method(NamedTuple):
    """An optimizer of one problem. Both functions can be traced.

    Attributes:
      init: params -> state, a pytree of arrays.
      step: (learning_rate, params, state, batch, key) -> (params, state, loss). The learning rate
        is a traced scalar: one compiled step serves all of them.
      evaluated: (params, state) -> the parameters that are tested. Methods that average their
        iterates test the average.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Array]]
    evaluated: Callable[[Any, Any], Any] = lambda params, state: params


# Makes a method for a problem; params, batch and key are examples, arrays or their shapes.
MakeMethod = Callable[[Problem, Any, Any, Any], Method]
