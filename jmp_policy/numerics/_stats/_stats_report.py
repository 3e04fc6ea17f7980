"""How statistics are read in a terminal: a table of what would be lost, worst first."""

import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence

from ...report import Column, Table, has_columns, is_fitting
from ._row import FormatShares, Row

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
