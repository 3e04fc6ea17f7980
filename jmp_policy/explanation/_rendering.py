"""Tables, in a terminal and in a notebook."""

import io
from collections.abc import Iterable
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table


def text_table(*headers: str, gap: int) -> Table:
    """A table whose columns are `gap` characters apart, and whose cells go on in the next line where they are long."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold")
    return table


def rendered(part: Table | str, width: int) -> str:
    """Plain text, without what follows the last word of each line."""
    out = io.StringIO()
    Console(file=out, width=width, markup=False, emoji=False, highlight=False, color_system=None).print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def html_table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table as HTML.

    >>> html_table(["a"], [["<1>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;1&gt;</td></tr></tbody></table>'
    """
    body = "".join(_line("td", row) for row in rows)
    return f"<table><thead>{_line('th', headers)}</thead><tbody>{body}</tbody></table>"


def _line(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
