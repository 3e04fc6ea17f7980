"""Tables and notes as plain text, in which no name is cut into two lines.

A table has the first of three shapes that fits: columns; columns below the first cell of each row, which has a line of
its own; or no columns, and each cell after its header. Lines break between words only, and a name has one word. A name
that is longer than a line runs past the width.

Rich measures, and does not draw: its tables cut words, and inside a notebook they are shown and not returned.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Sequence

from ._table import Column, Table

DEFAULT_WIDTH = 80
"""How wide tables are where nobody says how wide."""

_INDENT = "  "


def measure_width() -> int | None:
    """How many characters a line holds; `None` where nobody says so, as in a file.

    The environment comes first: `COLUMNS`, and in a notebook `JUPYTER_COLUMNS` before it. Then comes the terminal; a
    notebook is as wide as rich takes it to be.
    """
    from rich.console import Console

    console = Console()  # asked only: inside a notebook, what it prints would be shown at once
    for name in ("JUPYTER_COLUMNS", "COLUMNS") if console.is_jupyter else ("COLUMNS",):
        if os.environ.get(name, "").isdecimal() and int(os.environ[name]):
            return int(os.environ[name])
    return console.width or DEFAULT_WIDTH if console.is_terminal or console.is_jupyter else None


def wrap_note(note: str, width: int | None) -> str:
    """A paragraph, all lines but the first indented; one line where there is no width.

    >>> print(wrap_note("encoder/attention/query (!): cast to float32 first", 22))
    encoder/attention/query
      (!): cast to float32
      first
    """
    return note if width is None or _measure(note) <= width else "\n".join(_fill(note.split(), width))


def is_fitting(table: Table, width: int) -> bool:
    """Whether a table has room for each row in one line."""
    return _add_gaps(_measure_columns(table, _measure), table.gap) <= width


def has_columns(table: Table, width: int) -> bool:
    """Whether a table has room for columns, if only below the first cell of each row."""
    return bool(_draw_columns(table, width) or _draw_columns_below(table, width))


def draw_table(table: Table, width: int) -> str:
    """A table in the first shape that fits.

    >>> columns = [Column("module"), Column("operation"), Column("count", is_number=True)]
    >>> table = Table(columns, [("encoder/layers_0", "dot_general", "2"), ("encoder/layers_0", "add", "12")])
    >>> print(draw_table(table, 36))
    module            operation    count
    ────────────────────────────────────
    encoder/layers_0  dot_general      2
    encoder/layers_0  add             12
    >>> print(draw_table(table, 30))
    module
      operation    count
      ──────────────────
    encoder/layers_0
      dot_general      2
      add             12
    >>> print(draw_table(table, 16))
    encoder/layers_0
      operation: dot_general,
        count: 2
      operation: add,
        count: 12
    """
    lines = _draw_columns(table, width) or _draw_columns_below(table, width) or _draw_cells(table, width)
    return "\n".join(lines)


def _draw_columns(table: Table, width: int) -> list[str]:
    """The table, or no lines where it does not fit."""
    if (fitting := _fit_columns(table, width)) is None:
        return []
    return [*_draw_header(table.columns, *fitting), *_draw_rows(table.columns, table.rows, *fitting)]


def _draw_columns_below(table: Table, width: int) -> list[str]:
    """Headings above columns of the other cells, or no lines where these do not fit."""
    first, *others = table.columns
    rest = Table(others, [row[1:] for row in table.rows], table.gap)
    if not others or (fitting := _fit_columns(rest, width - len(_INDENT))) is None:
        return []
    lines = [first.header, *_indent(_draw_header(others, *fitting))]
    for heading, rows in _group_rows(table):
        lines += [wrap_note(heading, width), *_indent(_draw_rows(others, rows, *fitting))]
    return lines


def _draw_cells(table: Table, width: int) -> list[str]:
    """Headings above the other cells, each after its header."""
    headers = [column.header for column in table.columns[1:]]
    lines = []
    for heading, rows in _group_rows(table):
        lines.append(wrap_note(heading, width))
        for row in rows:
            cells = [f"{header}: {cell}" for header, cell in zip(headers, row, strict=True) if cell]
            pieces = [*(f"{cell}," for cell in cells[:-1]), *cells[-1:]]
            lines += _indent(_fill(pieces, width - len(_INDENT)))
    return lines


def _group_rows(table: Table) -> list[tuple[str, list[Sequence[str]]]]:
    """By heading, the other cells of the rows below it; rows that follow each other share one."""
    headings = table.headings or [row[0] for row in table.rows]
    rows = zip(headings, (row[1:] for row in table.rows), strict=True)
    return [(heading, [row for _, row in group]) for heading, group in itertools.groupby(rows, lambda pair: pair[0])]


def _fit_columns(table: Table, width: int) -> tuple[list[int], int] | None:
    """The widths of the columns and the gap between them, or `None` where words would have to be cut."""
    widths = _measure_columns(table, _measure)
    for gap in (table.gap, 1):
        if _add_gaps(widths, gap) <= width:
            return widths, gap
    least = _measure_columns(table, _measure_word)
    if _add_gaps(least, 1) > width:
        return None
    while _add_gaps(widths, 1) > width:
        widest = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        widths[widest] -= 1
    return widths, 1


def _measure_columns(table: Table, measure: Callable[[str], int]) -> list[int]:
    """The width of each column by a measure of what may go on in the next line: headers, and cells that wrap."""
    widths = []
    for index, column in enumerate(table.columns):
        measure_cell = measure if column.wraps else _measure
        widths.append(max([measure(column.header), *(measure_cell(row[index]) for row in table.rows)]))
    return widths


def _measure(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _measure_word(text: str) -> int:
    return max(map(_measure, text.split()), default=0)


def _add_gaps(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _fill(pieces: Iterable[str], width: int, indent: str = _INDENT) -> list[str]:
    """Pieces in lines, of which all but the first are indented; a piece that is longer than a line breaks at spaces."""
    lines: list[str] = []
    for piece in pieces:
        for part in [piece] if _measure(indent + piece) <= width else piece.split():
            if lines and _measure(f"{lines[-1]} {part}") <= width:
                lines[-1] += f" {part}"
            else:
                lines.append(indent + part if lines else part)
    return lines


def _draw_header(columns: Sequence[Column], widths: Sequence[int], gap: int) -> list[str]:
    headers = _draw_rows(columns, [[column.header for column in columns]], widths, gap)
    return [*headers, "─" * _add_gaps(widths, gap)]


def _draw_rows(columns: Sequence[Column], rows: Iterable[Sequence[str]], widths: Sequence[int], gap: int) -> list[str]:
    """Rows in columns that are at least as wide as the words in them."""
    lines = []
    for row in rows:
        cells = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            aligned = map(_align, parts, widths, (column.is_number for column in columns))
            lines.append((" " * gap).join(aligned).rstrip())
    return lines


def _indent(lines: Iterable[str]) -> list[str]:
    return [_INDENT + line for line in lines]


def _wrap_cell(cell: str, width: int) -> list[str]:
    return [cell] if _measure(cell) <= width else _fill(cell.split(), width, indent="")


def _align(text: str, width: int, is_number: bool) -> str:
    space = " " * (width - _measure(text))
    return space + text if is_number else text + space
