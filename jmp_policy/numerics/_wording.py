"""What the cells of a report's tables say, and the notes below: the same in a terminal and in a notebook."""

from collections.abc import Iterable

from ..explanation._wording import short, size
from ._report import AuditReport, AuditRow

SUMMARY = ("matmuls in", "forward", "backward", "flops", "of all")
ROWS = ("module", "operation", "dtype", "pass", "count", "flops", "bytes")
MOST = 60
"""So many rows are shown: `rows` has the others."""


def summary(report: AuditReport) -> list[tuple[str, ...]]:
    """A line for each dtype that matmuls run in: how many of them there are, and their work."""
    total = sum(matmul.flops for matmul in report.matmuls)
    lines = []
    for dtype in dict.fromkeys(matmul.dtype for matmul in report.matmuls):
        of_it = [matmul for matmul in report.matmuls if matmul.dtype == dtype]
        passes = (sum(matmul.count for matmul in of_it if matmul.backward == backward) for backward in (False, True))
        work = sum(matmul.flops for matmul in of_it)
        lines.append((dtype, *map(str, passes), number(work), f"{work / total:.1%}" if total else ""))
    return lines


def cells(rows: Iterable[AuditRow]) -> list[tuple[str, ...]]:
    """A line for each row."""
    return [
        (
            row.path,
            row.operation,
            "->".join(short([dtype]) for dtype in row.dtype.split("->")),
            "backward" if row.backward else "forward",
            str(row.count),
            number(row.flops),
            size(row.bytes),
        )
        for row in rows
    ]


def shown(report: AuditReport) -> list[AuditRow]:
    """The rows that cost most, in the order of the program."""
    dearest = sorted(report.rows, key=lambda row: (-row.flops, -row.bytes))[:MOST]
    chosen = set(dearest)
    return [row for row in report.rows if row in chosen]


def notes(report: AuditReport) -> list[str]:
    """What is to be said below the table."""
    found = []
    if len(report.rows) > MOST:
        found.append(f"{len(report.rows) - MOST} rows of less work are left out: `.rows` has them.")
    found += [f"{line}: the body of this while loop counts once." for line in report.uncounted_loops]
    return [*found, *map(str, report.findings)] if report.findings else [*found, "no findings"]


def number(count: int) -> str:
    """A count to three digits.

    >>> number(0), number(999), number(12_345), number(7_200_000_000_000)
    ('', '999', '12.3 k', '7.2 T')
    """
    return size(count).removesuffix("B").removesuffix(" ")
