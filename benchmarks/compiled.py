"""Measures the cost of programs on a TPU or an H100 by the analysis of their compilers, on any machine.

Run from the root of the repository:

    python -m benchmarks.compiled tpu|gpu|cpu [--only TABLE ...] [--json PATH]

Compiles whole train steps and forward passes for a TPU v5e or an H100, without running them. The bytes that each reads
and writes, its temporaries, its peak memory and its matmuls are facts of the compiled program. They repeat exactly, and
none of them is a time. `--json` saves results after each program, and each complete table, with the date, the versions
and the target. An interrupted run continues from there if nothing has changed. A run of some tables leaves the others
as they are. `read_tables` reads such a file.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks._compiled import Figures, figures, products
from benchmarks._compiled_formats import float8, int8, int8_static
from benchmarks._compiled_steps import Entry, Row, autocast, checks, half_optimizer, optimizer, small_state, zero_cost
from benchmarks._results import ResultTable, hash_sources, list_versions
from benchmarks._targets import TARGETS, Target


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the report.

    Attributes:
      title: its title.
      labels: the headers of the labels of its rows.
      rows: makes its rows.
      options: compiler options, by the name of the only target that they are for.
    """

    title: str
    labels: tuple[str, ...]
    rows: Callable[[], Iterator[Row]]
    options: dict[str, dict[str, Any]] | None = None


CUBLAS = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""Without a device to try them on, XLA computes every product in a Triton fusion: with this, in cuBLAS."""


LIBRARIES = ("jax", "flax", "optax", "libtpu", "jax-cuda12-plugin")
"""Those whose versions the measurements depend on."""

_ZERO_COST = "A train step with `with_policy`, over others"
_FLOAT8 = "Loss, gradients and next state in float8, over bfloat16"
_INT8 = "A GPT in 8 and 4 bits, over bfloat16"
_int8_cublas = functools.partial(int8, served=("int8", "int8 weights", "int4/64"), decoded=())

TABLES = {
    "zero_cost": Table(_ZERO_COST, ("model", "API", "policy", "ours over"), zero_cost),
    "zero_cost_cublas": Table(f"{_ZERO_COST}, by cuBLAS", ("model", "API", "policy", "ours over"), zero_cost, CUBLAS),
    "autocast": Table(
        "A train step with `autocast`, over dtypes by hand", ("model", "autocast to"), autocast
    ),
    "optimizer": Table(
        "A train step of 100 M float32 parameters, in multiples of their bytes", ("compute", "step"), optimizer
    ),
    "checks": Table(
        "A float16 train step of 100 M parameters that checks more, over one that checks gradients",
        ("model", "also"),
        checks,
    ),
    "half": Table(
        "A train step of 100 M bfloat16 parameters, in multiples of 4 bytes each", ("optimizer",), half_optimizer
    ),
    "small_state": Table(
        "AdamW of 100 M float32 parameters with small moments, in bytes for each", ("program", "optimizer"), small_state
    ),
    "float8": Table(_FLOAT8, ("model", "whose", "recipe"), float8),
    "float8_cublas": Table(f"{_FLOAT8}, by cuBLAS", ("model", "whose", "recipe"), float8, CUBLAS),
    "int8": Table(_INT8, ("program", "whose", "format"), int8),
    "int8_static": Table("A GPT in int8 with static scales, over bfloat16", ("format",), int8_static),
    "int8_cublas": Table(f"{_INT8}, by cuBLAS", ("program", "whose", "format"), _int8_cublas, CUBLAS),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of a compiled program.

    Attributes:
      figures: XLA's analysis.
      products: the number of matmuls by the dtypes of their operands.
    """

    figures: Figures
    products: dict[str, int]


class Measurements:
    """Programs compiled for a target, each once, and optionally saved in a file.

    Args:
      target: the target to compile for.
      path: the file. Its programs with the same sources and versions are not compiled again. Its tables of other runs
        stay until they are made anew.
    """

    def __init__(self, target: Target, path: pathlib.Path | None = None):
        self._target, self._path = target, path
        self._origin = {"target": target.name, **list_versions(LIBRARIES), "sources": hash_sources()}
        self._measured: dict[str, Measured | str] = {}
        self._tables: dict[str, ResultTable] = {}
        self._others: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._read(json.loads(path.read_text(encoding="utf-8"))["runs"])

    def measure(self, entry: Entry, options: dict[str, Any] | None = None) -> Measured | str:
        """Measures a program, or returns the reason why it cannot be measured.

        Args:
          entry: the program.
          options: compiler options, added to the target's.
        """
        name = f"{entry.name}, {options}" if options else entry.name
        if name not in self._measured:
            print(f"compiling {name}", flush=True)
            self._measured[name] = self._compile(entry, options or {})
            self._write()
        return self._measured[name]

    def keep(self, made: ResultTable) -> None:
        """Saves a complete table, in the order of `TABLES`, in place of one of another run."""
        self._tables[made.name] = made
        self._tables = {name: self._tables[name] for name in (*TABLES, made.name) if name in self._tables}
        for run in self._others:
            run["tables"] = [table for table in run["tables"] if table["name"] != made.name]
        self._others = [run for run in self._others if run["tables"]]
        self._write()

    def _compile(self, entry: Entry, options: dict[str, Any]) -> Measured | str:
        target = dataclasses.replace(self._target, options=self._target.options | options)
        try:
            compiled = target.compile(entry.make())
        except ImportError:
            return "not installed"
        except jax.errors.JaxRuntimeError as error:
            print(error, flush=True)
            return "XLA fails"
        jax.clear_caches()  # programs of 100 M parameters are large, and no other is like them
        return Measured(figures(compiled), dict(sorted(products(compiled).items())))

    def _read(self, runs: list[dict[str, Any]]) -> None:
        for run in runs:
            if run["origin"] != self._origin:
                print(f"{self._path} has tables of other sources or versions, whose programs are not used", flush=True)
                self._others.append(run)
                continue
            for name, found in run["programs"].items():
                self._measured[name] = found if isinstance(found, str) else _as_measured(found)
            self._tables = {made.name: made for made in map(ResultTable.from_dict, run["tables"])}

    def _write(self) -> None:
        if self._path is not None:
            as_json = lambda found: found if isinstance(found, str) else dataclasses.asdict(found)
            programs = {name: as_json(found) for name, found in self._measured.items()}
            tables = [made.to_dict() for made in self._tables.values()]
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            run = {"date": date, "origin": self._origin, "tables": tables, "programs": programs}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"runs": [*self._others, run]}, indent=1) + "\n", encoding="utf-8")


def read_tables(path: pathlib.Path) -> tuple[ResultTable, ...]:
    """Reads the tables of a `--json` file."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return tuple(ResultTable.from_dict(table) for run in runs for table in run["tables"])


def _as_measured(found: dict[str, Any]) -> Measured:
    return Measured(Figures(**found["figures"]), found["products"])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
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
    tables = []
    with jax.numpy_dtype_promotion("standard"):
        for name, made in TABLES.items():
            if name in options.only and (made.options is None or options.target in made.options):
                tables.append(tabulate(name, made, measurements, (made.options or {}).get(options.target)))
                measurements.keep(tables[-1])
    named = ", ".join(f"{name} {version}" for name, version in list_versions(LIBRARIES).items())
    print(f"\n{target.name}, {named}")
    for result in tables:
        print(f"\n{result.title}:\n\n{result.to_markdown()}")


def tabulate(name: str, made: Table, measurements: Measurements, options: dict[str, Any] | None = None) -> ResultTable:
    """Makes a table of results. All of its columns repeat exactly."""
    rows = list(made.rows())
    multiples = rows[0].unit is not None
    names = ["bytes", "temporaries", "peak", "in place", "bytes more"] if multiples else _RATIOS
    header = [*made.labels, *names, "products"]
    cells = []
    for row in rows:
        mine = measurements.measure(row.program, options)
        other = None if row.over is None else measurements.measure(row.over, options)
        made_cells = (_list_multiples if multiples else _list_ratios)(row, mine, other)
        cells.append((*row.labels, *made_cells, *[""] * (len(header) - len(row.labels) - len(made_cells))))
    return ResultTable(name, made.title, tuple(header), tuple(cells))


_RATIOS = ["flops", "bytes", "temporaries", "peak"]


def _list_ratios(row: Row, mine: Measured | str, other: Measured | str | None) -> list[str]:
    for found in (mine, other):
        if isinstance(found, str):
            return [found]
    assert isinstance(mine, Measured)
    assert isinstance(other, Measured)
    ratios = mine.figures.over(other.figures)
    shown = (ratios.flops, ratios.bytes_accessed, ratios.temporaries, ratios.peak)
    return [*(f"{ratio:.3f}" for ratio in shown), _list_products(mine)]


def _list_multiples(row: Row, mine: Measured | str, other: Measured | str | None) -> list[str]:
    if isinstance(mine, str):
        return [mine]
    assert row.unit is not None
    multiples = mine.figures.per(row.unit)
    shown = (multiples.bytes_accessed, multiples.temporaries, multiples.peak, multiples.aliased)
    more = ""
    if isinstance(other, Measured):
        more = f"{multiples.bytes_accessed - other.figures.per(row.unit).bytes_accessed:+.2f}"
    return [*(f"{multiple:.2f}" for multiple in shown), more, _list_products(mine)]


def _list_products(measured: Measured) -> str:
    return ", ".join(f"{count} {dtypes}" for dtypes, count in measured.products.items())


if __name__ == "__main__":
    main()
