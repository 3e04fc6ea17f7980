"""Reports: tables with notes below them, as text and as HTML. Neither breaks a line inside a name.

Also short names of dtypes, policies, sizes and modules for tables and notes.
"""

import abc
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from html import escape
from typing import Any, ClassVar, TypeVar

import numpy as np

from .._base import escape_controls
from ..policy import Policy, PolicyMap

Row = TypeVar("Row")

# The colors of the system, dark ones too.
_PAGE_STYLE = ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;margin:1.5em}p{max-width:50em}"

DEFAULT_WIDTH = 80
"""The width of a table where the output is not a terminal."""

_NO_WRAP = "white-space:nowrap"


@dataclasses.dataclass(frozen=True)
class Column:
    header: str  # the text above it
    is_number: bool = False  # whether its cells are aligned right
    wraps: bool = False  # whether a long cell continues on the next line, between two words


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts: a cell per column in each row, and `gap` spaces between columns where they fit."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    gap: int = 2


def make_columns(texts: str, numbers: str = "") -> list[Column]:
    """Makes columns of texts, and then of numbers, from headers that are separated by commas."""
    return [*map(Column, texts.split(", ")), *(Column(name, is_number=True) for name in numbers.split(", ") if name)]


class Plain:
    """Base class of reports and of their rows: dataclasses that `to_dict` returns as plain data."""

    _properties: ClassVar[tuple[str, ...]] = ()
    """The properties that `to_dict` has after the fields."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, and what follows from them, as dictionaries, lists, strings, numbers and `None`."""
        return make_plain(self)


class Report(Plain, abc.ABC):
    """Base class of results that people read: one line in a console, a text when printed, a page in a notebook.

    A subclass returns the line from `_summarize`, its tables from `_list_tables` and its notes from `_list_notes`. The
    text is as wide as the terminal, or as `COLUMNS` in the environment. Without a terminal, tables are 80 characters
    wide, and each note is one line.
    """

    _MOST_ROWS: ClassVar[int] = 60
    """Maximum number of rows of a table. The attributes of the report have all of them."""

    @abc.abstractmethod
    def _summarize(self) -> str:
        """Returns the line of a console, without the name of the class."""

    @abc.abstractmethod
    def _list_tables(self, width: int | None) -> Sequence[Table]:
        """Returns the tables for a terminal of this width, or for a notebook if `width` is None."""

    @abc.abstractmethod
    def _list_notes(self) -> Sequence[str]:
        """Returns the paragraphs below the tables."""

    def _has_numbers(self) -> bool:
        """False if tracers stand for arrays, as inside `jit`: there is nothing to print."""
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._summarize()}; print it for the table>"

    def __str__(self) -> str:
        if not self._has_numbers():
            return repr(self)
        measured = measure_width()
        width = measured or DEFAULT_WIDTH
        tables = [draw_table(table, width) for table in map(_escape_table, self._list_tables(width))]
        return "\n\n".join([*tables, "\n".join(wrap_note(note, measured) for note in self._list_escaped_notes())])

    def _repr_html_(self) -> str:
        if not self._has_numbers():
            return draw_html_note(repr(self))
        tables = map(_escape_table, self._list_tables(None))
        return "".join([*map(draw_html_table, tables), *map(draw_html_note, self._list_escaped_notes())])

    def _keep_largest(self, rows: Sequence[Row], key: Callable[[Row], Any] = lambda _: 0) -> list[Row]:
        """Returns the `_MOST_ROWS` rows with the largest keys, in the given order."""
        largest = sorted(range(len(rows)), key=lambda index: key(rows[index]), reverse=True)[: self._MOST_ROWS]
        return [rows[index] for index in sorted(largest)]

    def _note_left_out(self, rows: Sized, kind: str, attribute: str = ".rows") -> list[str]:
        """Returns a note on the rows that `_keep_largest` leaves out, such as "rows of less work"."""
        count = len(rows) - self._MOST_ROWS
        return [f"{count} {kind} are left out: `{attribute}` has them."] if count > 0 else []

    def _list_escaped_notes(self) -> list[str]:
        return [escape_controls(note, keep="") for note in self._list_notes()]


def _escape_table(table: Table) -> Table:
    """Escapes control characters in the names of modules, functions and files."""
    rows = [[escape_controls(cell, keep="") for cell in row] for row in table.rows]
    return dataclasses.replace(table, rows=rows)


def draw_document(report: Report, title: str, note: str = "") -> str:
    """Draws a report as a complete HTML document, with `note` as a paragraph before it."""
    before = draw_html_note(note) if note else ""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_PAGE_STYLE}</style></head><body>{before}{report._repr_html_()}</body></html>\n"
    )


def find_row(rows: Iterable[Row], path: str, kind: str, listed: str) -> Row:
    """Returns the row at a path; its KeyError reads "No {kind} at ...; those {listed} are ..."."""
    by_path: dict[str, Any] = {row.path: row for row in rows}  # type: ignore[attr-defined]
    if path in by_path:
        return by_path[path]
    raise KeyError(f"No {kind} at {path!r}. Those {listed} are {', '.join(map(repr, by_path))}.")


def indent_lines(sentences: Iterable[object]) -> str:
    """Returns indented lines for the message of an error, each after a line break."""
    return "".join(f"\n  {escape_controls(str(sentence), keep='')}" for sentence in sentences)


def make_plain(value: Any) -> Any:
    """Returns reports, rows and policies as dictionaries, lists, strings and numbers, also inside of each other."""
    if isinstance(value, Policy):
        return value.name
    if isinstance(value, PolicyMap):
        return value.get_config()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)] + [*getattr(value, "_properties", ())]
        return {name: make_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: make_plain(each) for key, each in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [*map(make_plain, value)] if isinstance(value, tuple | list) else value


def make_finite(plain: Any) -> Any:
    """Replaces nan and infinity in plain data by `None`, as strict JSON needs it."""
    return json.loads(json.dumps(plain), parse_constant=lambda _: None)


def measure_width() -> int | None:
    """Returns the width of the terminal or of `COLUMNS` in the environment; None if there is neither, as for a file."""
    columns = os.environ.get("COLUMNS", "")
    if (columns.isdecimal() and int(columns)) or sys.stdout.isatty():
        return shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
    return None


def is_fitting(table: Table, width: int) -> bool:
    """True if each row of the table fits one line."""
    return _add_gaps(_measure_columns(table), table.gap) <= width


def wrap_note(note: str, width: int | None) -> str:
    """Wraps a paragraph between words and indents all lines but the first; with no width it stays one line."""
    if width is None or len(note) <= width:
        return note
    return "\n".join(_wrap(note, width, indent="  "))


def draw_table(table: Table, width: int) -> str:
    """Draws a table as text. Columns that wrap become narrower until rows fit, but no word is cut."""
    widths, gap = _fit_columns(table, width)
    headers = [column.header for column in table.columns]
    lines = _draw_rows(table.columns, [headers], widths, gap)
    lines.append("─" * _add_gaps(widths, gap))
    return "\n".join(lines + _draw_rows(table.columns, table.rows, widths, gap))


def draw_html_note(note: str) -> str:
    return f"<p>{_keep_words_whole(note)}</p>"


def draw_html_table(table: Table) -> str:
    """Draws a table as HTML, with texts on the left: notebooks align them right by default."""
    head = _draw_html_row("th", table.columns, [column.header for column in table.columns])
    body = "".join(_draw_html_row("td", table.columns, row) for row in table.rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _draw_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]], widths: Sequence[int], gap: int) -> list[str]:
    lines = []
    for row in rows:
        cells = [
            _wrap(cell, size) if column.wraps else [cell]
            for column, cell, size in zip(columns, row, widths, strict=True)
        ]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            padded = (
                part.rjust(size) if column.is_number else part.ljust(size)
                for column, part, size in zip(columns, parts, widths, strict=True)
            )
            lines.append((" " * gap).join(padded).rstrip())
    return lines


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(
        max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.wrap(text) or [""]


def _fit_columns(table: Table, width: int) -> tuple[list[int], int]:
    """Returns the widths of the columns, and the gap between them."""
    widths = _measure_columns(table)
    if is_fitting(table, width):
        return widths, table.gap
    least = [
        max((len(word) for cell in cells for word in cell.split()), default=0) if column.wraps else size
        for column, cells, size in zip(table.columns, _list_columns(table), widths, strict=True)
    ]
    while _add_gaps(widths, 1) > width and widths != least:
        widest = max(range(len(widths)), key=lambda index: (widths[index] > least[index], widths[index]))
        widths[widest] -= 1
    return widths, 1


def _list_columns(table: Table) -> list[list[str]]:
    return [[column.header, *(row[index] for row in table.rows)] for index, column in enumerate(table.columns)]


def _measure_columns(table: Table) -> list[int]:
    return [max(map(len, cells)) for cells in _list_columns(table)]


def _add_gaps(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * (len(widths) - 1)


def _draw_html_row(tag: str, columns: Sequence[Column], cells: Sequence[str]) -> str:
    drawn = []
    for column, cell in zip(columns, cells, strict=True):
        style = f"text-align:{'right' if column.is_number else 'left'}{'' if column.wraps else f';{_NO_WRAP}'}"
        text = _keep_words_whole(cell) if column.wraps else escape(cell)
        drawn.append(f'<{tag} style="{style}">{text}</{tag}>')
    return f"<tr>{''.join(drawn)}</tr>"


def _keep_words_whole(text: str) -> str:
    """Escapes a text, and marks the words that a browser would break."""
    return re.sub(r"\S+[/|?!-]\S+", rf'<span style="{_NO_WRAP}">\g<0></span>', escape(text))


_PREFIXES = ("k", "M", "G", "T")
_MOST_PLACES = 3


def shorten_dtypes(dtypes: Iterable[str]) -> str:
    """Returns short names of dtypes.

    >>> from jmp_policy import report
    >>> report.shorten_dtypes(["bfloat16", "float8_e4m3fn", "int32", "bool"])
    'bf16 f8_e4m3fn i32 bool'
    """
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u"}
    return " ".join(re.sub(r"^(b?)float|^(u?)int", lambda found: short[found.group()], dtype) for dtype in dtypes)


def shorten_policy(policy: Policy | None) -> str:
    """Returns a short name of a policy; the format of a quantized one keeps its name.

    >>> import jmp_policy as jmp
    >>> from jmp_policy import report
    >>> mixed, half = jmp.Policy("float32", "bfloat16", "float32"), jmp.Policy("float32", "float16", "float16")
    >>> report.shorten_policy(mixed), report.shorten_policy(half)
    ('p=f32,c=bf16,o=f32', 'mixed_float16')
    """
    if policy is None:
        return ""
    *format, source = policy.name.split("_from_")
    parts = (part.partition("=") for part in source.split(","))
    shorten = lambda key: key if key in ("precision", "cache") else key[0]
    shortened = ",".join(f"{shorten(key)}={shorten_dtypes([value])}" if value else key for key, _, value in parts)
    return "_from_".join([*format, shortened])


def format_bytes(count: int) -> str:
    """Formats a number of bytes to three digits.

    >>> from jmp_policy.report import format_bytes
    >>> format_bytes(0), format_bytes(999), format_bytes(1500), format_bytes(65_536), format_bytes(280_000_000_000)
    ('', '999 B', '1.5 kB', '65.5 kB', '280 GB')
    """
    unit, size = choose_byte_unit(count)
    if size == 1:
        return f"{count} B" if count else ""
    return f"{count / size:.3g} {unit}"


def choose_byte_unit(count: int) -> tuple[str, int]:
    """Returns the largest unit that is not above a number of bytes, and its size: `("kB", 1000)` for 65,536."""
    power = min((len(str(count)) - 1) // 3, len(_PREFIXES))
    return f"{('', *_PREFIXES)[power]}B", 1000**power


def format_count(count: int) -> str:
    """Formats a count to three digits.

    >>> from jmp_policy.report import format_count
    >>> format_count(0), format_count(999), format_count(12_345), format_count(7_200_000_000_000)
    ('', '999', '12.3 k', '7.2 T')
    """
    return format_bytes(count).removesuffix("B").removesuffix(" ")


def name_place(path: str) -> str:
    """Returns the name of a module in a sentence: its path, or "the model itself" for the root."""
    return path or "the model itself"


def list_places(paths: Sequence[str]) -> str:
    """Names several modules in a sentence.

    >>> from jmp_policy import report
    >>> report.list_places(["", "a"]), report.list_places(["a", "b", "c", "d", "e"])
    ('the model itself, a', 'a, b, c and 2 more')
    """
    others = len(paths) - _MOST_PLACES
    return ", ".join(map(name_place, paths[:_MOST_PLACES])) + (f" and {others} more" if others > 0 else "")
