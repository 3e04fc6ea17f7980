"""How statistics are read in a notebook: a table that sorts, with all that is known of each tensor."""

import math
from collections.abc import Callable, Sequence

from ...report import Cell, Column, draw_html_note, draw_sortable_table
from ._counting import FIRST_EXPONENT
from ._row import Row
from ._stats_report import Line, describe_loops, describe_unmeasured, format_share, is_in_blocks, shorten_format

MOST_LINES = 1000
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
    shown = lines[:MOST_LINES]
    columns = _list_summary(shown) | _list_formats(shown, formats) | _list_details(shown)
    filled = {header: cells for header, cells in columns.items() if any(cell.text for cell in cells)}
    headers = [Column(header, any(cell.value is not None for cell in cells)) for header, cells in filled.items()]
    return headers, list(zip(*filled.values(), strict=True))


def list_page_notes(lines: Sequence[Line], rows: Sequence[Row]) -> list[str]:
    """The notes below the table."""
    notes = ["Worst first; click on a header to sort. Shares are of all numbers of a tensor."] if lines else []
    if len(lines) > MOST_LINES:
        notes.append(f"{len(lines) - MOST_LINES} lines of less loss are left out: rows() has them.")
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
