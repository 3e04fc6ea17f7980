"""The base class of reports: tables with notes below them, printed as text and shown as HTML in a notebook."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, TypeVar

from .._base import escape_controls
from ._table import DEFAULT_WIDTH, Table, draw_html_note, draw_html_table, draw_table, measure_width, wrap_note

Row = TypeVar("Row")

# The colors of the system, dark ones too.
_PAGE_STYLE = ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:1.5em}p{max-width:50em}"


class Report(abc.ABC):
    """Base class of results that people read: a text when printed, a page in a notebook.

    A subclass returns its tables from `_list_tables` and its notes from `_list_notes`. The text is as wide as the
    terminal, or as `COLUMNS` in the environment. Without a terminal, tables are 80 characters wide, and each
    note is one line.
    """

    @abc.abstractmethod
    def _list_tables(self, width: int | None) -> Sequence[Table]:
        """Returns the tables for a terminal of this width, or for a notebook if `width` is None."""

    @abc.abstractmethod
    def _list_notes(self) -> Sequence[str]:
        """Returns the paragraphs below the tables."""

    def __str__(self) -> str:
        measured = measure_width()
        width = measured or DEFAULT_WIDTH
        tables = [draw_table(table, width) for table in map(_escape_table, self._list_tables(width))]
        return "\n\n".join([*tables, "\n".join(wrap_note(note, measured) for note in self._list_escaped_notes())])

    def _repr_html_(self) -> str:
        tables = map(_escape_table, self._list_tables(None))
        return "".join([*map(draw_html_table, tables), *map(draw_html_note, self._list_escaped_notes())])

    def _list_escaped_notes(self) -> list[str]:
        return [escape_controls(note, keep="") for note in self._list_notes()]


def _escape_table(table: Table) -> Table:
    """Escapes control characters in the names of modules, functions and files."""
    rows = [[escape_controls(cell, keep="") for cell in row] for row in table.rows]
    return dataclasses.replace(table, rows=rows)


def draw_document(report: Report, title: str) -> str:
    """Draws a report as a complete HTML document."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_PAGE_STYLE}</style></head><body>{report._repr_html_()}</body></html>\n"
    )


def find_row(rows: Iterable[Row], path: str, kind: str, listed: str) -> Row:
    """Returns the row at a path; its KeyError reads "No {kind} at ...; those {listed} are ..."."""
    by_path: dict[str, Any] = {row.path: row for row in rows}  # type: ignore[attr-defined]
    if path in by_path:
        return by_path[path]
    raise KeyError(f"No {kind} at {path!r}. Those {listed} are {', '.join(map(repr, by_path))}.")


def find_largest(rows: Sequence[Row], key: Callable[[Row], Any], most: int) -> list[Row]:
    """Returns the `most` rows with the largest keys, in the given order."""
    largest = set(sorted(rows, key=key, reverse=True)[:most])
    return [row for row in rows if row in largest]


def list_lines(sentences: Iterable[object]) -> str:
    """Returns indented lines for the message of an error, each after a line break."""
    return "".join(f"\n  {escape_controls(str(sentence), keep='')}" for sentence in sentences)


def make_plain(value: Any) -> Any:
    """Returns a dataclass as a dictionary of its fields, and tuples as lists, also inside of each other."""
    if dataclasses.is_dataclass(value):
        return {field.name: make_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [*map(make_plain, value)] if isinstance(value, tuple) else value
