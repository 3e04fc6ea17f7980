"""The folder of a run: `config.json`, JSON lines of metrics, Orbax checkpoints, and a lock that keeps others out."""

import contextlib
import dataclasses
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import jmp_policy as jmp

from . import UserError
from .devices import is_first, parse_mesh
from .model import GPTConfig

if sys.platform == "win32":
    import msvcrt

    def _lock(number: int) -> None:
        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


RUNS = Path("runs")
LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Everything that determines a run."""

    api: str = "nnx"  # or "linen"
    policy: str = "params=float32,compute=half,output=float32"  # bfloat16 on TPUs, float16 with a loss scale elsewhere
    seed: int = 0  # of parameters and batches
    data: tuple[str, ...] = ()  # paths; the Python standard library if empty
    data_sha256: str = ""
    model: GPTConfig = dataclasses.field(default_factory=GPTConfig)
    batch_size: int = 16
    steps: int = 1500  # where the run ends
    numerics: int | None = None  # measure tensors every so many steps
    mesh: str | None = None  # such as "data=2,fsdp=2"; one device if None


FIXED = {"api", "policy", "seed", "model", "batch_size"}
"""The fields that a resumed run shares with the run that it continues. Of the data, only the bytes must be equal."""


def _is_count(value: object, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**32


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_SIZES = {field.name for field in dataclasses.fields(GPTConfig)}
_FIELDS: dict[str, Callable[[Any], object]] = {
    "api": lambda value: value in ("nnx", "linen"),
    "policy": lambda value: _is_text(value) and jmp.get_policy(value),
    "seed": lambda value: _is_count(value, 0),
    "data": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "data_sha256": _is_text,
    "model": lambda value: value.keys() == _SIZES and all(map(_is_count, value.values())) and GPTConfig(**value),
    "batch_size": _is_count,
    "steps": _is_count,
    "numerics": lambda value: value is None or _is_count(value),
    "mesh": lambda value: value is None or (_is_text(value) and parse_mesh(value)),
}
"""A check of each field of `config.json`, which returns something false or raises if the field is damaged."""


def read_config(folder: Path) -> RunConfig:
    """Reads the settings that a run was begun with; raises a UserError that names the file and the damaged field."""
    file = folder / "config.json"
    try:
        return parse_config(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not the configuration of a run: {error}") from error


def parse_config(saved: Any) -> RunConfig:
    """Makes a configuration of a JSON object; raises a ValueError that names the field that is damaged."""
    if not isinstance(saved, dict):
        raise ValueError("it is not a JSON object")
    for name in sorted(saved.keys() ^ _FIELDS.keys()):
        raise ValueError(f"{name} is {'unknown' if name in saved else 'missing'}")
    for name, is_valid in _FIELDS.items():
        example = dataclasses.asdict(RunConfig())[name]
        try:
            why = "" if is_valid(saved[name]) else f"for example: {example!r}"
        except (ValueError, AttributeError) as error:
            why = f"{error}; for example: {example!r}"
        if why:
            raise ValueError(f"{name} is {repr(saved[name])[:80]}, {why}")
    return RunConfig(**saved | {"data": tuple(saved["data"]), "model": GPTConfig(**saved["model"])})


def write_config(folder: Path, config: RunConfig) -> None:
    """Writes `config.json`, whole or not at all; only the first process does."""
    _write(folder / "config.json", dump_config(config))


def dump_config(config: RunConfig) -> str:
    """Writes a configuration as JSON."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def append_line(file: Path, record: dict[str, Any]) -> None:
    """Appends a JSON object as one line, in the first process; a number that is not finite becomes null."""
    if is_first():
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(finite) + "\n")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file, without a last line that a kill has broken; none if there is no file.

    Raises:
      UserError: a line is damaged.
    """
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    records = []
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        try:
            if line.endswith("\n"):
                records.append(json.loads(line))
                int(records[-1]["step"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not a record of a step ({error!r}). Remove the line") from error
    return records


def truncate_lines(file: Path, step: int) -> None:
    """Drops the records of later steps: a run resumed at `step` writes them again."""
    if file.exists() and is_first():
        kept = [record for record in read_lines(file) if record["step"] <= step]
        _write(file, "".join(json.dumps(record) + "\n" for record in kept))


def _write(file: Path, text: str) -> None:
    if is_first():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, file)


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    """Opens the checkpoints of a run, of which the last two are kept.

    Orbax writes each into a temporary folder and renames it when it is complete, so a kill leaves the ones before it.
    """
    try:
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        return ocp.CheckpointManager((folder / "checkpoints").absolute(), options=options)
    except ValueError as error:  # of a damaged file
        raise UserError(f"cannot read {folder / 'checkpoints'}: {_first_line(error)}") from error


def save_checkpoint(manager: ocp.CheckpointManager, step: int, state: Any) -> None:
    """Begins to write a checkpoint, while training goes on."""
    if step != manager.latest_step():
        manager.save(step, args=ocp.args.StandardSave(_flatten(state)))


def restore_checkpoint(manager: ocp.CheckpointManager, step: int, like: Any) -> Any:
    """Reads a checkpoint into a state of the same structure, shapes, dtypes and shardings."""
    expected = _flatten(like)
    target = jax.tree.map(ocp.utils.to_shape_dtype_struct, expected)
    try:
        arrays = manager.restore(step, args=ocp.args.StandardRestore(target))
    except Exception as error:  # Orbax raises a bare one where a file of an array is gone
        raise UserError(f"cannot restore step {step} of {manager.directory}: {_first_line(error)}") from error
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in expected])


def _flatten(state: Any) -> dict[str, jax.Array]:
    """Makes a state a dictionary from paths to arrays, independent of the classes of its containers."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def new_folder(path: Path | None, *, prefix: str = "", hint: str = "choose another --out") -> Path:
    """Makes a folder that is new or empty, by default the next of `runs/<prefix>001`, `runs/<prefix>002`, ...

    Raises:
      UserError: it holds something, or cannot be made.
    """
    try:
        if path is None:
            taken = [int(name) for file in RUNS.glob(f"{prefix}*") if (name := file.name[len(prefix) :]).isdecimal()]
            path = RUNS / f"{prefix}{max(taken, default=0) + 1:03d}"
        path.mkdir(parents=True, exist_ok=True)
        # A run that could not write its configuration, as on a full disk, leaves the lock and the temporary file.
        occupied = any(file.name not in (LOCK, "config.tmp") for file in path.iterdir())
    except OSError as error:
        raise cannot_write(path or RUNS, error) from error
    if occupied:
        raise UserError(f"{path} is not empty: {hint}")
    return path


def find_run(path: Path | None) -> Path:
    """Finds the run to resume, by default the newest in `runs/`; raises a UserError if there is none."""
    if path is None:
        # Only numbers: a copy beside a run, such as "001 copy", is resumed by its name.
        runs = [file.parent for file in RUNS.glob("*/config.json") if file.parent.name.isdecimal()]
        if not runs:
            raise UserError(f"no run to resume in {RUNS}/: name its folder with --out")
        return max(runs, key=lambda folder: int(folder.name))
    if not (path / "config.json").is_file():
        raise UserError(f"no run to resume in {path}: leave --resume out to begin one")
    return path


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keeps other processes out of a folder while this one writes to it. The lock ends with the process, by a kill too.

    Raises:
      UserError: another process has the folder, a file of it is a link, or something cannot be written.
    """
    try:
        if os.path.lexists(path / LOCK):
            _refuse_link(path / LOCK, path)
        with (path / LOCK).open("ab") as lock:
            try:
                _lock(lock.fileno())
            except (BlockingIOError, PermissionError) as error:  # the latter on Windows
                raise UserError(f"{path} is in use by another process: wait for it, or choose another --out") from error
            for file in path.rglob("*"):  # once no other process renames checkpoints
                _refuse_link(file, path)
            yield
    except OSError as error:
        raise cannot_write(path, error) from error


def _refuse_link(file: Path, folder: Path) -> None:
    """Raises a UserError if a file is a link, symbolic or hard, or a pipe or a device."""
    status = file.lstat()
    if not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1):
        raise UserError(
            f"{file} is a link or a special file, and training would write beyond {folder}: resume a copy without "
            f"links, for example one made by: cp -rL {folder} copy"
        )


def cannot_write(path: Path, error: OSError) -> UserError:
    """Makes one line of an error of the file system."""
    return UserError(f"cannot write to {error.filename or path}: {(error.strerror or str(error)).lower()}")
