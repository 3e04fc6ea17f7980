"""How numbers spread over exponents, above the ranges of number formats."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ._figure import make_figure, make_note
from ._palette import KEPT, Style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# In inches.
_WIDTH, _HEIGHT, _STRIP_HEIGHT, _OTHER_HEIGHT = 8.5, 1.9, 0.21, 0.75
_SUBNORMAL_ALPHA = 0.35
_TEXT_SIZE = 9


@dataclasses.dataclass(frozen=True)
class FormatRange:
    """The magnitudes that a format has, as exponents of two.

    Attributes:
      name: what it is called.
      style: how it looks.
      least: of its smallest number.
      normal: of its smallest normal number.
      most: of its largest number.
    """

    name: str
    style: Style
    least: float
    normal: float
    most: float


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many numbers have each exponent.

    Attributes:
      title: what they are of.
      shares: of all numbers, those of each exponent.
      losses: by name of a format, what it would lose, in words.
    """

    title: str
    shares: Sequence[float]
    losses: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class ExponentChart:
    """Histograms of exponents, one above the other, and below each the ranges of formats.

    The first bin stands for all smaller numbers, the last one for all larger ones.

    Attributes:
      first: the exponent at which the first bin begins.
      histograms: the histograms, of as many bins each.
      ranges: the formats.

    >>> from jmp_policy.report import FORMAT_STYLES, ExponentChart, FormatRange, Histogram
    >>> half = FormatRange("float16", FORMAT_STYLES["float16"], -24, -14, 16)
    >>> figure = ExponentChart(-30, [Histogram("gradients", [0.1] * 10, {"float16": "60% zero"})], [half]).draw()
    >>> [axes.get_title(loc="left") for axes in figure.axes]
    ['gradients', '']

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """

    first: int
    histograms: Sequence[Histogram]
    ranges: Sequence[FormatRange]

    def draw(self) -> "Figure":
        """Draws the chart.

        Raises:
          ImportError: matplotlib is not installed.
        """
        if not self.histograms:
            return make_note("Nothing was measured.")
        strips = _STRIP_HEIGHT * max(1, len(self.ranges))
        figure = make_figure(_WIDTH, len(self.histograms) * (_HEIGHT + strips + _OTHER_HEIGHT / 2) + _OTHER_HEIGHT)
        heights = [_HEIGHT, strips] * len(self.histograms)
        all_axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        bins = len(self.histograms[0].shares)
        for histogram, above, below in zip(self.histograms, all_axes[::2], all_axes[1::2], strict=True):
            self._draw_histogram(above, histogram)
            self._draw_ranges(below, histogram)
        all_axes[0].set_xlim(self.first, self.first + bins)
        ticks = range(-(-self.first // 8) * 8, self.first + bins + 1, 8)
        all_axes[-1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
        all_axes[-1].set_xlabel("magnitude (light: subnormal numbers of a format)", fontsize=_TEXT_SIZE)
        return figure

    def _draw_histogram(self, axes: "Axes", histogram: Histogram) -> None:
        percent = [100 * share for share in histogram.shares]
        positions = [self.first + index + 0.5 for index in range(len(percent))]
        axes.bar(positions, percent, width=1.0, color=KEPT, edgecolor="white", linewidth=0.4)
        for of_format in self.ranges:
            for edge in (of_format.least, of_format.most):
                axes.axvline(edge, color=of_format.style.color, linestyle=of_format.style.dash, linewidth=1.1, zorder=3)
        axes.set_title(histogram.title, loc="left", fontsize=10, wrap=True)
        axes.set_ylabel("% of numbers", fontsize=_TEXT_SIZE)
        axes.set_ylim(bottom=0)
        axes.margins(y=0.08)
        axes.tick_params(axis="x", bottom=False, labelbottom=False)
        axes.spines[["top", "right"]].set_visible(False)

    def _draw_ranges(self, axes: "Axes", histogram: Histogram) -> None:
        end = self.first + len(histogram.shares)
        for row, of_format in enumerate(self.ranges):
            color = of_format.style.color
            bounds = [min(max(bound, self.first), end) for bound in (of_format.least, of_format.normal, of_format.most)]
            axes.barh(row, bounds[1] - bounds[0], 0.62, bounds[0], color=color, alpha=_SUBNORMAL_ALPHA, linewidth=0)
            axes.barh(row, bounds[2] - bounds[1], 0.62, bounds[1], color=color, linewidth=0)
            loss = histogram.losses.get(of_format.name, "")
            axes.text(1.01, row, loss, transform=axes.get_yaxis_transform(), va="center", fontsize=_TEXT_SIZE)
        axes.set_yticks(range(len(self.ranges)), [of_format.name for of_format in self.ranges], fontsize=_TEXT_SIZE)
        axes.set_ylim(max(1, len(self.ranges)) - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
