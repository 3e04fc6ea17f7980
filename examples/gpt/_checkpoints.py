"""Checkpoints of a trainer's state, through Orbax."""

from pathlib import Path
from types import TracebackType

import jax
import numpy as np
import orbax.checkpoint as ocp

from jmp_policy._base import PyTree
from jmp_policy.cli import UserError

KEEP = 2


class Checkpoints:
    """The checkpoints of a run, by step.

    Orbax writes each into a temporary folder and renames it when it is complete: a process killed in the middle
    leaves the ones before it as they were. A state is stored as a flat dictionary from paths to arrays, so that a
    checkpoint does not depend on the classes of the containers.
    """

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP)
        handler = ocp.StandardCheckpointHandler()  # named here, so that `item_metadata` knows how to read
        try:
            self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)
        except ValueError as error:  # of a damaged file
            raise UserError(f"cannot read {folder}: {_first_line(error)}") from error

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint; `None` if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: PyTree) -> None:
        """Begins to write a checkpoint; training goes on meanwhile. One that exists already is left alone."""
        if step != self.latest_step:
            self._manager.save(step, args=ocp.args.StandardSave(_flatten(state)))

    def restore(self, step: int, like: PyTree) -> PyTree:
        """Reads a checkpoint.

        Args:
          step: one of the steps that were saved.
          like: a state of the same structure, shapes and dtypes.

        Raises:
          UserError: the checkpoint cannot be read, or holds something else.
        """
        expected = _flatten(like)
        try:
            self._check_same(step, expected)
            target = jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
            arrays = self._manager.restore(step, args=ocp.args.StandardRestore(target))
        except Exception as error:  # Orbax raises a bare one where a file of an array is gone
            raise UserError(f"cannot restore step {step} of {self._manager.directory}: {_first_line(error)}") from error
        return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in expected])

    def _check_same(self, step: int, expected: dict[str, jax.Array]) -> None:
        """Raises a ValueError where arrays differ; Orbax's own check leaves half-started reads behind."""
        metadata = self._manager.item_metadata(step)
        if metadata is None:
            raise ValueError("it is damaged")
        saved = {path: (leaf.shape, leaf.dtype) for path, leaf in dict(metadata).items()}
        needed = {path: (leaf.shape, leaf.dtype) for path, leaf in expected.items()}
        for path in sorted(saved.keys() | needed.keys()):
            if saved.get(path) != needed.get(path):
                there, here = _spell(saved.get(path)), _spell(needed.get(path))
                raise ValueError(f"it is of another model: {path} is {there} there, {here} here")

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._manager.close()  # waits for what is being written


def _flatten(state: PyTree) -> dict[str, jax.Array]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _spell(array: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return "missing" if array is None else f"{array[1]}{list(array[0])}"
