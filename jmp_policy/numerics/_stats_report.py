"""Statistics as a table, its notes, and a plot."""

import collections
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..policy import parse_format
from ..report import Column, FormatRange, Histogram, Table, is_fitting, list_styles, plot_histograms
from ._stats_counting import FIRST_EXPONENT
from ._stats_row import DIRECTIONS, FormatShares, Row, check_direction, list_turns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DROPPED = ("rms", "dtype", "operation", "line")
"""The columns that a narrow terminal leaves out, in this order."""

_DETAILS = {"subnormal": "subnormal", "error": "error", "scaled_error": "scaled error"}


Line = tuple[Row, int]
"""A line of a table: the row with the largest loss among the iterations of a loop, and their number."""


def rank_loss(row: Row) -> tuple[float, float, float]:
    """Returns the sort key of a row: its share of nan and infinities, then of overflow, then of underflow.

    Block-scaled formats count their relative error instead of underflow: rounding small elements to zero is normal
    for integers and 4-bit floats.
    """
    overflow = sum(shares.overflow for shares in row.formats.values())
    lost = sum(shares.error if is_in_blocks(name) else shares.underflow for name, shares in row.formats.items())
    return row.nonfinite, overflow, lost


def group_rows(rows: Iterable[Row]) -> list[Line]:
    """Returns the lines of all measured rows, the largest loss first; the iterations of a loop share a line."""
    seen: collections.Counter[tuple[object, ...]] = collections.Counter()
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.times:
            key = (row.path, row.primitive, row.source, row.direction, row.dtype, row.shape)
            seen[*key, row.turn] += 1  # a second row of the same iteration is another operation of that line
            groups.setdefault((*key, row.turn is None, seen[*key, row.turn]), []).append(row)
    lines = [(max(group, key=rank_loss), len(group)) for group in groups.values()]
    return sorted(lines, key=lambda line: rank_loss(line[0]), reverse=True)


def make_table(lines: Sequence[Line], formats: Sequence[str], width: int | None) -> Table:
    """Returns the table for a terminal of this width, without the columns that have no room, or for a notebook."""
    texts, rows = _list_texts(lines), [row for row, _ in lines]
    numbers = _list_numbers(rows, formats)
    if width is None:
        return _make_columns(texts, numbers | _list_details(rows, formats), ())
    tables = [_make_columns(texts, numbers, _DROPPED[:count]) for count in range(len(_DROPPED) + 1)]
    told_apart = len({tuple(cells) for cells in zip(*texts.values(), strict=True)})
    telling = [table for table in tables if _count_names(table) == told_apart]
    return next((table for table in telling if is_fitting(table, width)), telling[-1])


def list_notes(lines: Sequence[Line], rows: Sequence[Row], formats: Sequence[str]) -> list[str]:
    signs = [] if all(map(is_in_blocks, formats)) else ["↑ overflows, ↓ becomes zero"]
    signs += ["± relative error"] if any(map(is_in_blocks, formats)) else []
    legend = f"{', '.join(signs)}; worst first" if signs else "nan and infinities first; no format was asked for"
    notes = [legend] if lines else []
    if any(iterations > 1 for _, iterations in lines):
        notes.append("Of a loop, the worst turn is shown, counted from 0: `.rows()` has all of them.")
    if not rows:
        return [*notes, "Nothing was observed: the program has no tensor of the kind that was asked for."]
    count = sum(not row.times for row in rows)
    which = "No row was" if count == len(rows) else f"{count} of {len(rows)} rows {'was' if count == 1 else 'were'} not"
    reason = f"{which} measured: a branch that was not taken, or a step that was not observed."
    return [*notes, reason] if count else notes


def is_in_blocks(format: str) -> bool:
    """True if the elements of a block share a scale in this format."""
    return parse_format(format).block > 0


def shorten_format(format: str) -> str:
    """Returns a format as a header: `"float8_e4m3fn"` becomes `"e4m3fn"`."""
    return (format.startswith("float") and format.partition("_")[2]) or format


def format_share(share: float) -> str:
    """Formats a share in percent, to two digits; zero is an empty string, and only 1.0 is 100%.

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


Cells = Mapping[str, Sequence[str]]
"""The cells of columns, by header."""


def _make_columns(texts: Cells, numbers: Cells, dropped: Sequence[str]) -> Table:
    kept = {header: cells for header, cells in {**texts, **numbers}.items() if header not in dropped}
    columns = [Column(header, is_number=header in numbers) for header in kept]
    return Table(columns, list(zip(*kept.values(), strict=True)))


def _count_names(table: Table) -> int:
    """Returns the number of rows that differ in their texts."""
    texts = [index for index, column in enumerate(table.columns) if not column.is_number]
    return len({tuple(row[index] for index in texts) for row in table.rows})


def _list_texts(lines: Sequence[Line]) -> dict[str, list[str]]:
    turns = [",".join(map(str, list_turns(row.turn))) for row, _ in lines]
    texts = {
        "tensor": [row.path for row, _ in lines],
        "operation": [row.primitive for row, _ in lines],
        "line": [os.path.basename(row.source) for row, _ in lines],
        "pass": [row.direction for row, _ in lines],
        "turn": [turn + (f" of {count}" if count > 1 else "") for turn, (_, count) in zip(turns, lines, strict=True)],
        "dtype": [row.dtype for row, _ in lines],
    }
    needed = {"turn": any(texts["turn"]), "dtype": len(set(texts["dtype"])) > 1}
    return {header: cells for header, cells in texts.items() if needed.get(header, True)}


def _list_numbers(rows: Sequence[Row], formats: Sequence[str]) -> dict[str, list[str]]:
    numbers = {
        "amax": [f"{row.amax:.2g}" for row in rows],
        "rms": [f"{row.rms:.2g}" for row in rows],
        "nan/inf": [format_share(row.nonfinite) for row in rows],
    }
    if not any(numbers["nan/inf"]):
        del numbers["nan/inf"]
    return numbers | {shorten_format(name): [_describe_loss(row.formats, name) for row in rows] for name in formats}


def _list_details(rows: Sequence[Row], formats: Sequence[str]) -> dict[str, list[str]]:
    """Returns the columns that a notebook has in addition; a column without text is left out."""
    details = {
        f"{shorten_format(name)} {word}": [format_share(getattr(row.formats[name], key)) for row in rows]
        for name in formats
        for key, word in _DETAILS.items()
    }
    details |= {
        "smallest": ["" if row.min_nonzero is None else f"{row.min_nonzero:.3g}" for row in rows],
        "zeros": [format_share(row.zeros) for row in rows],
        "numbers": [f"{row.count:,}" for row in rows],
        "shape": ["x".join(map(str, row.shape)) for row in rows],
    }
    return {header: cells for header, cells in details.items() if any(cells)}


def _describe_loss(formats: Mapping[str, FormatShares], name: str) -> str:
    shares = formats[name]
    if is_in_blocks(name):
        return f"±{format_share(shares.error)}" if shares.error else ""
    parts = {"↑": format_share(shares.overflow), "↓": format_share(shares.underflow)}
    return " ".join(sign + text for sign, text in parts.items() if text)


def plot_exponents(rows: Sequence[Row], formats: Iterable[str], direction: str | None = None) -> "Figure":
    """Draws a histogram of the rows of each pass, or of one pass, above the ranges of formats."""
    check_direction(direction)
    ranges = list_ranges(formats)
    measured = [row for row in rows if row.times and direction in (None, row.direction)]
    if any(row.histogram is None for row in measured):
        raise ValueError(
            "These Stats were collected without histograms. Collect with them: numerics.collect(fun, histogram=True)."
        )
    groups = {name: [row for row in measured if row.direction == name] for name in DIRECTIONS}
    histograms = [_make_histogram(name, group, ranges) for name, group in groups.items() if group]
    return plot_histograms(FIRST_EXPONENT - 1, histograms, list(ranges.values()))


def list_ranges(formats: Iterable[str]) -> dict[str, FormatRange]:
    """Returns the ranges of formats by name; block-scaled formats have none, since their scale moves it."""
    parsed = [parse_format(name) for name in formats]
    floats = {each.name: each for each in parsed if not each.block}
    styles = list_styles(floats)
    ranges = {}
    for name, each in floats.items():
        exponents = each.least_exponent, each.min_exponent, math.log2(each.max)
        ranges[name] = FormatRange(shorten_format(name), styles[name], *exponents)
    return ranges


def _make_histogram(direction: str, rows: Sequence[Row], ranges: Iterable[str]) -> Histogram:
    count = max(1, sum(row.count for row in rows))
    total = np.sum([row.histogram for row in rows if row.histogram is not None], axis=0)
    losses = {}
    for name in ranges:
        if all(name in row.formats for row in rows):
            zero, overflow = (
                format_share(sum(getattr(row.formats[name], key) * row.count for row in rows) / count)
                for key in ("underflow", "overflow")
            )
            parts = {"become zero": zero, "overflow": overflow}
            losses[shorten_format(name)] = ", ".join(f"{share} {what}" for what, share in parts.items() if share)
    return Histogram(_describe_rows(direction, rows, count), (total / count).tolist(), losses)


def _describe_rows(direction: str, rows: Sequence[Row], count: int) -> str:
    """Returns the title of a histogram, which names the rows and the elements outside its bins."""
    paths = {row.path for row in rows}
    which = f"{rows[0].path or rows[0].primitive}, {direction}" if len(paths) == 1 else f"{direction}, {len(rows)} rows"
    parts = {
        "zeros": sum(row.zeros * row.count for row in rows) / count,
        "nan or infinite": sum(row.nans + row.infs for row in rows) / count,
    }
    return "; ".join([which, *(f"{format_share(share)} {what}" for what, share in parts.items() if share)])
