"""Shares of many rows in many columns, as colors."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._plots import BEFORE, make_figure, make_note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In inches. A figure grows with its names, so that none is cut and no two collide.
_HEAT_ROW_HEIGHT, _PANEL_HEIGHT, _HEAT_HEIGHT = 0.17, 0.45, 1.1
_HEAT_CHARACTER_WIDTH, _COLUMN_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 0.07, 0.25, 4.0, 8.0
_HEAT_NAME_SIZE = 8
_MOST_TICKS = 12

_COLORS = ("#FFFFFF", "#F6D2B5", "#E88B45", "#B24A00", "#5A1F00")
"""White for nothing, and from pale to dark vermilion for more: lightness alone tells them apart, too."""

_TICKS = {0.0: "0", 0.05: "5%", 0.2: "20%", 0.5: "50%", 1.0: "100%"}


@dataclasses.dataclass(frozen=True)
class HeatPanel:
    """Rows of one kind.

    Attributes:
      title: what they have in common.
      names: the names of rows, the first on top.
      shares: of each row, a share for each column; nan where there is none.
    """

    title: str
    names: Sequence[str]
    shares: Sequence[Sequence[float]]


@dataclasses.dataclass(frozen=True)
class HeatMap:
    """Shares of rows, in the same columns for all panels.

    Small shares show: colors follow the root of a share. A grey field has no share.

    Attributes:
      title: what is shown.
      unit: what the shares are of, beside the colors.
      kind: what a column is, below the axis.
      columns: the names of columns.
      panels: the rows.

    >>> from jmp_policy.report import HeatMap, HeatPanel
    >>> panel = HeatPanel("backward", ["first", "second"], [[0.0, 0.5], [0.1, float("nan")]])
    >>> figure = HeatMap("float16", "share that becomes zero", "step", ["0", "100"], [panel]).draw()
    >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
    ['first', 'second']
    """

    title: str
    unit: str
    kind: str
    columns: Sequence[str]
    panels: Sequence[HeatPanel]

    def draw(self) -> "Figure":
        """Draws the map.

        Raises:
          ImportError: matplotlib is not installed.
        """
        if not self.panels:
            return make_note("Nothing was measured.")
        rows = [len(panel.names) for panel in self.panels]
        longest = max(len(name) for panel in self.panels for name in panel.names)
        width = min(max(_COLUMN_WIDTH * len(self.columns), _LEAST_WIDTH), _MOST_WIDTH) + _HEAT_CHARACTER_WIDTH * longest
        figure = make_figure(width + 1, _HEAT_HEIGHT + sum(_PANEL_HEIGHT + _HEAT_ROW_HEIGHT * count for count in rows))
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        colors = LinearSegmentedColormap.from_list("loss", _COLORS).with_extremes(bad=BEFORE)
        all_axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in rows])[:, 0]
        images = []
        for axes, panel in zip(all_axes, self.panels, strict=True):
            image = axes.imshow(
                panel.shares, cmap=colors, norm=PowerNorm(0.5, 0, 1), aspect="auto", interpolation="none"
            )
            images.append(image)
            axes.set_yticks(range(len(panel.names)), panel.names, fontsize=_HEAT_NAME_SIZE)
            axes.set_title(panel.title, loc="left", fontsize=10)
            axes.tick_params(length=0)
        every = -(-len(self.columns) // _MOST_TICKS)
        shown = range(0, len(self.columns), every)
        all_axes[-1].set_xticks(shown, [self.columns[index] for index in shown], fontsize=_HEAT_NAME_SIZE)
        all_axes[-1].set_xlabel(self.kind)
        figure.suptitle(self.title, fontsize=11)
        bar = figure.colorbar(images[0], ax=list(all_axes), label=self.unit, shrink=min(1.0, 12 / sum(rows)), pad=0.02)
        bar.set_ticks(list(_TICKS), labels=list(_TICKS.values()))
        return figure
