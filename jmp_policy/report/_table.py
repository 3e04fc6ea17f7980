"""A table of texts, and what tables and notes are in HTML, where no name is cut into two lines either."""

import dataclasses
import re
from collections.abc import Sequence
from html import escape

_NO_WRAP = "white-space:nowrap"


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
      header: the text above it.
      is_number: whether its cells stand on the right; a text stands on the left.
      wraps: whether a cell may go on in the next line, between two words. A name may not, nor a number with its unit.
    """

    header: str
    is_number: bool = False
    wraps: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
      columns: its columns.
      rows: the texts of each row, as many as there are columns.
      gap: how many spaces stand between two columns in a terminal, if they fit.
      headings: for each row, what stands in place of its first cell where that has a line of its own; by default the
        cell itself.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    gap: int = 2
    headings: Sequence[str] | None = None


def draw_html_note(note: str) -> str:
    """A paragraph as HTML.

    >>> from jmp_policy.report import draw_html_note
    >>> draw_html_note("cast in encoder/query")
    '<p>cast in <span style="white-space:nowrap">encoder/query</span></p>'
    """
    return f"<p>{_keep_words_whole(note)}</p>"


def draw_html_table(table: Table) -> str:
    """A table as HTML. By themselves notebooks set texts on the right.

    >>> draw_html_table(Table([Column("reason", wraps=True)], [["<none>"]])).partition("</thead>")[2]
    '<tbody><tr><td style="text-align:left">&lt;none&gt;</td></tr></tbody></table>'
    """
    head = _draw_html_row("th", table.columns, [column.header for column in table.columns])
    body = "".join(_draw_html_row("td", table.columns, row) for row in table.rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _draw_html_row(tag: str, columns: Sequence[Column], cells: Sequence[str]) -> str:
    drawn = (_draw_html_cell(tag, column, cell) for column, cell in zip(columns, cells, strict=True))
    return f"<tr>{''.join(drawn)}</tr>"


def _draw_html_cell(tag: str, column: Column, cell: str) -> str:
    style = f"text-align:{'right' if column.is_number else 'left'}"
    if column.wraps:
        return f'<{tag} style="{style}">{_keep_words_whole(cell)}</{tag}>'
    return f'<{tag} style="{style};{_NO_WRAP}">{escape(cell)}</{tag}>'


def _keep_words_whole(text: str) -> str:
    """Escapes a text, and marks the words that browsers would break."""
    return re.sub(r"\S+[/|?!-]\S+", rf'<span style="{_NO_WRAP}">\g<0></span>', escape(text))
