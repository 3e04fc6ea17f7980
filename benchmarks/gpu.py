"""Measurements that need a device: its speed and the memory that it takes.

Run from the root of the repository, on a machine with a GPU:

    python -m benchmarks.gpu [--minutes 9] [--again] [--only TEXT]

Each row is saved at once, to `benchmarks/results/<device>.json` and, as tables, `<device>.md`. Stored rows are not
measured again: the same command goes on where the last one stopped. `--tiny` measures small programs in this process,
on any device, to see that everything works.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._gpu_results import Results, ResultsError, load_results, results_path, save_results, write_report
from benchmarks._gpu_rows import Row, Table, tables

RESULTS = pathlib.Path(__file__).parent / "results"
MINUTES = 9.0
LONGEST_JOB = 60.0
"""What a process may take, in seconds, before one was seen: most of it is the compiler's."""

START_SECONDS = 300.0
"""What JAX may take to find the device."""

Save = Callable[[str, dict[str, Any]], None]
Job = Callable[[Table, Sequence[Row], Save, float], None]
"""Measures rows and saves each, within some seconds. Raises `TimeoutError` after them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 0 when every row is there, 1 when not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="when to stop (%(default)s)")
    parser.add_argument("--again", action="store_true", help="measure anew what is there")
    parser.add_argument("--only", default="", metavar="TEXT", help='rows with this in their name, such as "gpt2/"')
    parser.add_argument("--results", type=pathlib.Path, metavar="DIR", help="where the results are")
    parser.add_argument("--tiny", action="store_true", help="small things, in this process, to see that all works")
    options = parser.parse_args(argv)
    folder = options.results or (pathlib.Path(tempfile.mkdtemp()) if options.tiny else RESULTS)
    try:
        machine, job = _prepare(options.tiny, folder)
        path = results_path(folder, machine["device"]["kind"], options.tiny)
        results = load_results(path, machine, options.again, options.tiny)
    except ResultsError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    try:
        left = measure_missing(results, path, job, options.only, 60 * options.minutes)
    except KeyboardInterrupt:
        print(f"\nStopped. What was measured is in {path}; the same command, without --again, goes on.")
        return 130
    save_results(path, results)
    print("\n" + write_report(results))
    if left:
        print(f"{left} rows are left after {options.minutes:g} minutes: the same command, without --again, goes on.")
    return 1 if left else 0


def measure_missing(results: Results, path: pathlib.Path, job: Job, only: str, seconds: float) -> int:
    """Measures the rows that the results lack and whose key contains `only`, and returns how many are left.

    Each is saved at once. A process is started only if it will probably end within the seconds that are left, and is
    stopped if it does not.
    """
    start = time.monotonic()
    remaining = lambda: seconds - (time.monotonic() - start)

    def save(key: str, record: dict[str, Any]) -> None:
        results["rows"][key] = record
        save_results(path, results)
        print(f"{key}: {record.get('error') or '{:.3f} ms'.format(1e3 * record['seconds'][0])}", flush=True)

    missing = lambda rows: [row for row in rows if row.key not in results["rows"] and only in row.key]
    for table in tables():
        longest = 0.0  # that a job of this table took
        for rows in table.jobs(results["tiny"]):
            wanted = missing(rows)
            if not wanted:
                continue
            is_first = remaining() >= seconds - 1
            if not is_first and remaining() < (longest or LONGEST_JOB):
                return sum(len(missing(table.rows)) for table in tables())
            began = time.monotonic()
            try:
                job(table, wanted, save, remaining())
            except TimeoutError:
                if is_first:  # it had all the time that there is, and would never end
                    for row in missing(wanted):
                        save(row.key, {"error": f"It took longer than {seconds / 60:g} minutes."})
                return sum(len(missing(table.rows)) for table in tables())
            longest = max(longest, time.monotonic() - began)
    return 0


def _prepare(tiny: bool, folder: pathlib.Path) -> tuple[dict[str, Any], Job]:
    """The machine, and what does a job: this process if it is to be tiny, else one for each job, which ends with it."""
    if tiny:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")  # each program runs a few times
        from benchmarks import _gpu_measure

        return _gpu_measure.describe(), measure_here
    try:
        lines, complaint = _run({}, START_SECONDS, folder)
    except TimeoutError:
        lines, complaint = [], f"it has not started within {START_SECONDS:g} seconds"
    if not lines:
        raise ResultsError(f"JAX finds no device: {complaint}")
    machine = lines[0][1]
    if machine["device"]["platform"] == "cpu":
        kind = machine["device"]["kind"]
        raise ResultsError(f"JAX finds no GPU, only {kind!r}, which would take hours. Try what works there: --tiny.")
    return machine, lambda *args: measure_apart(folder, *args)


def measure_here(table: Table, rows: Sequence[Row], save: Save, seconds: float) -> None:
    """A job in this process, in little; peak memory is not to be had there."""
    import jax

    from benchmarks._gpu_measure import measure

    with jax.numpy_dtype_promotion("standard"):
        measure(table, rows, save, tiny=True)


def measure_apart(
    folder: pathlib.Path, table: Table, rows: Sequence[Row], save: Save, seconds: float, tiny: bool = False
) -> None:
    """A job in a process of its own; if that dies, all its rows that it said nothing of have failed."""
    job = {"table": table.key, "rows": [row.key for row in rows], "tiny": tiny}
    lines, complaint = _run(job, seconds, folder)
    for key, record in lines:
        save(key, record)
    if complaint is not None:
        told = {key for key, _ in lines}
        for row in rows:
            if row.key not in told:
                save(row.key, {"error": complaint})


def _run(job: dict[str, Any], seconds: float, folder: pathlib.Path) -> tuple[list[list[Any]], str | None]:
    """The lines that a process of `_gpu_measure` wrote, and how it failed, if it did."""
    from benchmarks._gpu_measure import first_line

    # Programs that were compiled once, and how XLA tuned them, serve the rows that are compared with them.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / ".cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1",
    }
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "benchmarks._gpu_measure", json.dumps(job)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=root, env=cache | os.environ, timeout=max(seconds, 0.1)
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode == 0:
        return lines, None
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return lines, first_line(f"its process ended with {done.returncode}: {said[-1] if said else 'nothing said'}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its child processes end with it
    sys.exit(main())
