"""Bar charts: bars in a row for each name, several measures side by side."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHANGED, KEPT, BEFORE, WHOLE = "C0", "0.65", "0.9", "C3"
"""Colors: of what changed, of what stayed, of what was before, and of the whole."""


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
      line: where a dashed line crosses all names, if anywhere.
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
      names: what has a bar in each panel, the first on top.
      panels: the measures.
      legend: what each color means.
      line_name: what the dashed line means.

    >>> from jmp_policy import report
    >>> bars = report.Bars([1.0, None], report.CHANGED)
    >>> panel = report.Panel("Output error", "%", [bars], line=2.0, missing="not seen")
    >>> figure = report.BarChart(["first", "second"], [panel], {"quantized": report.CHANGED}, "the model itself").draw()
    >>> [axes.get_title() for axes in figure.axes]
    ['Output error']
    """

    names: Sequence[str]
    panels: Sequence[Panel]
    legend: Mapping[str, str]
    line_name: str

    def draw(self) -> "Figure":
        """Draws the chart."""
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        # The figure itself, not pyplot: no display is looked for, and no global state is left behind.
        figure = Figure(figsize=(5 * len(self.panels), 1.8 + 0.28 * len(self.names)), layout="constrained")
        all_axes = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
        for axes, panel in zip(all_axes, self.panels, strict=True):
            _draw_panel(axes, panel)
        all_axes[0].set_yticks(range(len(self.names)), self.names)
        all_axes[0].invert_yaxis()
        line = Line2D([], [], color=WHOLE, linestyle="--", label=self.line_name)
        patches = [Patch(color=color, label=name) for name, color in self.legend.items()]
        figure.legend(handles=[line, *patches], loc="outside lower center", ncols=1 + len(patches), frameon=False)
        return figure


def _draw_panel(axes: "Axes", panel: Panel) -> None:
    for bars in panel.bars:
        lengths = [length or 0.0 for length in bars.lengths]
        axes.barh(range(len(lengths)), lengths, color=bars.colors, height=bars.height)
        for position, length in enumerate(bars.lengths):
            if length is None:
                axes.text(0, position, f" {panel.missing}", va="center", color=KEPT)
    if panel.line is not None:
        axes.axvline(panel.line, color=WHOLE, linestyle="--")
    axes.set(title=panel.title, xlabel=panel.unit)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
