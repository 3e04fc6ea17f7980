"""Plots: figures without pyplot, one palette of formats, bars, exponents and heat maps."""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..policy import Policy, parse_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
    """An empty figure of so many inches, whose layout leaves room for all texts.

    A notebook shows it, whether or not pyplot was asked to draw there before.

    Raises:
      ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = functools.partial(_draw_png, figure)  # pyright: ignore  # a partial survives pickling
    return figure


def make_note(text: str) -> "Figure":
    """A figure that only says why there is nothing to see."""
    figure = make_figure(6, 1)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


def _draw_png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


@dataclasses.dataclass(frozen=True)
class Style:
    """How a curve, or what else has a color, looks.

    Attributes:
      color: as matplotlib reads it.
      dash: the line style, as matplotlib reads it.
      width: the width of the line in points.

    >>> from jmp_policy import report
    >>> report.Style("#0072B2", (0, (4, 2)), 1.8).line
    {'color': '#0072B2', 'linestyle': (0, (4, 2)), 'linewidth': 1.8, 'zorder': 2.82}
    """

    color: str
    dash: str | tuple[int, tuple[float, ...]]
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`. Narrow lines lie above wide ones, so that curves that coincide all show."""
        zorder = round(3 - self.width / 10, 3)
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.width, "zorder": zorder}


UNSCALED = "float16 without a loss scale"
"""The key of `FORMAT_STYLES` for float16 whose small gradients are lost."""

FORMAT_STYLES = {
    "float32": Style("#B0B0B0", "solid", 5.0),
    "bfloat16": Style("#E69F00", "solid", 3.0),
    "float16": Style("#0072B2", (0, (4, 2)), 1.7),
    UNSCALED: Style("#D55E00", (0, (5, 1.5, 1, 1.5)), 1.5),
    "float8": Style("#AA3377", (0, (2, 1)), 2.2),
    "float8_e5m2": Style("#40004B", (0, (8, 2, 2, 2)), 2.6),
    "int8": Style("#009E73", (0, (6, 3)), 1.9),
    "int4": Style("#56B4E9", (0, (1, 1)), 1.6),
    "mxfp8": Style("#1E0FB4", (0, (7, 1.5)), 2.1),
    "mxfp4": Style("#000000", (0, (3, 3)), 1.4),
    "nvfp4": Style("#780F0F", (0, (3, 1, 1, 1)), 1.8),
}
"""By number format. People with any color vision can tell the colors apart; dash and width tell curves apart that
coincide, and in print. Source of the colors: Okabe and Ito, Color Universal Design, 2008; float8's: Tol, as below;
those of blocks were searched for, far from all others."""

OTHER_STYLES = (
    Style("#332288", "solid", 2.4),
    Style("#44AA99", (0, (4, 3)), 2.0),
    Style("#882255", (0, (1.5, 1.5)), 1.7),
    Style("#999933", (0, (6, 2, 1, 2)), 1.4),
)
"""For curves that no number format tells apart, as of ways to round or to quantize: in this order. Source of the
colors: Tol, Colour Schemes, SRON 2021 (muted)."""

KEPT, BEFORE = "#8C8C8C", "#E4E4E4"
"""The colors of what stayed as it was, and of what was before."""

REFERENCE_LINE: dict[str, Any] = {"color": "#4D4D4D", "linestyle": (0, (1, 2)), "linewidth": 1.3, "zorder": 1.9}
"""Keywords of `Axes.axhline` and `Axes.axvline` for a value to compare with, such as a baseline."""


def list_styles(formats: Iterable[str]) -> dict[str, Style]:
    """How formats look beside each other, by name: float8 is e4m3fn, and what has no style of its own takes another.

    >>> from jmp_policy.report import FORMAT_STYLES, list_styles
    >>> styles = list_styles(["float8_e4m3fn", "int8/64", "float8_e3m4", "float4_e2m1fn"])
    >>> styles["float8_e4m3fn"] == FORMAT_STYLES["float8"], styles["int8/64"] == FORMAT_STYLES["int8"]
    (True, True)
    >>> styles["float8_e3m4"] == styles["float4_e2m1fn"]
    False
    """
    others = itertools.cycle(OTHER_STYLES)
    keys = {name: "float8" if name == "float8_e4m3fn" else _drop_options(name) for name in formats}
    return {name: FORMAT_STYLES[key] if key in FORMAT_STYLES else next(others) for name, key in keys.items()}


def find_style(format: str | Policy, *, is_scaled: bool = True) -> Style:
    """Finds how a number format looks.

    A policy looks as its quantization does, and without one as the dtype it computes in.

    Args:
      format: a key of `FORMAT_STYLES`, a quantized format such as `"int4/64"`, a policy, or the string of a policy.
      is_scaled: whether training in float16 has a loss scale.

    Raises:
      ValueError: the string is neither, or the policy computes in a dtype without a style.

    >>> from jmp_policy.report import FORMAT_STYLES, find_style
    >>> find_style("mixed_bfloat16") == find_style("bfloat16")
    True
    >>> find_style("mixed_float16", is_scaled=False) == FORMAT_STYLES["float16 without a loss scale"]
    True
    >>> find_style("int8_from_mixed_bfloat16").color, find_style("int8(min_size=0)").color
    ('#009E73', '#009E73')
    """
    name = _name_format(format) if isinstance(format, Policy) else _read_format(format)
    if name not in FORMAT_STYLES:
        raise ValueError(f"No style for {name!r}. There is one for {', '.join(map(repr, FORMAT_STYLES))}.")
    return FORMAT_STYLES[UNSCALED if name == "float16" and not is_scaled else name]


def _read_format(text: str) -> str:
    name = _drop_options(text)
    return name if name in FORMAT_STYLES else _name_format(parse_policy(text))


def _name_format(policy: Policy) -> str:
    """What the products of a policy are computed in; where the compute dtype is inferred, that is float32."""
    if policy.quantization is not None:
        return _drop_options(str(policy.quantization))
    return "float32" if policy.compute_dtype is None else str(policy.compute_dtype)


def _drop_options(format: str) -> str:
    return re.split("[/(]", format, maxsplit=1)[0]


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


# In inches.
_WIDTH, _HEIGHT, _STRIP_HEIGHT, _LEGEND_HEIGHT = 8.5, 1.9, 0.21, 0.75
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
        figure = make_figure(_WIDTH, len(self.histograms) * (_HEIGHT + strips + _LEGEND_HEIGHT / 2) + _LEGEND_HEIGHT)
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
