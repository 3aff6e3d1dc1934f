"""Numbers about the last step, found wherever the optimizer's state has them."""

from typing import Any

import jax
import jax.numpy as jnp

from ._guard import GuardState
from ._optimizer import ScaleByLNBState


def diagnostics(opt_state: Any) -> dict[str, Any]:
    """What LNB knows about the last step that it took.

    Args:
      opt_state: an optimizer's state with LNB's somewhere inside: in a chain, in the states of
        `optax.partition`, `optax.inject_hyperparams`, `optax.MultiSteps` and the like. If there are
        several, their numbers are joined.

    Returns:
      A dict with `"norm"`, the norm of all directions together before normalisation; `"capped"`,
      whether `min_norm` made the step shorter; `"neuron_norms"`, the norm of each neuron's own
      direction, by name; `"changes"`, by how much the step changed each parameter, relative to its
      size (below 0.1 is usual; near 1 or more means that the rate is too high); `"residuals"`, the
      relative error of each neuron's direction, by name, where the solver knows it;
      `"skipped_steps"`, how many steps were not taken because something was not finite.
    """
    states, guards = _find(opt_state, ScaleByLNBState), _find(opt_state, GuardState)
    if not states:
        raise ValueError("There is no state of `lnb.scale_by_lnb` in this optimizer's state.")
    joined = lambda dicts: {name: value for one in dicts for name, value in one.items()}
    memories = joined(state.memory for state in states)
    return {
        "norm": jnp.sqrt(sum(state.norm**2 for state in states)),
        "capped": jnp.any(jnp.stack([state.capped for state in states])),
        "neuron_norms": joined(state.neuron_norms for state in states),
        "changes": joined(state.changes for state in guards),
        "residuals": {k: m.residual for k, m in memories.items() if hasattr(m, "residual")},
        "skipped_steps": sum((state.skipped for state in guards), jnp.zeros((), jnp.int32)),
    }


def _find(tree: Any, kind: type) -> list[Any]:
    """All nodes of a type in an optimizer's state."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
