"""Measurements of a benchmark: tables that are stored in a file, whose columns tell whether they are reproducible."""

import argparse
import dataclasses
import hashlib
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class ResultTable:
    """A table of results.

    Attributes:
      name: which one it is among the tables of its benchmark, as `steps`.
      title: its title.
      header: the names of its columns.
      rows: the texts of its cells.
      timed: the columns that differ from run to run, such as seconds; the cells of all others repeat exactly, for the
        same versions on the same device.
      notes: facts that a reader needs, and for each row in which another library is better, the reason.
    """

    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    timed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert set(self.timed) <= set(self.header), self.timed
        assert all(len(row) == len(self.header) for row in self.rows), self.header

    @classmethod
    def of(
        cls,
        name: str,
        title: str,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        timed: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> "ResultTable":
        """A table of rows of any kind."""
        return cls(name, title, tuple(header), tuple(map(tuple, rows)), tuple(timed), tuple(notes))

    def to_markdown(self) -> str:
        """The table and its notes.

        >>> print(ResultTable("bytes", "Bytes", ("by", "bytes"), (("a", "1"),), notes=("One step.",)).to_markdown())
        | by | bytes |
        |---|---|
        | a | 1 |
        <BLANKLINE>
        - One step.
        """
        notes = "\n".join(f"- {note}" for note in self.notes)
        return markdown_table(self.header, self.rows) + (f"\n\n{notes}" if notes else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns the table as JSON stores it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "ResultTable":
        """The table that `to_dict` was asked of, also after JSON made lists of its tuples."""
        return cls.of(**kept)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown.

    >>> print(markdown_table(["name", "value"], [["a", "1"]]))
    | name | value |
    |---|---|
    | a | 1 |
    """
    written = ["| " + " | ".join(line) + " |" for line in (header, *rows)]
    return "\n".join([written[0], "|" + "---|" * len(header), *written[1:]])


def print_tables(tables: Iterable[ResultTable]) -> None:
    """Prints tables as they come.

    >>> print_tables([ResultTable("bytes", "Bytes", ("by", "bytes"), (("a", "1"),))])
    <BLANKLINE>
    Bytes:
    <BLANKLINE>
    | by | bytes |
    |---|---|
    | a | 1 |
    """
    for made in tables:
        print(f"\n{made.title}:\n\n{made.to_markdown()}", flush=True)


def run_alone(description: str | None, tables: Callable[[bool], Iterable[ResultTable]]) -> None:
    """The command line of one benchmark: measures and prints its tables, with `--quick` at small sizes."""
    import jax

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that all works")
    options = parser.parse_args()
    with jax.numpy_dtype_promotion("standard"):
        print_tables(tables(options.quick))


def hash_sources() -> str:
    """Returns a digest of the sources of the benchmarks and of the package: results belong to one digest."""
    root = pathlib.Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder in ("benchmarks", "jmp_policy"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def list_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those libraries that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
