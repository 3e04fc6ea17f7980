"""Runs benchmarks one after the other, each in its own process, and saves their measurements in a file."""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

LAYOUT = 1
"""Of the file of results."""

FOLDER = pathlib.Path(__file__).parent

Results = dict[str, Any]
"""The file: its layout, and by name what each suite measured, with its date, versions, device and seconds."""


class HarnessError(Exception):
    """Error for results that must not be overwritten, or cannot be read."""


def run_suites(names: Sequence[str], quick: bool, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs suites, `jobs` at a time, reports the outcome of each on standard error, and yields name and measurements.

    In these, `error` has the reason of a failure, and `missing` the library that is not installed.
    """
    pool = concurrent.futures.ThreadPoolExecutor(jobs)
    try:
        running = {pool.submit(run_suite, name, quick): name for name in names}
        for done in concurrent.futures.as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or Ctrl-C, no other suite begins


def run_suite(name: str, quick: bool) -> dict[str, Any]:
    """Runs a suite in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = pathlib.Path(folder) / "measured.json", pathlib.Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks._run", name, str(path), *(["--quick"] if quick else [])]
        began = time.monotonic()
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(command, stdout=file, stderr=file, cwd=FOLDER.parent, env=_environ(quick))
        measured = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tables": []}
        measured |= {"seconds": round(time.monotonic() - began, 1), "quick": quick}
        said = log.read_text(encoding="utf-8", errors="replace")  # a process may be cut off inside of a character
    lines = [line for line in said.splitlines() if line.strip()]
    if done.returncode and "error" not in measured:
        measured["error"] = f"Its process ended with {done.returncode}: {lines[-1] if lines else 'it said nothing'}"
    _announce(name, measured, lines)
    return measured


def _environ(quick: bool) -> dict[str, str]:
    """Returns the environment of a suite. Programs of a quick run run a few times, so compiling dominates."""
    fast = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"} if quick else {}
    return {**fast, **os.environ}


def _announce(name: str, measured: dict[str, Any], lines: Sequence[str]) -> None:
    said = f"{name}: {describe_outcome(measured)}, {measured['seconds']:.0f} s"
    tail = [f"  {line}" for line in lines[-15:]] if "error" in measured else []
    print("\n".join([said, *tail]), file=sys.stderr, flush=True)


def describe_outcome(measured: dict[str, Any]) -> str:
    """Describes the outcome of a suite in a few words.

    >>> describe_outcome({"tables": [], "missing": "qwix"})
    'not measured: needs qwix'
    """
    if "error" in measured:
        return f"failed: {measured['error']}"
    if "missing" in measured:
        return f"not measured: needs {measured['missing']}"
    count = len(measured["tables"])
    return "1 table" if count == 1 else f"{count} tables"


def results_path(root: pathlib.Path, device: dict[str, Any]) -> pathlib.Path:
    """Returns the path of the results of a device. `benchmarks.gpu` has `<device>.json` for GPUs.

    >>> results_path(pathlib.Path("benchmarks"), {"platform": "cpu", "kind": "cpu"}).as_posix()
    'benchmarks/results/cpu.json'
    >>> results_path(pathlib.Path("benchmarks"), {"platform": "gpu", "kind": "NVIDIA H100 80GB HBM3"}).name
    'nvidia-h100-80gb-hbm3-suites.json'
    """
    is_cpu = device["platform"] == "cpu"
    return root / "results" / ("cpu.json" if is_cpu else f"{name_device(device['kind'])}-suites.json")


def name_device(kind: str) -> str:
    """Returns the name of a device in the names of files."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")


def find_results(root: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files of results in a folder, with the CPU first."""
    folder = root / "results"
    return [path for path in [folder / "cpu.json", *sorted(folder.glob("*-suites.json"))] if path.exists()]


def protect_results(root: pathlib.Path, names: Sequence[str]) -> None:
    """Checks, before a quick run, that the folder has no full-size results of its suites.

    Raises:
      HarnessError: it has some, for any device. The device of a suite is not known yet.
    """
    for path in find_results(root):
        suites = read_results(path)["suites"]
        kept = [name for name in names if name in suites and not suites[name]["quick"]]
        if kept:
            raise HarnessError(f"{path} has {', '.join(kept)} at real sizes. Name another folder: --out DIR.")


def read_results(path: pathlib.Path) -> Results:
    """Reads the results of a file, if it exists."""
    if not path.exists():
        return {"layout": LAYOUT, "suites": {}}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("layout") != LAYOUT or "suites" not in found:
        raise HarnessError(f"{path} is not a file of results of `python -m benchmarks` of layout {LAYOUT}.")
    return found


def merge_results(results: Results, measured: dict[str, dict[str, Any]], order: Sequence[str]) -> Results:
    """Replaces the results of the suites that were measured.

    A suite whose library is not installed keeps its earlier results.
    """
    old = results["suites"]
    new = {name: found for name, found in measured.items() if not ("missing" in found and name in old)}
    merged = {**old, **new}
    rank = {name: place for place, name in enumerate(order)}
    return {**results, "suites": {name: merged[name] for name in sorted(merged, key=lambda name: rank.get(name, 999))}}


def write_results(path: pathlib.Path, results: Results) -> None:
    """Writes the file atomically."""
    write_whole(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Writes a file whole or not at all, so that who stops a benchmark loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
