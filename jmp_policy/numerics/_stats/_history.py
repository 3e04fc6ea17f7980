"""Statistics of many steps on the host: a log, and its plot of layers over steps."""

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from ..._base import did_you_mean, quote
from ...report import KEPT, OTHER_STYLES, FormatRange, HeatMap, HeatPanel, make_figure, make_note
from ._counting import HISTOGRAM_BINS
from ._measure import Meter
from ._record import Record
from ._row import DIRECTIONS, Layout, Row, Site, check_direction
from ._stats import Stats
from ._stats_report import list_ranges
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


_FLOAT64 = np.dtype(np.float64)


def merge_rows(steps: Sequence[Sequence[Row]]) -> Stats:
    """Puts the rows of steps back into arrays, one step above the other.

    Counts come back exactly, and sums up to the rounding of float64. A row that a step lacks was not measured on it.
    Formats and histograms are those that all rows have.
    """
    keyed = [dict(_tell_apart(rows)) for rows in steps]
    keys = list(dict.fromkeys(key for rows in keyed for key in rows))
    every = [row for rows in steps for row in rows]
    formats = tuple(name for name in (every[0].formats if every else ()) if all(name in row.formats for row in every))
    meter = Meter(formats, all(row.histogram is not None for row in every), _FLOAT64)
    shape = len(steps), len(keys)
    counts = np.zeros((*shape, 2, meter.columns), np.uint32)
    extremes = np.broadcast_to([0.0, math.inf], (*shape, 2)).copy()
    exponents = np.full(shape, -1074, np.int32)  # below all of float64
    sums = np.zeros((*shape, 1 + 2 * len(formats), 2))
    for i, rows in enumerate(keyed):
        for j, key in enumerate(keys):
            if (row := rows.get(key)) is not None:
                words = np.array(_list_counts(row, meter), np.uint64)
                counts[i, j] = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
                extremes[i, j] = row.amax, math.inf if row.min_nonzero is None else row.min_nonzero
                exponents[i, j] = math.frexp(row.amax)[1]
                sums[i, j, :, 0] = _list_sums(row, formats)
    return Stats(Record(counts, extremes, exponents, sums), Layout([site for site, _ in keys], meter))  # pyright: ignore[reportArgumentType]


def _tell_apart(rows: Iterable[Row]) -> Iterable[tuple[tuple[Site, int], Row]]:
    """The rows by their site, and by how many have had the same one before."""
    seen: dict[Site, int] = {}
    for row in rows:
        site = Site(
            row.path, row.primitive, row.source, row.function, row.direction, row.turn, row.dtype,
            math.prod(row.shape), row.shape,
        )  # fmt: skip
        yield (site, seen.setdefault(site, 0)), row
        seen[site] += 1


def _list_counts(row: Row, meter: Meter) -> list[int]:
    shares = [row.formats[name] for name in meter.formats]
    parts = [part for share in shares for part in (share.underflow, share.subnormal, share.overflow)]
    bins = [] if not meter.histogram or row.histogram is None else row.histogram.tolist()
    assert len(bins) in (0, HISTOGRAM_BINS)
    lost = [round(part * row.count) for part in parts]
    return [row.times, round(row.zeros * row.count), row.nans, row.infs, *lost, *bins]


def _list_sums(row: Row, formats: Iterable[str]) -> list[float]:
    """The sum of squares and those of squared errors, in units of the square of the largest binade."""
    unit = math.frexp(row.amax)[1]
    square = math.ldexp(row.rms, -unit) ** 2 * (row.count - row.nans - row.infs)
    errors = [error for name in formats for error in (row.formats[name].error, row.formats[name].scaled_error)]
    return [square, *(error**2 * square for error in errors)]


class StatsHistory:
    """The rows of `Stats` by step.

    >>> import jmp_policy as jmp
    >>> line = '{"step": 100, "rows": []}'
    >>> history = jmp.numerics.StatsHistory.from_json_lines([line])
    >>> history, history.steps, history[100]
    (<StatsHistory: step 100>, (100,), ())
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Row, ...]] = {}

    def append(self, step: SupportsIndex, stats: Stats) -> None:
        """Adds the statistics of a step, which are copied to the host.

        A step on which nothing was measured, as between two that `every=N` observes, adds nothing. A step that is
        there already is replaced, as where a run goes on from a checkpoint.

        Raises:
          TypeError: the step is not an integer, or what belongs to it is not a `Stats`.
        """
        if not isinstance(stats, Stats):
            raise TypeError(f"A history is of Stats, not of a {type(stats).__name__}: history.append(step, stats).")
        number, rows = _read_step(step), stats.rows()
        if any(row.times for row in rows):
            self._rows[number] = rows

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps, in order."""
        return tuple(sorted(self._rows))

    def __getitem__(self, step: int) -> tuple[Row, ...]:
        """The rows of a step.

        Raises:
          KeyError: nothing was measured on it.
        """
        if step in self._rows:
            return self._rows[step]
        nearest = min(self._rows, key=lambda other: abs(other - step), default=None)
        hint = "No step was." if nearest is None else f"The nearest one that was is {nearest}."
        raise KeyError(f"Nothing was measured on step {step!r}. {hint}")

    def __iter__(self) -> Iterator[tuple[int, tuple[Row, ...]]]:
        """The steps and their rows, in order."""
        return ((step, self._rows[step]) for step in self.steps)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        steps = self.steps
        what = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else "no steps"
        return f"<StatsHistory: {f'step {steps[0]}' if len(steps) == 1 else what}>"

    def to_json_lines(self) -> str:
        """Each step as a line of strict JSON, `{"step": 100, "rows": [...]}`, with rows as in `Stats.to_dict`.

        While training runs, a log may add lines one by one: `json.dumps({"step": step} | stats.to_dict())`.
        """
        lines = ({"step": step, "rows": [row.to_dict() for row in rows]} for step, rows in self)
        return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)

    @classmethod
    def from_json_lines(cls, lines: Iterable[str]) -> "StatsHistory":
        """Reads what `to_json_lines` wrote.

        Args:
          lines: an open file, or `text.splitlines()`. Empty lines are left out; of two lines of one step the later one
            counts.

        Raises:
          ValueError: a line holds no statistics of a step.
        """
        history = cls()
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    plain = json.loads(line)
                    history._rows[_read_step(plain["step"])] = tuple(map(Row.from_dict, plain["rows"]))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"Line {number} holds no statistics of a step: {quote(line.strip())}. A line is, for example, "
                        '{"step": 100, "rows": [...]}, with rows as in stats.to_dict().'
                    ) from error
        return history

    def merge(self) -> Stats:
        """All steps together, as `Stats`: to be printed, drawn or looked into.

        A row that some steps lack, as after a change of the program, is of the others.
        """
        return merge_rows([rows for _, rows in self])

    def plot_underflow(self, format: str = "float16", *, direction: str | None = None) -> "Figure":
        """Draws which layers lose numbers to zero in a format, over the steps: a heat map.

        A row of the map is a path and turn in one pass, with all operations there. Rows that lose nothing are counted,
        and of more than 150 others those that lose most are drawn.

        Args:
          format: one of those that were measured.
          direction: the pass to draw, `"backward"` for gradients; `None` for each.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: the format was not measured, or the direction is unknown.
          ImportError: matplotlib is not installed.
        """
        return plot_underflow(list(self), format, direction)

    def plot_amax(self, formats: Sequence[str] | None = None, *, direction: str | None = None) -> "Figure":
        """Draws the largest magnitudes over the steps, and the largest numbers of formats as lines.

        Each path and turn of a pass is a curve. Those that come highest have colors and names. A format whose largest
        number is far above all curves has no line.

        Args:
          formats: whose largest numbers to draw; `None` for those that were measured. Blocks have none of their own.
          direction: the pass to draw; `None` for each.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: a format or direction is unknown.
          ImportError: matplotlib is not installed.
        """
        return plot_amax(list(self), formats, direction)


def _read_step(step: SupportsIndex) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        raise TypeError(f"A step is an integer, got {quote(step)}: history.append(100, stats).") from error
