"""Plots: one palette of number formats, and figures of bars, of exponents and of shares over steps.

Figures are made without pyplot, and are as large as their names need, so that no text is cut.
"""

import dataclasses
import functools
import io
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..policy import Policy, parse_policy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of this size in inches, which a notebook shows."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("A plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    figure._repr_png_ = functools.partial(_draw_png, figure)  # pyright: ignore  # a partial survives pickling
    return figure


def make_note(text: str) -> "Figure":
    """Returns a figure that says why there is nothing to see."""
    figure = make_figure(6, 1)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


def _draw_png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


@dataclasses.dataclass(frozen=True)
class Style:
    """The color, line style and line width of a curve, as matplotlib reads them."""

    color: str
    dash: str | tuple[int, tuple[float, ...]]
    width: float

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`. Narrow lines are drawn above wide ones, so that both show where they coincide."""
        zorder = round(3 - self.width / 10, 3)
        return {"color": self.color, "linestyle": self.dash, "linewidth": self.width, "zorder": zorder}


ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
# Source: Okabe and Ito, Color Universal Design, 2008.

KEPT, BEFORE = "#8C8C8C", "#E4E4E4"
"""The colors of values that did not change, and of values before a change."""

UNSCALED = "float16 without a loss scale"

FORMAT_STYLES = {
    "float32": Style("#B0B0B0", "solid", 5.0),
    "bfloat16": Style(ORANGE, "solid", 3.0),
    "float16": Style(BLUE, (0, (4, 2)), 1.7),
    UNSCALED: Style(VERMILION, (0, (5, 1.5, 1, 1.5)), 1.5),
    "float8": Style(PURPLE, (0, (2, 1)), 2.2),
    "float8_e5m2": Style(PURPLE, (0, (8, 2, 2, 2)), 2.6),
    "int8": Style(GREEN, (0, (6, 3)), 1.9),
    "int4": Style(SKY, (0, (1, 1)), 1.6),
    "e4m3": Style(BLUE, (0, (5, 1)), 2.3),
    "nf4": Style(ORANGE, (0, (2, 2)), 2.0),
    "mxfp8": Style(BLACK, (0, (7, 1.5)), 2.1),
    "mxfp4": Style(YELLOW, (0, (3, 3)), 1.4),
    "nvfp4": Style(VERMILION, (0, (3, 1, 1, 1)), 1.8),
}
"""By number format. Formats that share a color never appear in one bar chart, and differ in dash and width."""

OTHER_STYLES = (
    Style(GREEN, "solid", 2.4),
    Style(VERMILION, (0, (4, 3)), 2.0),
    Style(SKY, (0, (1.5, 1.5)), 1.7),
    Style(BLACK, (0, (6, 2, 1, 2)), 1.4),
)
"""For curves that do not belong to a number format, in this order."""

REFERENCE_LINE: dict[str, Any] = {"color": "#4D4D4D", "linestyle": (0, (1, 2)), "linewidth": 1.3, "zorder": 1.9}
"""Keywords of `Axes.axhline` and `Axes.axvline` for a value to compare with, such as a baseline."""


def list_styles(formats: Iterable[str]) -> dict[str, Style]:
    """Returns the styles of formats by name; formats without a style of their own get the other styles in turn."""
    others = itertools.cycle(OTHER_STYLES)
    keys = {name: "float8" if name == "float8_e4m3fn" else _drop_options(name) for name in formats}
    return {name: FORMAT_STYLES[key] if key in FORMAT_STYLES else next(others) for name, key in keys.items()}


def find_style(format: str | Policy, *, is_scaled: bool = True) -> Style:
    """Returns the style of a format, or of a policy by its quantization or compute dtype."""
    name = _name_format(format) if isinstance(format, Policy) else _drop_options(format)
    if not isinstance(format, Policy) and name not in FORMAT_STYLES:
        name = _name_format(parse_policy(format))
    if name not in FORMAT_STYLES:
        raise ValueError(f"No style for {name!r}. There is one for {', '.join(map(repr, FORMAT_STYLES))}.")
    return FORMAT_STYLES[UNSCALED if name == "float16" and not is_scaled else name]


def _name_format(policy: Policy) -> str:
    if policy.quantization is not None:
        return _drop_options(str(policy.quantization))
    return "float32" if policy.compute_dtype is None else str(policy.compute_dtype)


def _drop_options(format: str) -> str:
    return re.split("[/(]", format, maxsplit=1)[0]


# Sizes of bar charts, in inches.
_PANEL_WIDTH, _CHARACTER_WIDTH, _LEGEND_WIDTH = 4.4, 0.085, 1.9
_ROW_HEIGHT, _OTHER_HEIGHT = 0.24, 1.9
_NAME_SIZE = 9  # points


class Bars(NamedTuple):
    """A bar per name. A length of None is not drawn; a height of 1 leaves no space between bars."""

    lengths: Sequence[float | None]
    colors: Sequence[str] | str
    height: float = 0.8


class Panel(NamedTuple):
    """A panel of a bar chart: later bars over earlier ones, and an optional vertical line."""

    title: str
    unit: str
    bars: Sequence[Bars]
    line: float | None = None
    missing: str = ""  # the word in place of a bar without a length


def plot_bars(
    kind: str, names: Sequence[str], panels: Sequence[Panel], legend: Mapping[str, str], line_name: str
) -> "Figure":
    """Draws several measures of the same names side by side; `legend` maps a meaning to its color."""
    width = _PANEL_WIDTH * len(panels) + _CHARACTER_WIDTH * max(map(len, names), default=0)
    figure = make_figure(width, _OTHER_HEIGHT + _ROW_HEIGHT * len(names))
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(all_axes, panels, strict=True):
        _draw_bars(axes, panel)
    first = all_axes[0]
    first.set_yticks(range(len(names)), names, fontsize=_NAME_SIZE)
    first.set_ylim(len(names) - 0.4, -0.6)
    first.set_ylabel(kind)
    line = Line2D([], [], **REFERENCE_LINE, label=line_name)
    patches = [Patch(color=color, label=name) for name, color in legend.items()]
    columns = max(1, min(1 + len(patches), int(width / _LEGEND_WIDTH)))
    figure.legend(handles=[line, *patches], loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _draw_bars(axes: "Axes", panel: Panel) -> None:
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


# Sizes of histograms, in inches.
_WIDTH, _HEIGHT, _STRIP_HEIGHT, _LEGEND_HEIGHT = 8.5, 1.9, 0.21, 0.75
_SUBNORMAL_ALPHA = 0.35


class FormatRange(NamedTuple):
    """The exponents of the smallest, the smallest normal and the largest number of a format."""

    name: str
    style: Style
    least: float
    normal: float
    most: float


class Histogram(NamedTuple):
    """The share of elements at each exponent, and what each format would lose, in words."""

    title: str
    shares: Sequence[float]
    losses: Mapping[str, str]


def plot_histograms(first: int, histograms: Sequence[Histogram], ranges: Sequence[FormatRange]) -> "Figure":
    """Draws histograms of exponents from `first` on, above ranges of formats. The outer bins count all beyond them too.

    Source: Micikevicius et al., Mixed Precision Training, ICLR 2018, figure 3.
    """
    if not histograms:
        return make_note("Nothing was measured.")
    strips = _STRIP_HEIGHT * max(1, len(ranges))
    figure = make_figure(_WIDTH, len(histograms) * (_HEIGHT + strips + _LEGEND_HEIGHT / 2) + _LEGEND_HEIGHT)
    heights = [_HEIGHT, strips] * len(histograms)
    all_axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = first + len(histograms[0].shares)
    for histogram, above, below in zip(histograms, all_axes[::2], all_axes[1::2], strict=True):
        _draw_histogram(above, first, histogram, ranges)
        _draw_ranges(below, (first, end), histogram, ranges)
    all_axes[0].set_xlim(first, end)
    ticks = range(-(-first // 8) * 8, end + 1, 8)
    all_axes[-1].set_xticks(ticks, [f"$2^{{{tick}}}$" for tick in ticks])
    all_axes[-1].set_xlabel("magnitude (light: subnormal numbers of a format)", fontsize=_NAME_SIZE)
    return figure


def _draw_histogram(axes: "Axes", first: int, histogram: Histogram, ranges: Sequence[FormatRange]) -> None:
    percent = [100 * share for share in histogram.shares]
    positions = [first + index + 0.5 for index in range(len(percent))]
    axes.bar(positions, percent, width=1.0, color=KEPT, edgecolor="white", linewidth=0.4)
    for _, style, least, _, most in ranges:
        for edge in (least, most):
            axes.axvline(edge, color=style.color, linestyle=style.dash, linewidth=1.1, zorder=3)
    axes.set_title(histogram.title, loc="left", fontsize=10, wrap=True)
    axes.set_ylabel("% of numbers", fontsize=_NAME_SIZE)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.08)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_ranges(axes: "Axes", limits: tuple[int, int], histogram: Histogram, ranges: Sequence[FormatRange]) -> None:
    for row, (name, style, *bounds) in enumerate(ranges):
        least, normal, most = (min(max(bound, limits[0]), limits[1]) for bound in bounds)
        axes.barh(row, normal - least, 0.62, least, color=style.color, alpha=_SUBNORMAL_ALPHA, linewidth=0)
        axes.barh(row, most - normal, 0.62, normal, color=style.color, linewidth=0)
        loss = histogram.losses.get(name, "")
        axes.text(1.01, row, loss, transform=axes.get_yaxis_transform(), va="center", fontsize=_NAME_SIZE)
    axes.set_yticks(range(len(ranges)), [each.name for each in ranges], fontsize=_NAME_SIZE)
    axes.set_ylim(max(1, len(ranges)) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


# Sizes of heat maps, in inches.
_HEAT_ROW_HEIGHT, _PANEL_HEIGHT, _HEAT_HEIGHT = 0.17, 0.45, 1.1
_HEAT_CHARACTER_WIDTH, _COLUMN_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 0.07, 0.25, 4.0, 8.0
_HEAT_NAME_SIZE = 8
_MOST_TICKS = 12
_HEAT = ("#FFFFFF", "#F6D2B5", "#E88B45", "#B24A00", "#5A1F00")  # lightness alone tells them apart, too
_HEAT_TICKS = {0.0: "0", 0.05: "5%", 0.2: "20%", 0.5: "50%", 1.0: "100%"}

Shares = Mapping[str, Sequence[float]]
"""By name of a row, a share for each column; nan where there is none."""


def plot_heat_map(title: str, unit: str, kind: str, columns: Sequence[str], panels: Mapping[str, Shares]) -> "Figure":
    """Draws shares as colors, a panel of rows above the other; `kind` names the columns below the axis."""
    if not panels:
        return make_note("Nothing was measured.")
    rows = [len(shares) for shares in panels.values()]
    longest = max(len(name) for shares in panels.values() for name in shares)
    width = min(max(_COLUMN_WIDTH * len(columns), _LEAST_WIDTH), _MOST_WIDTH) + _HEAT_CHARACTER_WIDTH * longest
    figure = make_figure(width + 1, _HEAT_HEIGHT + sum(_PANEL_HEIGHT + _HEAT_ROW_HEIGHT * count for count in rows))
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("loss", _HEAT).with_extremes(bad=BEFORE)
    norm = PowerNorm(0.5, 0, 1)  # small shares show
    all_axes = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=[n + 1 for n in rows])[:, 0]
    for axes, (name, shares) in zip(all_axes, panels.items(), strict=True):
        axes.imshow([*shares.values()], cmap=colors, norm=norm, aspect="auto", interpolation="none")
        axes.set_yticks(range(len(shares)), [*shares], fontsize=_HEAT_NAME_SIZE)
        axes.set_title(name, loc="left", fontsize=10)
        axes.tick_params(length=0)
    shown = range(0, len(columns), -(-len(columns) // _MOST_TICKS))
    all_axes[-1].set_xticks(shown, [columns[index] for index in shown], fontsize=_HEAT_NAME_SIZE)
    all_axes[-1].set_xlabel(kind)
    figure.suptitle(title, fontsize=11)
    bar = figure.colorbar(
        all_axes[0].images[0], ax=list(all_axes), label=unit, shrink=min(1.0, 12 / sum(rows)), pad=0.02
    )
    bar.set_ticks(list(_HEAT_TICKS), labels=list(_HEAT_TICKS.values()))
    return figure
