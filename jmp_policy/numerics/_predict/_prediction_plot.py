"""The magnitudes of scopes beside the range of a format: what does not fit stands out."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...report import BEFORE, KEPT, list_styles, make_figure, make_note
from .._stats import FloatFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SCOPES = 40
_LOST = "#D55E00"
"""Vermilion, as what is lost has in tables."""

# In inches. A figure grows with its names, so that none is cut and no two collide.
_ROW_HEIGHT, _OTHER_HEIGHT = 0.24, 1.5
_PANEL_WIDTH, _CHARACTER_WIDTH = 4.2, 0.075
_NAME_SIZE = 9


class SpanBar(NamedTuple):
    """The magnitudes of the values that a scope has in a format in one pass.

    Attributes:
      path: the scope.
      direction: the pass.
      format: the format.
      least: the exponent of the smallest numbers that matter.
      most: the exponent of the largest number.
      is_lost: whether a reason is about it.
      is_saved: whether the loss scale is all that it needs.
    """

    path: str
    direction: str
    format: str
    least: float
    most: float
    is_lost: bool
    is_saved: bool = False


def plot_spans(spans: Sequence[SpanBar], asked_scale: float, loss_scale: float | None) -> "Figure":
    """Draws a panel for each pass.

    Raises:
      ImportError: matplotlib is not installed.
    """
    paths = list(dict.fromkeys(span.path for span in spans))[:MOST_SCOPES]
    if not paths:
        return make_note("No value would be in a narrow format.")
    directions = list(dict.fromkeys(sorted((span.direction for span in spans), key="backward".__eq__)))
    width = _PANEL_WIDTH * len(directions) + _CHARACTER_WIDTH * max(map(len, paths)) + 0.6
    figure = make_figure(width, _OTHER_HEIGHT + _ROW_HEIGHT * len(paths))
    all_axes = figure.subplots(1, len(directions), sharey=True, sharex=True, squeeze=False)[0]
    shift = math.log2((loss_scale or asked_scale) / asked_scale)
    for axes, direction in zip(all_axes, directions, strict=True):
        own = [span for span in spans if span.direction == direction and span.path in paths]
        _draw_panel(axes, own, paths, shift if direction == "backward" else 0.0)
        scaled = f", loss scale {loss_scale:g}" if direction == "backward" and loss_scale is not None else ""
        axes.set_title(f"{direction}{scaled}", fontsize=10, loc="left")
    first = all_axes[0]
    first.set_yticks(range(len(paths)), [path or "(no scope)" for path in paths], fontsize=_NAME_SIZE)
    first.set_ylim(len(paths) - 0.4, -0.6)
    _draw_legend(figure, spans, shift)
    return figure


def _draw_panel(axes: "Axes", spans: Sequence[SpanBar], paths: Sequence[str], shift: float) -> None:
    styles = list_styles(dict.fromkeys(span.format for span in spans))
    for name, style in styles.items():
        known = parse_format(name)
        if isinstance(known, FloatFormat):
            least = known.min_exponent - known.mantissa_bits
            axes.axvspan(least, known.min_exponent, color=style.color, alpha=0.07, linewidth=0)
            axes.axvspan(known.min_exponent, math.log2(known.max), color=style.color, alpha=0.17, linewidth=0)
    for span in spans:
        row, length = paths.index(span.path), max(0.35, span.most - span.least)
        if shift:
            edge = _LOST if span.is_lost else KEPT
            axes.barh(row, length, 0.62, span.least, color=BEFORE, edgecolor=edge, linewidth=1.0)
        color = _LOST if span.is_lost and not (span.is_saved and shift) else KEPT
        axes.barh(row, length, 0.34 if shift else 0.62, span.least + shift, color=color, linewidth=0)
    low = min([-26.0, *(span.least for span in spans)])
    high = max([18.0, *(span.most for span in spans), *(span.most + shift for span in spans)])
    axes.set_xlim(max(low, -60) - 1, min(high, 60) + 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"$2^{{{value:g}}}$")
    axes.set_xlabel("magnitude", fontsize=_NAME_SIZE)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_legend(figure: "Figure", spans: Sequence[SpanBar], shift: float) -> None:
    from matplotlib.patches import Patch

    styles = list_styles(dict.fromkeys(span.format for span in spans))
    patches = [Patch(color=style.color, alpha=0.3, label=f"{name} (pale: subnormal)") for name, style in styles.items()]
    patches.append(Patch(color=KEPT, label="fits"))
    if any(span.is_lost and not span.is_saved for span in spans):
        patches.append(Patch(color=_LOST, label="does not: float32 by the map"))
    if shift:
        is_saving = any(span.is_saved for span in spans)
        patches.append(Patch(facecolor=BEFORE, edgecolor=_LOST if is_saving else KEPT, label="before the loss scale"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=_NAME_SIZE)
