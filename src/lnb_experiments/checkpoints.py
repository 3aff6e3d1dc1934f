"""Checkpoints of a run's state. One that was cut off by a kill does not count."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from .folder import CHECKPOINT, RunFolder
from .records import damaged, read_object


class Checkpoints:
    """Saves arrays of a state by their order in the tree; keeps the newest.

    `checkpoint.json` holds the step of the newest checkpoint and the SHA-256 of each of its files.
    It is written when the checkpoint is complete, and only then is the one before it removed. So
    after a kill at any moment it names a checkpoint that is whole, or step 0 if there is none yet.

    Attributes:
      step: that of the newest checkpoint, whose files were found to be right; 0 if there is none.
    """

    def __init__(self, folder: RunFolder):
        """Changes nothing on disk."""
        self._run, self._folder = folder, folder.checkpoints.resolve()
        self.step = self._verify()

    def __enter__(self) -> "Checkpoints":
        if not self.step:
            self._run.write(CHECKPOINT, {"step": 0, "sha256": {}})
        for path in self._folder.glob("*"):
            cut_off = path.name.isdigit() or ".orbax-checkpoint-tmp" in path.name
            if cut_off and path.name != str(self.step):  # in its writing or its removal, by a kill
                shutil.rmtree(path)
        self._manager = ocp.CheckpointManager(
            self._folder, options=ocp.CheckpointManagerOptions(create=True)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, state: Any) -> None:
        """Returns when all is written: the step that follows may overwrite the arrays."""
        self._manager.save(step, args=ocp.args.StandardSave(dict(_named(state))))
        self._manager.wait_until_finished()
        folder = self._folder / str(step)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sums = {path.relative_to(folder).as_posix(): _sha256(path) for path in files}
        self._run.write(CHECKPOINT, {"step": step, "sha256": sums})
        if self.step:
            self._manager.delete(self.step)
        self.step = step

    def restore(self, like: Any) -> Any:
        """The state of the newest checkpoint, as a tree like another."""
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, dict(_named(like)))
        arrays = self._manager.restore(self.step, args=ocp.args.StandardRestore(template))
        return jax.tree.unflatten(
            jax.tree.structure(like), [arrays[name] for name, _ in _named(like)]
        )

    def _verify(self) -> int:
        """The step of the newest checkpoint, once its checksums are found right."""
        run = self._run.path
        if not (run / CHECKPOINT).exists():
            if any(path.name.isdigit() for path in self._folder.glob("*")):
                what = "is missing (older versions wrote none), and with it the checksums"
                raise damaged(run / CHECKPOINT, what, run)
            return 0
        content = read_object(run / CHECKPOINT, {"step": int, "sha256": dict})
        for name, expected in content["sha256"].items():
            path = self._run.checkpoints / str(content["step"]) / name
            if not path.is_file():
                raise damaged(path, f"is missing: {CHECKPOINT} names it", run)
            if _sha256(path) != expected:
                raise damaged(path, f"was changed: its SHA-256 in {CHECKPOINT} is another", run)
        return content["step"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _named(state: Any) -> list[tuple[str, Any]]:
    return [(f"{i:04d}", leaf) for i, leaf in enumerate(jax.tree.leaves(state))]
