"""A comparison as a table, in a terminal and in a notebook."""

from html import escape

from rich.console import Console

from ..explanation._rendering import html_table, rendered, text_table
from ..explanation._wording import size
from ._comparison import Comparison, LayerComparison

_LEFT = ("layer", "type", "format")
_RIGHT = ("before", "after", "weight error", "SQNR", "output error")

_WIDE = 100
"""From this many columns on there is room between those of the table."""


def as_text(comparison: Comparison) -> str:
    """The table, as wide as the terminal at most, and the totals below it."""
    width = Console().width
    table = text_table(*_LEFT, gap=1 + (width >= _WIDE))
    for header in _RIGHT:
        table.add_column(header, justify="right")
    for row in comparison.rows:
        table.add_row(*_cells(row))
    return "\n\n".join(rendered(part, width) for part in (table, "\n".join(_notes(comparison))))


def as_html(comparison: Comparison) -> str:
    """The table, and the totals below it."""
    table = html_table(_LEFT + _RIGHT, map(_cells, comparison.rows))
    return table + "".join(f"<p>{escape(note)}</p>" for note in _notes(comparison))


def _cells(row: LayerComparison) -> tuple[str, ...]:
    exact = row.weight_error == 0
    return (
        row.path,
        row.type,
        row.quantization if row.is_quantized else "left",
        size(row.bytes_before),
        size(row.bytes_after),
        "" if exact else _percent(row.weight_error),
        "" if exact else f"{row.sqnr:.1f} dB",
        "not seen" if row.output_error is None else _percent(row.output_error),
    )


def _notes(comparison: Comparison) -> list[str]:
    """What is to be said below the table: totals, the error of the whole model, and why weights were left."""
    before, after = comparison.bytes_before, comparison.bytes_after
    notes = [f"weights: {size(before)}, now {size(after)}: {after / before:.1%}"]
    quantized = comparison.quantized
    if quantized and len(quantized) < len(comparison.rows):
        share = sum(row.bytes_after for row in quantized) / sum(row.bytes_before for row in quantized)
        notes.append(f"those quantized, {len(quantized)} of {len(comparison.rows)}: {share:.1%}")
    return [*notes, f"output of the model: {_percent(comparison.output_error)} off", *_reasons(comparison)]


def _reasons(comparison: Comparison) -> list[str]:
    """A sentence for each reason to leave a weight."""
    paths: dict[str, list[str]] = {}
    for row in comparison.rows:
        if not row.is_quantized:
            paths.setdefault(row.quantization, []).append(row.path or row.type)
    return [f"{why}: {', '.join(names)}" for why, names in paths.items()]


def _percent(error: float) -> str:
    return f"{error:.3g}" if error > 10 else f"{error * 100:.2g} %"
