"""An explanation as HTML, for notebooks."""

from html import escape

from ._explanation import Explanation
from ._rendering import html_table
from ._wording import notes, place, short, short_policy, size

_HEADERS = ("module", "type", "policy", "rule", "param", "in", "compute", "out", "bytes", "leaks into")


def as_html(explanation: Explanation) -> str:
    """A table with a row for each module, and the notes below it."""
    rows = [
        (
            row.path,
            row.type,
            short_policy(row.policy),
            row.rule,
            *map(short, (row.param_dtypes, row.input_dtypes, row.compute_dtypes, row.output_dtypes)),
            size(row.param_bytes),
            ", ".join(map(place, row.leaks_into)),
        )
        for row in explanation.rows
    ]
    return html_table(_HEADERS, rows) + "".join(f"<p>{escape(note)}</p>" for note in notes(explanation))
