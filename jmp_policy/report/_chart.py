"""Bar charts: bars in a row for each name, several measures side by side."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ._figure import make_figure
from ._palette import REFERENCE_LINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches. A figure grows with its names, so that none is cut and no two collide.
_PANEL_WIDTH, _CHARACTER_WIDTH, _LEGEND_WIDTH = 4.4, 0.085, 1.9
_ROW_HEIGHT, _OTHER_HEIGHT = 0.24, 1.9
_NAME_SIZE = 9
"""The font size of names, in points."""


@dataclasses.dataclass(frozen=True)
class Bars:
    """A bar for each name.

    Attributes:
      lengths: how long each is; `None` where there is nothing to draw.
      colors: a color for each, or one for all.
      height: the thickness, of which 1 leaves no space between names.
    """

    lengths: Sequence[float | None]
    colors: Sequence[str] | str
    height: float = 0.8


@dataclasses.dataclass(frozen=True)
class Panel:
    """One measure.

    Attributes:
      title: what is measured.
      unit: the unit, below the axis.
      bars: the bars, later ones over the ones before.
      line: where a line crosses all names, if anywhere.
      missing: the word in place of a bar that has no length.
    """

    title: str
    unit: str
    bars: Sequence[Bars]
    line: float | None = None
    missing: str = ""


@dataclasses.dataclass(frozen=True)
class BarChart:
    """Several measures of the same names, side by side.

    Attributes:
      kind: what has a name: the label of the axis of names.
      names: what has a bar in each panel, the first on top.
      panels: the measures.
      legend: what each color means.
      line_name: what the line means.

    >>> from jmp_policy.report import BarChart, Bars, Panel
    >>> panel = Panel("Output error", "%", [Bars([1.0, None], "C0")], line=2.0, missing="not seen")
    >>> figure = BarChart("layer", ["first", "second"], [panel], {"quantized": "C0"}, "the model itself").draw()
    >>> [(axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) for axes in figure.axes]
    [('Output error', '%', 'layer')]
    """

    kind: str
    names: Sequence[str]
    panels: Sequence[Panel]
    legend: Mapping[str, str]
    line_name: str

    def draw(self) -> "Figure":
        """Draws the chart.

        Raises:
          ImportError: matplotlib is not installed.
        """
        width = _PANEL_WIDTH * len(self.panels) + _CHARACTER_WIDTH * max(map(len, self.names), default=0)
        height = _OTHER_HEIGHT + _ROW_HEIGHT * len(self.names)
        figure = make_figure(width, height)
        all_axes = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axes, panel in zip(all_axes, self.panels, strict=True):
            _draw_panel(axes, panel)
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        first = all_axes[0]
        first.set_yticks(range(len(self.names)), self.names, fontsize=_NAME_SIZE)
        first.set_ylim(len(self.names) - 0.4, -0.6)
        first.set_ylabel(self.kind)
        line = Line2D([], [], **REFERENCE_LINE, label=self.line_name)
        patches = [Patch(color=color, label=name) for name, color in self.legend.items()]
        columns = max(1, min(1 + len(patches), int(width / _LEGEND_WIDTH)))
        figure.legend(handles=[line, *patches], loc="outside lower center", ncols=columns, frameon=False)
        return figure


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for bars in panel.bars:
        lengths = [0.0 if length is None or not math.isfinite(length) else length for length in bars.lengths]
        axes.barh(range(len(lengths)), lengths, color=bars.colors, height=bars.height)
        for position, length in enumerate(bars.lengths):
            word = panel.missing if length is None else "" if math.isfinite(length) else "not finite"
            if word:
                axes.text(0, position, f" {word}", va="center", color=REFERENCE_LINE["color"], fontsize=_NAME_SIZE)
    if panel.line is not None and math.isfinite(panel.line):
        axes.axvline(panel.line, **REFERENCE_LINE)
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.set_xlim(left=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
