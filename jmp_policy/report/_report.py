"""Tables with notes below them: text in a terminal, HTML in a notebook."""

import dataclasses
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      header: the text above it.
      is_number: whether its cells stand on the right; a text stands on the left.
      wraps: whether a cell may go on in the next line where the terminal is narrow.
    """

    header: str
    is_number: bool = False
    wraps: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
      columns: its columns.
      rows: the texts of each row, as many as there are columns.
      gap: how many spaces stand between two columns in a terminal.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    gap: int = 2


class Report:
    """A result that people read: a text when printed, a page in a notebook.

    A subclass says in `_list_tables` and `_list_notes` what there is to read, and nothing of how it is drawn.

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

    _wraps_notes = True
    """Whether notes are broken at the width of the terminal."""

    def _list_tables(self, width: int | None) -> Sequence[Table]:
        """The tables, for a terminal of so many columns or, where `width` is `None`, for a notebook."""
        raise NotImplementedError

    def _list_notes(self) -> Sequence[str]:
        """The paragraphs below the tables."""
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        width = Console().width
        tables = [_print_rich(_make_rich_table(table), width) for table in self._list_tables(width)]
        notes = "\n".join(self._list_notes())
        return "\n\n".join([*tables, _print_rich(notes, width) if self._wraps_notes else notes])

    def _repr_html_(self) -> str:
        notes = (f"<p>{escape(note)}</p>" for note in self._list_notes())
        return "".join([*map(_draw_html, self._list_tables(None)), *notes])


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


def _make_rich_table(table: Table) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, table.gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for column in table.columns:
        if column.is_number:
            drawn.add_column(column.header, justify="right", no_wrap=not column.wraps)
        else:
            drawn.add_column(column.header, overflow="fold", no_wrap=not column.wraps)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _print_rich(part: "RichTable | str", width: int) -> str:
    """Plain text, without what follows the last word of each line."""
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, color_system=None).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _draw_html(table: Table) -> str:
    """A table as HTML.

    >>> _draw_html(Table([Column("a")], [["<1>"]]))
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    head = _draw_html_row("th", (column.header for column in table.columns))
    body = "".join(_draw_html_row("td", row) for row in table.rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _draw_html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
