"""A comparison as a plot."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from ._comparison import Comparison, LayerComparison

_QUANTIZED, _LEFT, _BEFORE = "C0", "0.65", "0.9"
"""The colors of weights."""


def plot(comparison: Comparison) -> Figure:
    """Bars of the output error and the bytes of each layer, the first on top."""
    rows = comparison.rows
    # The figure itself, not pyplot: no display is looked for, and no global state is left behind.
    figure = Figure(figsize=(10, 1.8 + 0.28 * len(rows)), layout="constrained")
    errors, sizes = figure.subplots(1, 2, sharey=True)
    _draw_errors(errors, comparison)
    _draw_sizes(sizes, comparison)
    whole = Line2D([], [], color="C3", linestyle="--", label="the model itself")
    names = {"before": _BEFORE, "quantized": _QUANTIZED, "left as it was": _LEFT}
    patches = [Patch(color=color, label=name) for name, color in names.items()]
    figure.legend(handles=[whole, *patches], loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_errors(axes: Axes, comparison: Comparison) -> None:
    rows = comparison.rows
    axes.barh(range(len(rows)), [100 * (row.output_error or 0.0) for row in rows], color=_colors(rows))
    for place, row in enumerate(rows):
        if row.output_error is None:
            axes.text(0, place, " not seen", va="center", color=_LEFT)
    axes.axvline(100 * comparison.output_error, color="C3", linestyle="--")
    axes.set_yticks(range(len(rows)), [row.path or row.type for row in rows])
    axes.invert_yaxis()
    _label(axes, "Output error", "% of the norm before")


def _draw_sizes(axes: Axes, comparison: Comparison) -> None:
    rows = comparison.rows
    axes.barh(range(len(rows)), [row.bytes_before / 1e3 for row in rows], color=_BEFORE)
    axes.barh(range(len(rows)), [row.bytes_after / 1e3 for row in rows], color=_colors(rows), height=0.5)
    _label(axes, "Weights", "kB")


def _colors(rows: Sequence[LayerComparison]) -> list[str]:
    return [_QUANTIZED if row.is_quantized else _LEFT for row in rows]


def _label(axes: Axes, title: str, xlabel: str) -> None:
    axes.set(title=title, xlabel=xlabel)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
