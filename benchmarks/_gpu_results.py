"""The file of results, which is written whole after each row, and its tables in Markdown."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks._gpu_rows import Table, tables
from benchmarks._harness import name_device, write_whole
from benchmarks._results import markdown_table

NOT_MEASURED = "not measured"

Results = dict[str, Any]


class ResultsError(Exception):
    """A device that is not there, or a file of results that this benchmark must not touch."""


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
