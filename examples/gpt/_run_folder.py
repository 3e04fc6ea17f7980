"""The folder of a training run: its configuration, metrics, summary, plot and checkpoints."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jmp_policy as jmp
from jmp_policy._base import quote
from jmp_policy.cli import UserError

from ._gpt import GPTConfig
from ._mesh import AXES, MeshShape

if sys.platform == "win32":
    import msvcrt

    def _lock_file(number: int) -> None:
        msvcrt.locking(number, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock_file(number: int) -> None:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


RUNS = Path("runs")
LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run is determined by, and what a resumed one must share with the one it continues.

    Attributes:
      api: the Flax API, `"nnx"` or `"linen"`.
      policy: the policy of the model.
      seed: the seed of parameters and batches.
      data: the paths of the data; empty for the Python standard library.
      data_sha256: the digest of its bytes.
      model: the sizes of the model.
      batch_size: windows in a batch.
      learning_rate: the highest learning rate.
      steps: where the run ends; it may change when the run is resumed.
      growth_period: how many finite steps in a row double the loss scale, in float16; the library's default if `None`,
        which is how runs of older versions go on.
      numerics: every how many steps tensors are measured, if at all. It changes nothing of the training, and may change
        when the run is resumed.
      policy_map: what `--policy auto` made of the policy.
      first_scale: the loss scale that it begins with.
      mesh: the devices that it runs on; one, without a mesh, if `None`. It may change when the run is resumed.
    """

    api: str
    policy: jmp.Policy
    seed: int
    data: tuple[str, ...]
    data_sha256: str
    model: GPTConfig
    batch_size: int
    learning_rate: float
    steps: int
    growth_period: int | None = None
    numerics: int | None = None
    policy_map: jmp.PolicyMap | None = None
    first_scale: float | None = None
    mesh: MeshShape | None = None

    def make_loss_scale(self) -> jmp.LossScale:
        """The loss scale of the first step; equal settings give the same object, and so one compiled step."""
        return _make_loss_scale(self.policy, self.growth_period, self.first_scale)

    def to_json(self) -> dict[str, Any]:
        """The configuration as a JSON object."""
        configs: dict[str, Any] = {"policy": self.policy.get_config()}
        if self.policy_map is not None:
            configs["policy_map"] = self.policy_map.get_config()
        return dataclasses.asdict(dataclasses.replace(self, **configs))

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> "RunConfig":
        """Reads what `to_json` wrote.

        Raises:
          ValueError, TypeError: names the field that is missing, unknown or damaged.
        """
        return cls(**_read_fields(config, _CONFIG, required=_CONFIG))


_Parser = Callable[[Any], Any]


def _must_be(words: str, is_valid: Callable[[Any], bool]) -> _Parser:
    def check(value: object) -> object:
        if not is_valid(value):
            raise ValueError(f"must be {words}, got {quote(value)}")
        return value

    return check


def _or_none(parse: _Parser) -> _Parser:
    return lambda value: None if value is None else parse(value)


def _read_fields(saved: object, parsers: Mapping[str, _Parser], *, required: Iterable[str]) -> dict[str, Any]:
    """Parses the fields of a JSON object; a required one that is missing counts as None."""
    if not isinstance(saved, dict):
        raise ValueError(f"must be a JSON object, got {quote(saved)}")
    read = dict.fromkeys(required) | saved
    for name in filter(read.__contains__, parsers):
        try:
            read[name] = parsers[name](read[name])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{name}: {error}") from error
    return read


_COUNT = _must_be(f"an integer from 1 to {2**32 - 1}", lambda value: type(value) is int and 1 <= value < 2**32)
_NUMBER = _must_be("a finite number", lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max)
_POSITIVE = _must_be(
    "a positive finite number", lambda value: type(value) in (int, float) and 0 < value <= sys.float_info.max
)
_TEXTS = _must_be(
    "a list of strings", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
_SIZES = dict.fromkeys((field.name for field in dataclasses.fields(GPTConfig)), _COUNT)
_MESH = dict.fromkeys(AXES, _COUNT)

_CONFIG: dict[str, _Parser] = {
    "api": _must_be("'nnx' or 'linen'", lambda value: value in ("nnx", "linen")),
    "policy": jmp.Policy.from_config,
    "seed": _must_be(f"an integer from 0 to {2**32 - 1}", lambda value: type(value) is int and 0 <= value < 2**32),
    "data": lambda value: tuple(_TEXTS(value)),
    "data_sha256": _must_be("a string", lambda value: isinstance(value, str)),
    "model": lambda value: GPTConfig(**_read_fields(value, _SIZES, required=_SIZES)),
    "batch_size": _COUNT,
    "learning_rate": _POSITIVE,
    "steps": _COUNT,
    "growth_period": _or_none(_COUNT),
    "numerics": _or_none(_COUNT),
    "policy_map": _or_none(jmp.PolicyMap.from_config),
    "first_scale": _or_none(_POSITIVE),
    "mesh": _or_none(lambda value: MeshShape(**_read_fields(value, _MESH, required=_MESH))),
}
"""How each field of `config.json` is read."""

_METRICS: dict[str, _Parser] = {
    "step": _COUNT,
    "loss": _or_none(_NUMBER),
    "validation_loss": _or_none(_NUMBER),
    "loss_scale": _POSITIVE,
    "skipped_steps": _NUMBER,
}
"""How the fields of a line of metrics are read that the program computes with."""


@functools.cache
def _make_loss_scale(policy: jmp.Policy, period: int | None, first: float | None) -> jmp.LossScale:
    scale = policy.loss_scale()
    if period is None or not isinstance(scale, jmp.DynamicLossScale):
        return scale
    begin = 2.0**15 if first is None else min(max(first, scale.min_loss_scale), scale.max_loss_scale)
    return jmp.DynamicLossScale(begin, period=period)


class RunFolder:
    """A folder that holds one run.

    Attributes:
      is_writer: whether this process writes to it; of several the first does. The others write checkpoints alone.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path, self.is_writer = path, is_writer
        self.metrics = MetricsLog(path / "metrics.jsonl", is_writer=is_writer)
        self.numerics = MetricsLog(path / "numerics.jsonl", is_writer=is_writer)
        self.origins = MetricsLog(path / "origins.jsonl", is_writer=is_writer)
        self.summary = path / "summary.json"
        self.plot = path / "loss.png"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: Path | None) -> "RunFolder":
        """Takes a folder that is new or empty, by default the next free one of `runs/`.

        Raises:
          UserError: the folder holds something, or cannot be written.
        """
        return cls(new_folder(path, hint="continue a run with --resume, or choose another --out"))

    @classmethod
    def find(cls, path: Path | None) -> "RunFolder":
        """Finds the run to resume, by default the newest in `runs/`.

        Raises:
          UserError: no run is found.
        """
        if path is None:
            # Only numbers: a copy beside a run, such as "001 copy", is resumed by its name.
            runs = [file.parent for file in RUNS.glob("*/config.json") if file.parent.name.isdecimal()]
            if not runs:
                raise UserError(f"no run to resume in {RUNS}/: name its folder with --out")
            return cls(max(runs, key=lambda folder: int(folder.name)))
        if not (path / "config.json").is_file():
            raise UserError(f"no run to resume in {path}: leave --resume out to begin one")
        return cls(path)

    def read_config(self) -> RunConfig:
        """Reads what the run was begun with.

        Raises:
          UserError: it cannot be read.
        """
        file = self.path / "config.json"
        try:
            return RunConfig.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{file} is not the configuration of a run: {error}") from error

    def write_config(self, config: RunConfig) -> None:
        """Writes what the run is determined by, whole or not at all.

        Raises:
          UserError: the folder cannot be written.
        """
        self._write_json(self.path / "config.json", config.to_json())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Writes what came of the run so far, whole or not at all.

        Raises:
          UserError: the folder cannot be written.
        """
        self._write_json(self.summary, summary)

    def _write_json(self, file: Path, record: dict[str, Any]) -> None:
        if not self.is_writer:
            return
        temporary = file.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            os.replace(temporary, file)
        except OSError as error:
            raise _cannot_write(self.path, error) from error


class MetricsLog:
    """A file with one JSON object a line, each with the number of its `step`.

    Every line is written out at once. A process killed in the middle leaves at most one broken line, which
    `truncate` drops. Where another process writes it, this one only reads.
    """

    def __init__(self, path: Path, *, is_writer: bool = True):
        self.path, self.is_writer = path, is_writer

    def append(self, record: dict[str, Any]) -> None:
        """Writes one record; a number that is not finite becomes null."""
        if not self.is_writer:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({key: json_value(value) for key, value in record.items()}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All records, without a broken last line; an empty list without a file.

        Raises:
          UserError: a line is damaged.
        """
        return [self._parse(number, line) for number, line in enumerate(self.read_lines(), 1)]

    def _parse(self, number: int, line: str) -> dict[str, Any]:
        try:
            return _read_fields(json.loads(line), _METRICS, required=("step",))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path}, line {number}: {error}. Remove the line to resume") from error

    def read_lines(self) -> list[str]:
        """The lines of all records."""
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def curve(self, key: str) -> tuple[list[int], list[float]]:
        """The steps that have a figure, and the figure of each; nan for null."""
        records = [record for record in self.read() if key in record]
        figures = [math.nan if record[key] is None else record[key] for record in records]
        return [record["step"] for record in records], figures

    def truncate(self, step: int) -> None:
        """Drops the records of later steps: a run resumed at `step` writes them again. No file stays none."""
        if not self.is_writer or not self.path.exists():
            return
        kept = [record for record in self.read() if record["step"] <= step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)


def json_value(value: object) -> object:
    """The value itself, or `None` for a number that JSON does not have.

    >>> json_value(float("nan")), json_value(1.5), json_value("a name")
    (None, 1.5, 'a name')
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_folder(path: Path | None, *, prefix: str = "", hint: str = "choose another --out") -> Path:
    """Makes a folder that is new or empty.

    Args:
      path: where; `None` for the next free one of `runs/<prefix>001`, `runs/<prefix>002`, ...
      prefix: see `path`.
      hint: what the error tells the user to do.

    Raises:
      UserError: it holds something, or cannot be made.
    """
    try:
        if path is None:
            return _next_free(prefix)
        path.mkdir(parents=True, exist_ok=True)
        occupied = any(file.name != LOCK for file in path.iterdir())
    except OSError as error:
        raise _cannot_write(path or RUNS, error) from error
    if occupied:
        raise UserError(f"{path} is not empty: {hint}")
    return path


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keeps other processes out of a folder while this one writes to it; its end, by a kill too, lets them in.

    Raises:
      UserError: another process has the folder, a file of it is a link, or something cannot be written.
    """
    try:
        if os.path.lexists(path / LOCK):
            _refuse_link(path / LOCK, path)
        with (path / LOCK).open("ab") as lock:
            try:
                _lock_file(lock.fileno())
            except (BlockingIOError, PermissionError) as error:  # the latter on Windows
                raise UserError(f"{path} is in use by another process: wait for it, or choose another --out") from error
            for file in path.rglob("*"):  # once no other process renames checkpoints
                _refuse_link(file, path)
            yield
    except OSError as error:
        raise _cannot_write(path, error) from error


def _refuse_link(file: Path, folder: Path) -> None:
    """Raises a UserError if a file is a link, symbolic or hard, or a pipe or a device."""
    status = file.lstat()
    if not stat.S_ISDIR(status.st_mode) and (not stat.S_ISREG(status.st_mode) or status.st_nlink > 1):
        raise UserError(
            f"{file} is a link or a special file, and training would write beyond {folder}: resume a copy without "
            f"links, for example one made by: cp -rL {folder} copy"
        )


def _next_free(prefix: str) -> Path:
    RUNS.mkdir(exist_ok=True)
    for number in itertools.count(1):
        path = RUNS / f"{prefix}{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write to {error.filename or path}: {(error.strerror or str(error)).lower()}")
