"""A report as text."""

from rich.console import Console
from rich.table import Table

from ..explanation._rendering import rendered, text_table
from ._report import AuditReport
from ._wording import ROWS, SUMMARY, cells, notes, shown, summary


def as_text(report: AuditReport) -> str:
    """What matmuls run in, the operations that cost most, and the findings; as wide as the terminal at most."""
    width = Console().width
    tables = [_table(SUMMARY, summary(report), left=1), _table(ROWS, cells(shown(report)), left=4)]
    parts: list[Table | str] = [table for table in tables if table.row_count]
    return "\n\n".join([*(rendered(part, width) for part in parts), "\n".join(notes(report))])


def _table(headers: tuple[str, ...], lines: list[tuple[str, ...]], left: int) -> Table:
    table = text_table(*headers[:left], gap=2)
    for header in headers[left:]:
        table.add_column(header, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table
