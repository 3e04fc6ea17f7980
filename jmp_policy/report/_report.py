"""A report: tables with notes below them, as text in a terminal and as HTML in a notebook."""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, TypeVar

from .._base import escape_controls
from ._table import Table, draw_html_note, draw_html_table
from ._terminal import DEFAULT_WIDTH, draw_table, measure_width, wrap_note

Row = TypeVar("Row")


# The colors of the system, dark ones too.
_PAGE_STYLE = ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:1.5em}p{max-width:50em}"


class Report(abc.ABC):
    """A result that people read: a text when printed, a page in a notebook.

    A subclass says in `_list_tables` and `_list_notes` what there is to read, and nothing of how it is drawn. The text
    is as wide as the terminal; `COLUMNS` in the environment says otherwise. Where there is no terminal, tables are 80
    characters wide, and a note has one line.

    >>> from jmp_policy.report import Column, Report, Table
    >>> class Prices(Report):
    ...     def _list_tables(self, width):
    ...         return [Table([Column("fruit"), Column("price", is_number=True)], [("apple", "1"), ("fig", "10")])]
    ...
    ...     def _list_notes(self):
    ...         return ["prices in <cents>"]
    >>> print(Prices())
    fruit  price
    ────────────
    apple      1
    fig       10
    <BLANKLINE>
    prices in <cents>
    >>> Prices()._repr_html_().partition("</table>")[2]
    '<p>prices in &lt;cents&gt;</p>'
    """

    @abc.abstractmethod
    def _list_tables(self, width: int | None) -> Sequence[Table]:
        """The tables, for a terminal of so many columns or, where `width` is `None`, for a notebook."""

    @abc.abstractmethod
    def _list_notes(self) -> Sequence[str]:
        """The paragraphs below the tables."""

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
    """Escapes control characters in the names of modules, functions and files that cells show."""
    rows = [[escape_controls(cell, keep="") for cell in row] for row in table.rows]
    headings = None if table.headings is None else [escape_controls(heading, keep="") for heading in table.headings]
    return dataclasses.replace(table, rows=rows, headings=headings)


def draw_document(report: Report, title: str, note: str = "") -> str:
    """A report as a whole HTML document, for a file.

    Args:
      report: what is in it.
      title: the title of the window.
      note: a paragraph before the report.

    >>> from jmp_policy.report import Report, draw_document
    >>> class Nothing(Report):
    ...     def _list_tables(self, width):
    ...         return []
    ...
    ...     def _list_notes(self):
    ...         return ["nothing was found"]
    >>> draw_document(Nothing(), "R & D").partition("<title>")[2].partition("<style>")[0]
    'R &amp; D</title>'
    """
    before = draw_html_note(note) if note else ""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_PAGE_STYLE}</style></head><body>{before}{report._repr_html_()}</body></html>\n"
    )


def find_row(rows: Iterable[Row], path: str, kind: str, listed: str) -> Row:
    """Finds the row at a path.

    Args:
      rows: objects with a `path`.
      path: module names joined by `/`.
      kind: what the error calls a thing that has a row.
      listed: what was done to all of them, for the error.

    Raises:
      KeyError: no row has this path.
    """
    by_path: dict[str, Any] = {row.path: row for row in rows}  # type: ignore[attr-defined]
    if path in by_path:
        return by_path[path]
    raise KeyError(f"No {kind} at {path!r}. Those {listed} are {', '.join(map(repr, by_path))}.")
