"""A report as HTML, for notebooks."""

from html import escape

from ..explanation._rendering import html_table
from ._report import AuditReport
from ._wording import ROWS, SUMMARY, cells, notes, shown, summary


def as_html(report: AuditReport) -> str:
    """What matmuls run in, the operations that cost most, and the findings."""
    matmuls = html_table(SUMMARY, summary(report)) if report.matmuls else ""
    below = "".join(f"<p>{escape(note)}</p>" for note in notes(report))
    return matmuls + html_table(ROWS, cells(shown(report))) + below
