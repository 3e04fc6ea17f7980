"""Statistics as a table in a terminal, a page in a notebook, and a plot."""

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...report import (
    Cell,
    Column,
    ExponentChart,
    FormatRange,
    Histogram,
    Table,
    draw_html_note,
    draw_sortable_table,
    has_columns,
    is_fitting,
    list_styles,
)
from ._counting import FIRST_EXPONENT
from ._row import DIRECTIONS, FormatShares, Row, check_direction
from ._what_if import FloatFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.figure import Figure


MOST_LINES = 40
"""A terminal shows so many lines: `rows()` has the others."""

_DROPPED = ("rms", "dtype", "operation", "line")
"""What a narrow terminal does without, in this order."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a report.

    Attributes:
      row: what it shows; of the turns of a loop, the worst one.
      turns: how many turns it stands for; one, where there is no loop.
    """

    row: Row
    turns: int

    @property
    def source(self) -> str:
        """The file and line, without the folders."""
        return os.path.basename(self.row.source)

    @property
    def turn(self) -> str:
        """Which turn is shown, and of how many."""
        turn = self.row.turn
        if turn is None:
            return ""
        text = ",".join(map(str, turn)) if isinstance(turn, tuple) else str(turn)
        return f"{text} of {self.turns}" if self.turns > 1 else text


def rank_loss(row: Row) -> tuple[float, float, float]:
    """How much a row loses, to sort by: nan and infinities first, then what overflows, then what becomes zero.

    Overflow and zeros are summed over the formats. Where blocks share a scale the relative error counts in place of
    zeros: rounding to zero is what integers, and floats of 4 bits, do to all small numbers.
    """
    overflow = sum(shares.overflow for shares in row.formats.values())
    lost = sum(shares.error if is_in_blocks(name) else shares.underflow for name, shares in row.formats.items())
    return row.nonfinite, overflow, lost


def list_lines(rows: Iterable[Row]) -> list[Line]:
    """The lines of rows that were measured, worst first; the turns of a loop share one."""
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.times:
            place = (row.path, row.primitive, row.source, row.direction, row.dtype, row.shape)
            seen[*place, row.turn] += 1  # a turn that comes again is another operation of that line
            groups.setdefault((*place, row.turn is None, seen[*place, row.turn]), []).append(row)
    lines = [Line(max(group, key=rank_loss), len(group)) for group in groups.values()]
    return sorted(lines, key=lambda line: rank_loss(line.row), reverse=True)


def make_table(lines: Sequence[Line], formats: Sequence[str], width: int) -> Table:
    """The table of a terminal of so many columns, without the columns that have no room."""
    shown = lines[:MOST_LINES]
    texts, numbers = _list_texts(shown), _list_numbers(shown, formats)
    headings = [line.row.path or "(no module)" for line in shown]

    def make(dropped: Sequence[str]) -> Table:
        kept = {header: cells for header, cells in {**texts, **numbers}.items() if header not in dropped}
        columns = [Column(header, is_number=header in numbers) for header in kept]
        return Table(columns, list(zip(*kept.values(), strict=True)), headings=headings)

    tables = [make(_DROPPED[:count]) for count in range(len(_DROPPED) + 1)]
    told_apart = len({tuple(cells) for cells in zip(*texts.values(), strict=True)})
    telling = [table for table in tables if _count_names(table) == told_apart]
    in_a_line = (table for table in telling if is_fitting(table, width))
    in_columns = (table for table in tables if has_columns(table, width))
    return next(in_a_line, None) or next(in_columns, tables[0])


def list_notes(lines: Sequence[Line], rows: Sequence[Row], formats: Sequence[str]) -> list[str]:
    """The notes below the table of a terminal."""
    signs = [] if all(map(is_in_blocks, formats)) else ["↑ overflows, ↓ becomes zero"]
    signs += ["± relative error"] if any(map(is_in_blocks, formats)) else []
    legend = f"{', '.join(signs)}; worst first" if signs else "nan and infinities first; no format was asked for"
    notes = [legend] if lines else []
    if len(lines) > MOST_LINES:
        notes.append(f"{len(lines) - MOST_LINES} lines of less loss are left out: `.rows()` has them.")
    return [*notes, *describe_loops(lines), *describe_unmeasured(rows)]


def describe_loops(lines: Sequence[Line]) -> list[str]:
    """What a line of a loop shows."""
    note = "Of a loop, the worst turn is shown, counted from 0: `.rows()` has all of them."
    return [note] if any(line.turns > 1 for line in lines) else []


def describe_unmeasured(rows: Sequence[Row]) -> list[str]:
    """Which rows have no numbers."""
    if not rows:
        return ["Nothing was observed: the program has no tensor of the kind that was asked for."]
    count = sum(not row.times for row in rows)
    which = "No row was" if count == len(rows) else f"{count} of {len(rows)} rows {'was' if count == 1 else 'were'} not"
    return [f"{which} measured: a branch that was not taken, or a step that was not observed."] if count else []


def is_in_blocks(format: str) -> bool:
    """Whether the numbers of a format are multiples of the scale of a block."""
    return format.startswith(("int", "mx", "nv"))


def shorten_format(format: str) -> str:
    """A format as a header.

    >>> [shorten_format(name) for name in ("float8_e4m3fn", "bfloat16", "int8/64", "mxfp8_e5m2")]
    ['e4m3fn', 'bfloat16', 'int8/64', 'mxfp8_e5m2']
    """
    return (format.startswith("float") and format.partition("_")[2]) or format


def format_share(share: float) -> str:
    """A share in percent, to two digits; nothing for none, and 100% for all only.

    >>> format_share(0), format_share(1e-9), format_share(0.00123), format_share(0.012), format_share(0.9999)
    ('', '<.01%', '0.12%', '1.2%', '99%')
    """
    percent = 100 * share
    if percent <= 0:
        return ""
    if percent < 0.01:
        return "<.01%"
    if percent >= 9.95:
        return f"{int(percent)}%"
    return f"{percent:.2f}%" if percent < 0.995 else f"{percent:.1f}%"


def _count_names(table: Table) -> int:
    """How many rows a table tells apart by their texts."""
    texts = [index for index, column in enumerate(table.columns) if not column.is_number]
    return len({tuple(row[index] for index in texts) for row in table.rows})


def _list_texts(lines: Sequence[Line]) -> dict[str, list[str]]:
    """By header, the cells of the columns of texts."""
    texts = {
        "tensor": [line.row.path for line in lines],
        "operation": [line.row.primitive for line in lines],
        "line": [line.source for line in lines],
        "pass": [line.row.direction for line in lines],
        "turn": [line.turn for line in lines],
        "dtype": [line.row.dtype for line in lines],
    }
    needed = {"turn": any(texts["turn"]), "dtype": len(set(texts["dtype"])) > 1}
    return {header: cells for header, cells in texts.items() if needed.get(header, True)}


def _list_numbers(lines: Sequence[Line], formats: Sequence[str]) -> dict[str, list[str]]:
    """By header, the cells of the columns of numbers."""
    numbers = {
        "amax": [f"{line.row.amax:.2g}" for line in lines],
        "rms": [f"{line.row.rms:.2g}" for line in lines],
        "nan/inf": [format_share(line.row.nonfinite) for line in lines],
    }
    if not any(numbers["nan/inf"]):
        del numbers["nan/inf"]
    return numbers | {
        shorten_format(name): [_describe_loss(line.row.formats, name) for line in lines] for name in formats
    }


def _describe_loss(formats: Mapping[str, FormatShares], name: str) -> str:
    shares = formats[name]
    if is_in_blocks(name):
        return f"±{format_share(shares.error)}" if shares.error else ""
    parts = {"↑": format_share(shares.overflow), "↓": format_share(shares.underflow)}
    return " ".join(sign + text for sign, text in parts.items() if text)


MOST_PAGE_LINES = 1000
"""A page shows so many lines: `rows()` has the others."""

_SHARES = {"zero": "underflow", "subnormal": "subnormal", "overflow": "overflow"}
_ERRORS = {"error": "error", "scaled\nerror": "scaled_error"}
_HOT = ("underflow", "overflow")
"""What stands out, by how much of it there is."""

Columns = dict[str, list[Cell]]


def draw_page(lines: Sequence[Line], rows: Sequence[Row], formats: Sequence[str]) -> str:
    """The table and its notes as HTML."""
    table = draw_sortable_table(*list_cells(lines, formats)) if lines else ""
    return "".join([table, *map(draw_html_note, list_page_notes(lines, rows))])


def list_cells(lines: Sequence[Line], formats: Sequence[str]) -> tuple[list[Column], list[tuple[Cell, ...]]]:
    """The columns, and the cells of each line; a column without a text or a number in it is left out."""
    shown = lines[:MOST_PAGE_LINES]
    columns = _list_summary(shown) | _list_formats(shown, formats) | _list_details(shown)
    filled = {header: cells for header, cells in columns.items() if any(cell.text for cell in cells)}
    headers = [Column(header, any(cell.value is not None for cell in cells)) for header, cells in filled.items()]
    return headers, list(zip(*filled.values(), strict=True))


def list_page_notes(lines: Sequence[Line], rows: Sequence[Row]) -> list[str]:
    """The notes below the table."""
    notes = ["Worst first; click on a header to sort. Shares are of all numbers of a tensor."] if lines else []
    if len(lines) > MOST_PAGE_LINES:
        notes.append(f"{len(lines) - MOST_PAGE_LINES} lines of less loss are left out: rows() has them.")
    return [*notes, *describe_loops(lines), *describe_unmeasured(rows)]


def _list_summary(lines: Sequence[Line]) -> Columns:
    return {
        "tensor": [Cell(line.row.path or "(no module)") for line in lines],
        "pass": [Cell(line.row.direction) for line in lines],
        "turn": [Cell(line.turn) for line in lines],
        "worst": [Cell(str(rank), -rank) for rank in range(1, len(lines) + 1)],
        "amax": _show(lines, lambda row: row.amax, "{:.3g}"),
        "rms": _show(lines, lambda row: row.rms, "{:.3g}"),
        "nan": _show(lines, lambda row: row.nans or None, "{:,}", is_hot=True),
        "inf": _show(lines, lambda row: row.infs or None, "{:,}", is_hot=True),
        "exponents": [_draw_histogram(line.row) for line in lines],
    }


def _list_formats(lines: Sequence[Line], formats: Sequence[str]) -> Columns:
    columns = {}
    for name in formats:
        # Integers have neither subnormal numbers nor an overflow; floats in blocks are scaled already.
        shares = {} if name.startswith("int") else _SHARES
        errors = _ERRORS if name.startswith("int") or not is_in_blocks(name) else {"error": "error"}
        for title, key in {**shares, **errors}.items():
            columns[f"{shorten_format(name)}\n{title}"] = [_show_share(line.row, name, key) for line in lines]
    return columns


def _list_details(lines: Sequence[Line]) -> Columns:
    return {
        "smallest": _show(lines, lambda row: row.min_nonzero, "{:.3g}"),
        "zeros": [Cell(format_share(line.row.zeros), line.row.zeros) for line in lines],
        "numbers": _show(lines, lambda row: row.count, "{:,}"),
        "operation": [Cell(line.row.primitive) for line in lines],
        "line": [Cell(line.source, hint=f"{line.row.source} ({line.row.function})") for line in lines],
        "dtype": [Cell(line.row.dtype) for line in lines],
        "shape": [Cell("x".join(map(str, line.row.shape))) for line in lines],
    }


def _show(
    lines: Sequence[Line], read: Callable[[Row], float | None], template: str, *, is_hot: bool = False
) -> list[Cell]:
    values = [read(line.row) for line in lines]
    return [
        Cell("" if value is None else template.format(value), value, heat=float(is_hot and value is not None))
        for value in values
    ]


def _show_share(row: Row, format: str, key: str) -> Cell:
    share = getattr(row.formats[format], key)
    return Cell(format_share(share), share, heat=math.sqrt(share) if key in _HOT else 0.0)


def _draw_histogram(row: Row) -> Cell:
    """How many numbers have each exponent, as bars; it sorts by the exponent that most have."""
    if row.histogram is None or not row.histogram.any():
        return Cell("")
    most = int(row.histogram.argmax())
    bounds = f"from 2^{FIRST_EXPONENT - 1} to 2^{FIRST_EXPONENT + len(row.histogram) - 1}"
    hint = f"exponents {bounds}; most numbers are near 2^{FIRST_EXPONENT - 1 + most}"
    return Cell(hint, most, bars=(row.histogram / row.histogram.max()).tolist(), hint=hint)


def plot_exponents(rows: Sequence[Row], formats: Iterable[str], direction: str | None = None) -> "Figure":
    """Draws a histogram of the rows of each pass, or of one pass, above the ranges of formats.

    Raises:
      ValueError: a format or direction is unknown, or there are no histograms.
      ImportError: matplotlib is not installed.
    """
    check_direction(direction)
    ranges = list_ranges(formats)
    measured = [row for row in rows if row.times and direction in (None, row.direction)]
    if any(row.histogram is None for row in measured):
        raise ValueError(
            "There are no histograms to draw: these Stats were collected without. Collect with them: "
            "numerics.collect(fun, histogram=True)."
        )
    groups = {name: [row for row in measured if row.direction == name] for name in DIRECTIONS}
    histograms = [_make_histogram(name, group, ranges) for name, group in groups.items() if group]
    return ExponentChart(FIRST_EXPONENT - 1, histograms, list(ranges.values())).draw()


def list_ranges(formats: Iterable[str]) -> dict[str, FormatRange]:
    """The ranges of formats by name; numbers in blocks have none, since their scale moves it.

    Raises:
      ValueError: a format is unknown.
    """
    parsed = [parse_format(name) for name in formats]
    floats = {of_format.name: of_format for of_format in parsed if isinstance(of_format, FloatFormat)}
    styles = list_styles(floats)
    return {
        name: FormatRange(
            shorten_format(name),
            styles[name],
            of_format.min_exponent - of_format.mantissa_bits,
            of_format.min_exponent,
            math.log2(of_format.max),
        )
        for name, of_format in floats.items()
    }


def _make_histogram(direction: str, rows: Sequence[Row], ranges: Iterable[str]) -> Histogram:
    count = max(1, sum(row.count for row in rows))
    total = np.sum([row.histogram for row in rows if row.histogram is not None], axis=0)
    losses = {}
    for name in ranges:
        if all(name in row.formats for row in rows):
            zero, overflow = (
                sum(getattr(row.formats[name], key) * row.count for row in rows) / count
                for key in ("underflow", "overflow")
            )
            losses[shorten_format(name)] = _describe_losses(zero, overflow)
    return Histogram(_describe_rows(direction, rows, count), (total / count).tolist(), losses)


def _describe_losses(zero: float, overflow: float) -> str:
    parts = {"become zero": format_share(zero), "overflow": format_share(overflow)}
    return ", ".join(f"{share} {what}" for what, share in parts.items() if share)


def _describe_rows(direction: str, rows: Sequence[Row], count: int) -> str:
    """The title of a histogram: which rows, and what is in none of its bins."""
    paths = {row.path for row in rows}
    which = f"{rows[0].path or rows[0].primitive}, {direction}" if len(paths) == 1 else f"{direction}, {len(rows)} rows"
    parts = {
        "zeros": sum(row.zeros * row.count for row in rows) / count,
        "nan or infinite": sum(row.nans + row.infs for row in rows) / count,
    }
    outside = [f"{format_share(share)} {what}" for what, share in parts.items() if share]
    return "; ".join([which, *outside])
