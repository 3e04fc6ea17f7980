"""What a history of statistics is drawn from: layers over steps."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..._base import did_you_mean
from ...report import KEPT, OTHER_STYLES, FormatRange, HeatMap, HeatPanel, make_figure, make_note
from ._layout import DIRECTIONS, check_direction
from ._row import Row
from ._stats_plot import list_ranges
from ._what_if import parse_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 150
"""A heat map shows so many rows."""

_FAR = 4
"""So many binades above the highest curve a format's largest number still has a line; 2**20 always has."""

# In inches.
_WIDTH, _HEIGHT, _CHARACTER_WIDTH = 6.2, 3.2, 0.075
_LEGEND_CHARACTERS = 22

Steps = Sequence[tuple[int, Sequence[Row]]]
Place = tuple[str, str]
"""A direction, and a name in it."""

Table = dict[Place, list[float]]
"""By place, a number for each step; nan where there is none."""


def plot_underflow(steps: Steps, format: str, direction: str | None) -> "Figure":
    """Draws the share of numbers that a format makes zero, layer by step."""
    check_direction(direction)
    name = parse_format(format).name
    measured = dict.fromkeys(name for _, rows in steps for row in rows for name in row.formats)
    if measured and name not in measured:
        raise ValueError(f"The format {name!r} was not measured. {did_you_mean(name, measured)}")
    table = _tabulate(steps, direction, lambda rows: _pool_underflow(rows, name))
    worst = sorted(
        (place for place in table if _find_peak(table[place]) > 0), key=lambda place: -_find_peak(table[place])
    )
    chosen = set(worst[:MOST_ROWS])
    if table and not chosen:
        return make_note(f"{name} makes none of the {len(table)} rows lose a number to zero.")
    panels, idle = [], []
    for title, group in _split(table).items():
        shown = {row: shares for row, shares in group.items() if (title, row) in chosen}
        if shown:
            panels.append(HeatPanel(_count_left_out(title, group, len(shown)), list(shown), list(shown.values())))
        else:
            idle.append(f"; {title}: nothing")
    columns = [str(step) for step, _ in steps]
    return HeatMap(
        "".join([f"{name}: what becomes zero", *idle]), "share of all numbers", "step", columns, panels
    ).draw()


def plot_amax(steps: Steps, formats: Sequence[str] | None, direction: str | None) -> "Figure":
    """Draws the largest magnitude of each layer over the steps."""
    check_direction(direction)
    measured = dict.fromkeys(name for _, rows in steps for row in rows for name in row.formats)
    ranges = list(list_ranges(measured if formats is None else formats).values())
    panels = _split(_tabulate(steps, direction, _find_exponent))
    if not panels:
        return make_note("Nothing was measured.")
    longest = max(len(name) for curves in panels.values() for name in curves)
    figure = make_figure(_WIDTH + _CHARACTER_WIDTH * max(longest, _LEGEND_CHARACTERS), _HEIGHT * len(panels))
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
        axes.set_title(f"{name}: largest magnitude", loc="left", fontsize=10)
        _draw_curves(axes, [step for step, _ in steps], curves)
        _draw_limits(axes, max(map(_find_peak, curves.values())), ranges)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    all_axes[-1].set_xlabel("step")
    return figure


def _count_left_out(title: str, rows: dict[str, list[float]], shown: int) -> str:
    """The title of a panel, which says how many rows lose nothing, or less than what is drawn."""
    idle = sum(_find_peak(shares) == 0 for shares in rows.values())
    counts = {"lose nothing": idle, "lose less": len(rows) - idle - shown}
    return "; ".join([title, *(f"{count} of {len(rows)} rows {what}" for what, count in counts.items() if count)])


def _draw_curves(axes: "Axes", steps: Sequence[int], curves: dict[str, list[float]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    highest = sorted(curves, key=lambda name: _find_peak(curves[name]), reverse=True)[: len(OTHER_STYLES)]
    named = dict(zip(highest, OTHER_STYLES, strict=False))
    marker = "." if len(steps) < 3 else ""  # one step alone makes no line
    for name, exponents in curves.items():
        if name not in named:
            axes.plot(steps, exponents, color=KEPT, linewidth=0.7, alpha=0.6, marker=marker)
    for name, style in named.items():
        axes.plot(steps, curves[name], **style.line, marker=marker, label=name)
    if others := len(curves) - len(named):
        axes.plot([], [], color=KEPT, linewidth=0.7, label=f"{others} other{'s' if others > 1 else ''}")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda exponent, _: f"$2^{{{exponent:g}}}$"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.grid(axis="y", alpha=0.25)


def _draw_limits(axes: "Axes", peak: float, ranges: Iterable[FormatRange]) -> None:
    for of_format in ranges:
        if of_format.most <= max(20, peak + _FAR):
            line = of_format.style.line | {"linewidth": 1.3}
            axes.axhline(of_format.most, **line, label=f"largest {of_format.name}")


def _tabulate(steps: Steps, direction: str | None, read: Callable[[list[Row]], float]) -> Table:
    """What a function reads of the rows at each place and step, in the order of the program."""
    table: Table = {}
    for column, (_, rows) in enumerate(steps):
        groups: dict[Place, list[Row]] = {}
        for row in rows:
            if row.times and direction in (None, row.direction):
                groups.setdefault((row.direction, _name_layer(row)), []).append(row)
        for place, group in groups.items():
            table.setdefault(place, [math.nan] * len(steps))[column] = read(group)
    return table


def _name_layer(row: Row) -> str:
    turns = row.turn if isinstance(row.turn, tuple) else () if row.turn is None else (row.turn,)
    return (row.path or row.primitive or "(no module)") + "".join(f"[{turn}]" for turn in turns)


def _pool_underflow(rows: list[Row], format: str) -> float:
    count = sum(row.count for row in rows)
    return sum(row.formats[format].underflow * row.count for row in rows) / max(1, count)


def _find_exponent(rows: list[Row]) -> float:
    """The logarithm of the largest amax; nan where all numbers are zero."""
    amax = max(row.amax for row in rows)
    return math.log2(amax) if amax > 0 else math.nan


def _find_peak(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=-math.inf)


def _split(table: Table) -> dict[str, dict[str, list[float]]]:
    """By direction, what belongs to each name."""
    parts = {wanted: {n: values for (found, n), values in table.items() if found == wanted} for wanted in DIRECTIONS}
    return {direction: part for direction, part in parts.items() if part}
