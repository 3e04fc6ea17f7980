"""An explanation as HTML, for notebooks."""

from html import escape

from ._explanation import Explanation
from ._rendering import html_table
from ._wording import has_quantization, notes, place, short, short_policy, size

_HEADERS = ("module", "type", "policy", "rule", "param", "in", "compute", "out", "bytes")


def as_html(explanation: Explanation) -> str:
    """A table with a row for each module, and the notes below it."""
    quantized = has_quantization(explanation)
    rows = [
        (
            row.path,
            row.type,
            short_policy(row.policy),
            row.rule,
            *map(short, (row.param_dtypes, row.input_dtypes, row.compute_dtypes, row.output_dtypes)),
            size(row.param_bytes),
            *([row.quantization] if quantized else []),
            ", ".join(map(place, row.leaks_into)),
        )
        for row in explanation.rows
    ]
    headers = (*_HEADERS, *(["quantization"] if quantized else []), "leaks into")
    return html_table(headers, rows) + "".join(f"<p>{escape(note)}</p>" for note in notes(explanation))
