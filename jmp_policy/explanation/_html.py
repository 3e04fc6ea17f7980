"""An explanation as HTML, for notebooks."""

from collections.abc import Iterable
from html import escape

from ._explanation import Explanation
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
    head = f"<thead>{_line('th', _HEADERS)}</thead>"
    body = f"<tbody>{''.join(_line('td', row) for row in rows)}</tbody>"
    return f"<table>{head}{body}</table>" + "".join(f"<p>{escape(note)}</p>" for note in notes(explanation))


def _line(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
