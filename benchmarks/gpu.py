"""Measurements that need a device: the time of a step and the memory that it takes.

Run from the root of the repository, on a machine with a GPU:

    python -m benchmarks.gpu [--minutes 9] [--only TEXT]

Each row is measured in a process of its own and saved at once, to `benchmarks/results/<device>.json` and, as tables,
`<device>.md`. Stored rows are not measured again: the same command goes on where the last one stopped. `--tiny`
measures small programs, on any device, to see that everything works.
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
from collections.abc import Sequence
from typing import Any

from benchmarks._gpu_models import Table, tables
from benchmarks._harness import name_device, write_whole
from benchmarks._results import markdown_table

LONGEST_ROW = 60.0
"""What a row may take, in seconds: most of it is the compiler's. With less time left none is begun."""

START_SECONDS = 300.0
"""What JAX may take to find the device."""

NOT_MEASURED = "not measured"

Results = dict[str, Any]


class ResultsError(Exception):
    """A device that is not there, or a file of results that this benchmark must not touch."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit status: 0 when every row is there, 1 when not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop (%(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help='rows with this in their name, such as "gpt2/"')
    parser.add_argument("--results", type=pathlib.Path, metavar="DIR", help="where the results are")
    parser.add_argument("--tiny", action="store_true", help="small things, to see that all works")
    options = parser.parse_args(argv)
    default = pathlib.Path(tempfile.mkdtemp()) if options.tiny else pathlib.Path(__file__).parent / "results"
    folder = options.results or default
    try:
        machine = find_device(options.tiny, folder)
        path = results_path(folder, machine["device"]["kind"], options.tiny)
        results = load_results(path, machine)
    except ResultsError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    left = measure_missing(results, path, options)
    print("\n" + write_report(results))
    if left:
        print(f"{left} rows are left after {options.minutes:g} minutes: the same command goes on.")
    return 1 if left else 0


def find_device(tiny: bool, folder: pathlib.Path) -> dict[str, Any]:
    """Returns what a process of its own says of the machine, as this one must not hold the device."""
    try:
        lines, complaint = start({}, START_SECONDS, folder)
    except TimeoutError:
        lines, complaint = [], f"it has not started within {START_SECONDS:g} seconds"
    if not lines:
        raise ResultsError(f"JAX finds no device: {complaint}")
    machine = lines[0][1]
    if machine["device"]["platform"] == "cpu" and not tiny:
        kind = machine["device"]["kind"]
        raise ResultsError(f"JAX finds no GPU, only {kind!r}, which would take hours. Try what works there: --tiny.")
    return machine


def measure_missing(results: Results, path: pathlib.Path, options: argparse.Namespace) -> int:
    """Measures the rows that the results lack, saves each at once, and returns how many are left."""
    end = time.monotonic() + 60 * options.minutes
    rows = [row for table in tables() for row in table.rows if options.only in row.key]
    missing = [row.key for row in rows if row.key not in results["rows"]]
    for index, key in enumerate(missing):
        seconds = end - time.monotonic()
        if seconds < LONGEST_ROW:
            return len(missing) - index
        try:
            lines, complaint = start({"row": key, "tiny": options.tiny}, seconds, path.parent)
        except TimeoutError:
            return len(missing) - index
        record = dict(lines).get(key) or {"error": complaint or "It said nothing."}
        results["rows"][key] = record
        save_results(path, results)
        print(f"{key}: {record.get('error') or '{:.3f} ms'.format(1e3 * record['seconds'][0])}", flush=True)
    return 0


def start(job: dict[str, Any], seconds: float, folder: pathlib.Path) -> tuple[list[list[Any]], str | None]:
    """Returns the lines that a process of `_gpu_measure` wrote, and how it failed, if it did."""
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


def results_path(folder: pathlib.Path, kind: str, tiny: bool = False) -> pathlib.Path:
    """Returns the file of the results of a kind of device.

    >>> results_path(pathlib.Path("results"), "NVIDIA H100 80GB HBM3").name
    'nvidia-h100-80gb-hbm3.json'
    """
    return folder / f"{name_device(kind)}{'-tiny' if tiny else ''}.json"


def load_results(path: pathlib.Path, machine: dict[str, Any]) -> Results:
    """The results so far. Raises `ResultsError` if they were measured with other versions."""
    if not path.exists():
        return {**machine, "rows": {}}
    found = read_results(path)
    if found["versions"] != machine["versions"]:
        raise ResultsError(
            f"{path} was measured with {_say(found['versions'])}, and here is {_say(machine['versions'])}: times of "
            "both in one table would be no comparison. Move it away, or name another folder: --results DIR."
        )
    return found


def read_results(path: pathlib.Path) -> Results:
    """The results of a file that is there."""
    return json.loads(path.read_text(encoding="utf-8"))


def save_results(path: pathlib.Path, results: Results) -> None:
    """Writes the file, and its tables."""
    write_whole(path, json.dumps(results, indent=1) + "\n")
    write_whole(path.with_suffix(".md"), write_report(results))


def write_report(results: Results) -> str:
    """Tables in Markdown, in which rows without results read "not measured", and the titles of tables without rows."""
    rows = results["rows"]
    parts = [f"# {results['device']['kind']}", f"Measured with {_say(results['versions'])}."]
    is_measured = lambda table: any(row.key in rows for row in table.rows)
    for table in filter(is_measured, tables()):
        parts += [f"**{table.title}**", write_table(table, rows)]
    left = [table.title for table in tables() if not is_measured(table)]
    return "\n\n".join([*parts, f"Not measured: {'; '.join(left)}."] if left else parts) + "\n"


def write_table(table: Table, rows: dict[str, Any]) -> str:
    """One table in Markdown."""
    lines = [[row.name, *_cells(table, rows.get(row.key))] for row in table.rows]
    return markdown_table([" ", *_header(table)], lines)


def _header(table: Table) -> list[str]:
    counts = [f"{table.items} a second"] if table.items else []
    return ["milliseconds a step", "over the first", *counts, "peak memory, GB"]


def _cells(table: Table, record: dict[str, Any] | None) -> Sequence[str]:
    others = len(_header(table)) - 1
    if record is None:
        return [NOT_MEASURED, *[""] * others]
    if "error" in record:
        return [f"failed: {record['error']}", *[""] * others]
    ratio = _show_spread(record["over_first"], 1, "{:.3f}") if "over_first" in record else ""
    cells = [_show_spread(record["seconds"], 1e3, "{:.2f}"), ratio]
    counts = [f"{record['items_per_second']:,.0f}"] if table.items else []
    return [*cells, *counts, f"{record['peak_bytes'] / 1e9:.2f}" if "peak_bytes" in record else NOT_MEASURED]


def _show_spread(values: Sequence[float], unit: float, form: str) -> str:
    middle, low, high = (form.format(unit * value) for value in values)
    return middle if low == middle == high else f"{middle} ({low} to {high})"


def _say(versions: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items() if value is not None) or "nothing else"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its child processes end with it
    sys.exit(main())
