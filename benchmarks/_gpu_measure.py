"""Measures a row on the device of this process: `python -m benchmarks._gpu_measure JOB`, which `benchmarks.gpu` starts.

Peak memory belongs to a process, so a row is the first computation of its process. Its baseline comes after.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import backend

from benchmarks._gpu_models import Row, Table, Work, tables

WARM_UP = 4
"""Steps before the first that counts: to compile, and to compile again if a step returns another kind of state."""

TURNS = 15
TURN_SECONDS = 0.1
MOST_SECONDS = 12.0

Record = dict[str, Any]


class Runner:
    """Takes one step after the other. The first is traced and compiled, which `compile_seconds` tells."""

    def __init__(self, work: Work):
        self.work = work
        self._state, *self._data = jax.block_until_ready(jax.jit(work.make)())
        self.out: Any = None
        self.compile_seconds = self.run(1)
        self.run(WARM_UP - 1)
        self._calls = 1

    def run(self, calls: int) -> float:
        """The seconds of some steps in a row."""
        start = time.perf_counter()
        for _ in range(calls):
            self._state, self.out = self.work.step(self._state, *self._data)
        jax.block_until_ready((self._state, self.out))
        return time.perf_counter() - start

    def turn(self) -> float:
        """The seconds of a step, a mean over enough of them for the clock."""
        return self.run(self._calls) / self._calls

    def choose_calls(self, tiny: bool) -> None:
        """Finds how many steps fill a turn."""
        self._calls = 1 if tiny else max(1, min(50, math.ceil(TURN_SECONDS / self.run(1))))


def describe() -> dict[str, Any]:
    """The device, and the versions of all that its times depend on."""
    device = jax.devices()[0]
    names = ("jax", "jaxlib", "flax", "optax")
    from importlib.metadata import version

    return {
        "device": {"kind": device.device_kind, "platform": device.platform, "memory_bytes": _memory("bytes_limit")},
        "versions": {
            "python": ".".join(map(str, sys.version_info[:3])),
            **{name: version(name) for name in names},
            "platform": " ".join(backend.get_backend().platform_version.split()),
            "driver": _driver() if device.platform == "gpu" else None,
        },
    }


def measure(table: Table, row: Row, tiny: bool = False) -> Record:
    """Measures a row of a table, beside the first row, its baseline. A record with an `error` has nothing else.

    `tiny` measures small things once or twice.
    """
    runners: dict[str, Runner] = {}
    try:
        runners[row.key] = Runner(row.load(tiny))
        peak = None if tiny else _memory("peak_bytes_in_use")
        seconds = take_turns(runners | _load_first(table, row, tiny), tiny)
    except Exception as error:  # out of memory, or what this device cannot do
        return {"error": first_line(error)}
    return _record(runners[row.key], seconds[row.key], seconds.get(table.rows[0].key), peak)


def _load_first(table: Table, row: Row, tiny: bool) -> dict[str, Runner]:
    """The baseline of a row, unless it is the row, or fails: the two may not fit into the memory together."""
    first = table.rows[0]
    try:
        return {} if row is first else {first.key: Runner(first.load(tiny))}
    except Exception:
        return {}


def take_turns(runners: Mapping[str, Runner], tiny: bool) -> dict[str, list[float]]:
    """The seconds of a step of each, turn by turn; each turn begins with another one."""
    for runner in runners.values():
        runner.choose_calls(tiny)
    seconds: dict[str, list[float]] = {key: [] for key in runners}
    order, start = list(runners), time.perf_counter()
    for turn in range(2 if tiny else TURNS):
        if turn > 4 and time.perf_counter() - start > MOST_SECONDS:
            break
        for key in order:
            seconds[key].append(runners[key].turn())
        order = order[1:] + order[:1]
    return seconds


def _record(runner: Runner, seconds: list[float], reference: list[float] | None, peak: int | None) -> Record:
    record: Record = {"seconds": _spread(seconds), "compile_seconds": runner.compile_seconds}
    record["items_per_second"] = runner.work.items / statistics.median(seconds)
    if reference is not None:
        record["over_first"] = _spread([a / b for a, b in zip(seconds, reference, strict=True)])
    if peak is not None:
        record["peak_bytes"] = peak
    record["loss"] = float(runner.out)
    if not math.isfinite(record["loss"]):
        return {"error": f"The loss is {record['loss']} after some steps: they may not have been the usual ones."}
    return record


def _spread(values: Sequence[float]) -> list[float]:
    """The median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def first_line(error: BaseException | str) -> str:
    """Returns the message of an error, cut to a line of a table.

    >>> first_line(ValueError("RESOURCE_EXHAUSTED: Out of memory\\nallocating 3 GB"))
    'ValueError: RESOURCE_EXHAUSTED: Out of memory'
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    line = next(iter(text.strip().splitlines()), "").replace("|", "/")
    return line if len(line) <= 160 else line[:157] + "..."


def _memory(name: str) -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get(name)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def main(argv: Sequence[str]) -> None:
    """Does a job, `{"row": key, "tiny": bool}`, or describes the device if it is `{}`.

    Writes a line of JSON for the row, or for the device, to the standard output.
    """
    say = lambda *what: print(json.dumps(what), flush=True)
    job = json.loads(argv[0])
    if not job:
        say("device", describe())
        return
    [(table, row)] = [(table, row) for table in tables() for row in table.rows if row.key == job["row"]]
    with jax.numpy_dtype_promotion("standard"):
        say(row.key, measure(table, row, job["tiny"]))


if __name__ == "__main__":
    main(sys.argv[1:])
