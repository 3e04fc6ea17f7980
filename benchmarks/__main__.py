"""Runs the benchmarks, stores their measurements, and writes the page of results.

Run from the root of the repository:

    python -m benchmarks [--quick] [--only NAME ...] [--out DIR]            # runs benchmarks, and writes the page
    python -m benchmarks --list                                             # says what there is
    python -m benchmarks report [--out DIR]                                 # writes the page again

Each runs in a process of its own. One that fails, or that needs a library that is not installed, says so in the results
and stops no other.
"""

import argparse
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from benchmarks import _harness
from benchmarks._report import write_report
from benchmarks._suites import SUITES


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return _report(given[1:]) if given[:1] == ["report"] else _run(given)
    except _harness.HarnessError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes of every benchmark, kept in another folder")
    parser.add_argument("--only", nargs="+", choices=SUITES, metavar="NAME", help="some of those that --list names")
    parser.add_argument("--list", action="store_true", help="say what there is")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="where results, page and plots go")
    parser.add_argument("--jobs", type=int, metavar="N", help="how many at a time (default: 1, or all cores if quick)")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(f"{name:20} {question}" for name, question in SUITES.items()))
        return 0
    names = options.only or list(SUITES)
    root = options.out or (pathlib.Path(tempfile.mkdtemp()) if options.quick else _harness.FOLDER)
    if options.quick:
        _harness.protect_results(root, names)
    failed = []
    for name, measured in _harness.run_suites(names, options.quick, options.jobs or _count_jobs(options.quick)):
        if "error" in measured:
            failed.append(name)
        if "device" in measured:
            path = _harness.results_path(root, measured["device"])
            merged = _harness.merge_results(_harness.read_results(path), {name: measured}, list(SUITES))
            _harness.write_results(path, merged)
    print(write_report(root))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _count_jobs(quick: bool) -> int:
    """Programs that run beside others take longer: a quick run asks whether they run, not how long."""
    return (os.cpu_count() or 1) if quick else 1


def _report(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description="Writes RESULTS.md and its plots.")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=_harness.FOLDER, help="where they are")
    print(write_report(parser.parse_args(argv).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
