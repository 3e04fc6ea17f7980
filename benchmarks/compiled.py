"""What programs cost on a TPU or an H100, by what their compilers say, on any machine.

Run from the root of the repository:

    python -m benchmarks.compiled tpu|gpu|cpu [--only TABLE ...] [--json PATH]

Whole train steps and forward passes are compiled for a TPU v5e or an H100 that need not be there, and are never run.
What each reads and writes, its temporaries, its peak memory and the products that were chosen are facts of the compiled
program: the same each time, and no measurement of seconds. `--json` keeps what was compiled after each program; a run
that was cut off goes on from there, if nothing has changed since.
"""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks._compiled import Figures, figures, products
from benchmarks._compiled_formats import float8, int8
from benchmarks._compiled_steps import Entry, Row, autocast, half_optimizer, optimizer, zero_cost
from benchmarks._markdown import table
from benchmarks._targets import TARGETS, Target


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
      title: what it says.
      labels: the headers of the labels of its rows.
      rows: makes its rows.
    """

    title: str
    labels: tuple[str, ...]
    rows: Callable[[], Iterator[Row]]


TABLES = {
    "zero_cost": Table(
        "A train step with `with_policy`, over others", ("model", "API", "policy", "ours over"), zero_cost
    ),
    "autocast": Table(
        "A train step with `autocast`, over dtypes by hand", ("model", "autocast to"), autocast
    ),
    "optimizer": Table(
        "A train step of 100 M float32 parameters, in multiples of their bytes", ("compute", "step"), optimizer
    ),
    "half": Table(
        "A train step of 100 M bfloat16 parameters, in multiples of 4 bytes each", ("optimizer",), half_optimizer
    ),
    "float8": Table(
        "Loss, gradients and next state in float8, over bfloat16", ("model", "whose", "recipe"), float8
    ),
    "int8": Table(
        "A GPT in 8 and 4 bits, over bfloat16", ("program", "whose", "format"), int8
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a compiled program says of itself.

    Attributes:
      figures: its figures.
      products: how many products it has, by the dtypes of their operands.
    """

    figures: Figures
    products: dict[str, int]


class Measurements:
    """Programs compiled for a target, each once, and kept in a file if there is one.

    Args:
      target: what to compile for.
      path: the file. What it has of the same sources and versions is not compiled again.
    """

    def __init__(self, target: Target, path: pathlib.Path | None = None):
        self._target, self._path = target, path
        self._origin = {"target": target.name, **versions(), "sources": _hash_sources()}
        self._measured: dict[str, Measured | None] = {}
        if path is not None and path.exists():
            self._read(json.loads(path.read_text()))

    def measure(self, entry: Entry) -> Measured | None:
        """What a program says of itself; `None` where a library that makes it is not installed."""
        if entry.name not in self._measured:
            print(f"compiling {entry.name}", flush=True)
            self._measured[entry.name] = self._compile(entry)
            self._write()
        return self._measured[entry.name]

    def _compile(self, entry: Entry) -> Measured | None:
        try:
            program = entry.make()
        except ImportError:
            return None
        compiled = self._target.compile(program)
        jax.clear_caches()  # programs of 100 M parameters are large, and no other is like them
        return Measured(figures(compiled), dict(sorted(products(compiled).items())))

    def _read(self, kept: dict[str, Any]) -> None:
        if kept["origin"] != self._origin:
            print(f"{self._path} is of other sources or versions, and is written anew", flush=True)
            return
        for name, found in kept["programs"].items():
            self._measured[name] = found and Measured(Figures(**found["figures"]), found["products"])

    def _write(self) -> None:
        if self._path is not None:
            programs = {name: found and dataclasses.asdict(found) for name, found in self._measured.items()}
            self._path.write_text(json.dumps({"origin": self._origin, "programs": programs}, indent=1))


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS, help="a TPU v5e, an H100, or the CPU of this machine")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE",
                        help=f"some of: {', '.join(TABLES)}")  # fmt: skip
    parser.add_argument("--json", metavar="PATH", type=pathlib.Path, help="keep what was compiled in this file")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # with the compilers installed, JAX would look for their devices
    try:
        target = TARGETS[options.target]()
    except ModuleNotFoundError as error:
        parser.exit(1, f"{error}\n")
    measurements = Measurements(target, options.json)
    with jax.numpy_dtype_promotion("standard"):
        tables = {name: report(TABLES[name], measurements) for name in options.only}
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"\n{target.name}, {named}")
    for name, written in tables.items():
        print(f"\n{TABLES[name].title}:\n\n{written}")


def report(made: Table, measurements: Measurements) -> str:
    """A table, in Markdown."""
    rows = list(made.rows())
    multiples = rows[0].unit is not None
    figure_names = ["bytes", "temporaries", "peak", "in place", "bytes more"] if multiples else _RATIOS
    cells = [[*row.labels, *(_multiples if multiples else _ratios)(row, measurements)] for row in rows]
    return table([*made.labels, *figure_names, "products"], [row + [""] * (len(cells[0]) - len(row)) for row in cells])


_RATIOS = ["flops", "bytes", "temporaries", "peak"]


def _ratios(row: Row, measurements: Measurements) -> list[str]:
    assert row.over is not None
    mine, other = measurements.measure(row.program), measurements.measure(row.over)
    if mine is None or other is None:
        return ["not installed"]
    ratios = mine.figures.over(other.figures)
    shown = (ratios.flops, ratios.bytes_accessed, ratios.temporaries, ratios.peak)
    return [*(f"{ratio:.3f}" for ratio in shown), _list(mine.products)]


def _multiples(row: Row, measurements: Measurements) -> list[str]:
    assert row.unit is not None
    mine = measurements.measure(row.program)
    other = None if row.over is None else measurements.measure(row.over)
    if mine is None:
        return ["not installed"]
    multiples = mine.figures.per(row.unit)
    shown = (multiples.bytes_accessed, multiples.temporaries, multiples.peak, multiples.aliased)
    more = f"{multiples.bytes_accessed - other.figures.per(row.unit).bytes_accessed:+.2f}" if other else ""
    return [*(f"{multiple:.2f}" for multiple in shown), more, _list(mine.products)]


def _list(counted: dict[str, int]) -> str:
    return ", ".join(f"{count} {dtypes}" for dtypes, count in counted.items())


def versions() -> dict[str, str]:
    """The versions that the figures depend on, of those that are installed."""
    found = {}
    for name in ("jax", "flax", "optax", "libtpu", "jax-cuda12-plugin"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _hash_sources() -> str:
    root = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("benchmarks", "jmp_policy"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
