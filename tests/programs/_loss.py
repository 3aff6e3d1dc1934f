"""The loss at the end of a random program, of a network's outputs or of its derivatives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._layer import Chain, Data
from ._tape import Place, Tape

# How often each kind is drawn.
KINDS = {"squares": 6, "sine": 3, "entropy": 3, "slope": 2, "direction": 2, "laplacian": 1}


@dataclasses.dataclass(frozen=True)
class Loss:
    """Squared errors, something else, or squared errors and derivatives by the network's input.

    "slope" is the derivative of the outputs, weighted by the targets, or by ones if `constant`;
    "direction" that along the cosine of the inputs, or along ones if `constant`; "laplacian" the
    trace of the second derivatives.
    """

    kind: str
    vmapped: bool  # whether derivatives are taken one example at a time
    constant: bool
    penalty: bool  # whether squares of all parameters are added

    @property
    def derivatives(self) -> bool:
        return self.kind in {"slope", "direction", "laplacian"}

    @property
    def open_metric(self) -> bool:
        """Whether the design leaves open what the metric is."""
        return self.kind == "laplacian"

    def run(self, layers: Chain, params: Any, data: Data) -> jax.Array:
        if not self.derivatives:
            loss = _loss_of(jnp, self.kind, layers.run(params, data.x, data), data.y)
        else:
            run = lambda data: self._derivative(layers, params, data)
            axes = Data(x=0, y=0, tokens=0, each=0, turns=None, flag=None)
            outputs, slopes = (jax.vmap(run, (axes,)) if self.vmapped else run)(data)
            loss = _loss_of(jnp, "squares", outputs, data.y) + jnp.mean(slopes**2)
        if self.penalty:
            squares = [jnp.sum(p.astype(loss.dtype) ** 2) for p in jax.tree.leaves(params)]
            loss = loss + 0.01 * sum(squares)
        return loss

    def _derivative(self, layers: Chain, params: Any, data: Data) -> tuple[jax.Array, jax.Array]:
        network = lambda x: layers.run(params, x, data)
        if self.kind == "direction":
            along = jnp.ones_like(data.x) if self.constant else jnp.cos(data.x)
            return jax.jvp(network, (data.x,), (along,))
        if self.kind == "slope":
            outputs, back = jax.vjp(network, data.x)
            return outputs, back(jnp.ones_like(outputs) if self.constant else data.y)[0]
        flat = lambda x: jnp.sum(network(x.reshape(data.x.shape)))
        return network(data.x), jnp.trace(jax.hessian(flat)(data.x.ravel()))

    def by_hand(self, layers: Chain, tape: Tape, data: Data) -> np.ndarray:
        """Of the first five kinds."""
        x = tape.data(data.x)
        outputs = layers.by_hand(tape, Place(""), x, data)
        kind = "squares" if self.derivatives else self.kind
        loss = _loss_of(np, kind, outputs.value, data.y)
        if self.kind == "slope":
            # Backwards through a loop, JAX hands over views of weights that the loop has stacked.
            tape.lenient |= tape.looped
            seed = np.ones_like(data.y) if self.constant else data.y
            loss += np.mean(tape.gradient(outputs, x, seed, self.constant) ** 2)
        elif self.kind == "direction":
            along = np.ones_like(data.x) if self.constant else np.cos(data.x)
            loss += np.mean(tape.tangent(outputs, x, along, self.constant) ** 2)
        if self.penalty:
            loss += 0.01 * sum(np.sum(p**2) for p in tape.params.values())
        return loss

    def __str__(self):
        start = "ones" if self.constant else "data"
        by = ", by example" if self.vmapped else ""
        details = f" from {start}{by}" if self.derivatives else ""
        return f"loss: {self.kind}{details}{', penalty' * self.penalty}"


def _loss_of(xp: Any, kind: str, x: Any, y: Any) -> Any:
    match kind:
        case "squares":
            return xp.mean((x - y) ** 2)
        case "sine":
            return xp.mean(xp.sin(x) * y)
    logsumexp = jax.nn.logsumexp if xp is jnp else _logsumexp
    return xp.mean(logsumexp(x, axis=-1) - x[..., 0])


def _logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    top = np.max(x, axis=axis, keepdims=True)
    return np.squeeze(top, axis) + np.log(np.sum(np.exp(x - top), axis=axis))
