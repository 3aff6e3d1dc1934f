"""Checkpoints of a run's state. One that was cut off by a kill does not count."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """Saves arrays of a state by their order in the tree; keeps the newest."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any) -> None:
        """Returns when all is written: the step that follows may overwrite the arrays."""
        self._manager.save(step, args=ocp.args.StandardSave(dict(_named(state))))
        self._manager.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        """The state saved at a step, as a tree like another."""
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(_named(like)))
        arrays = self._manager.restore(step, args=ocp.args.StandardRestore(template))
        return jax.tree.unflatten(
            jax.tree.structure(like), [arrays[name] for name, _ in _named(like)]
        )


def _named(state: Any) -> list[tuple[str, Any]]:
    return [(f"{i:04d}", leaf) for i, leaf in enumerate(jax.tree.leaves(state))]
