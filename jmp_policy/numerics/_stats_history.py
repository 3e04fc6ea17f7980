"""Statistics of many steps on the host: a log, and plots of layers over steps."""

import json
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

from .._base import did_you_mean, quote
from ..policy import parse_format
from ..report import KEPT, OTHER_STYLES, make_figure, make_note, plot_heat_map
from ._stats import Stats
from ._stats_counting import HISTOGRAM_BINS
from ._stats_measure import StatsSpec
from ._stats_record import Record
from ._stats_report import list_ranges
from ._stats_row import DIRECTIONS, Row, StatsLayout, TensorInfo, check_direction, list_turns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_ROWS = 150
"""Maximum number of rows in a heat map."""

# A format's largest number has a line if it is at most this many binades above the highest curve, or below 2**20.
_FAR = 4

# In inches.
_WIDTH, _HEIGHT, _CHARACTER_WIDTH = 6.2, 3.2, 0.075
_LEGEND_CHARACTERS = 22

Steps = Sequence[tuple[int, Sequence[Row]]]
Panels = dict[str, dict[str, list[float]]]
"""By direction and layer, a number for each step; nan where nothing was measured."""


class StatsHistory:
    """Rows of `Stats` by step.

    >>> import jmp_policy as jmp
    >>> line = '{"step": 100, "rows": []}'
    >>> history = jmp.numerics.StatsHistory.from_json_lines([line])
    >>> history, history.steps, history[100]
    (<StatsHistory: step 100>, (100,), ())
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Row, ...]] = {}

    def append(self, step: SupportsIndex, stats: Stats) -> None:
        """Adds the statistics of a step and copies them to the host.

        A step on which nothing was measured, such as those that `every=N` skips, adds nothing. A step that the history
        has already is replaced, as after a restart from a checkpoint.

        Raises:
          TypeError: the step is not an integer, or `stats` is not a `Stats`.
        """
        if not isinstance(stats, Stats):
            raise TypeError(f"A history is of Stats, not of a {type(stats).__name__}: history.append(step, stats).")
        number, rows = _read_step(step), stats.rows()
        if any(row.times for row in rows):
            self._rows[number] = rows

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps in ascending order."""
        return tuple(sorted(self._rows))

    def __getitem__(self, step: int) -> tuple[Row, ...]:
        """Returns the rows of a step."""
        if step in self._rows:
            return self._rows[step]
        nearest = min(self._rows, key=lambda other: abs(other - step), default=None)
        hint = "No step was." if nearest is None else f"The nearest one that was is {nearest}."
        raise KeyError(f"Nothing was measured on step {step!r}. {hint}")

    def __iter__(self) -> Iterator[tuple[int, tuple[Row, ...]]]:
        """Iterates over the steps and their rows, in order."""
        return ((step, self._rows[step]) for step in self.steps)

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        steps = self.steps
        what = f"{len(steps)} steps from {steps[0]} to {steps[-1]}" if len(steps) > 1 else "no steps"
        return f"<StatsHistory: {f'step {steps[0]}' if len(steps) == 1 else what}>"

    def to_json_lines(self) -> str:
        """Returns each step as a line of strict JSON, `{"step": 100, "rows": [...]}`, with rows as in `Stats.to_dict`.

        A log may also append lines during training: `json.dumps({"step": step} | stats.to_dict())`.
        """
        lines = ({"step": step, "rows": [row.to_dict() for row in rows]} for step, rows in self)
        return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in lines)

    @classmethod
    def from_json_lines(cls, lines: Iterable[str]) -> "StatsHistory":
        """Reads the lines that `to_json_lines` wrote.

        Args:
          lines: an open file, or `text.splitlines()`. Empty lines are ignored; the later of two lines of one step wins.

        Raises:
          ValueError: a line holds no statistics of a step.
        """
        history = cls()
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    plain = json.loads(line)
                    history._rows[_read_step(plain["step"])] = tuple(map(Row.from_dict, plain["rows"]))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    reason = f" {error}" if isinstance(error, ValueError) else ""
                    raise ValueError(
                        f"Line {number} holds no statistics of a step: {quote(line.strip())}.{reason} A line is, for "
                        'example, {"step": 100, "rows": [...]}, with rows as in stats.to_dict().'
                    ) from error
        return history

    def merge(self) -> Stats:
        """Merges all steps into one `Stats`.

        A row that some steps lack, as after a change of the program, is merged over the other steps. Formats and
        histograms that some row lacks are left out.
        """
        # Arrays with a leading axis of steps. Counts come back exactly, and sums up to the rounding of float64.
        steps = [rows for _, rows in self]
        keyed = [dict(_tell_apart(rows)) for rows in steps]
        keys = list(dict.fromkeys(key for rows in keyed for key in rows))
        every = [row for rows in steps for row in rows]
        first = every[0].formats if every else ()
        formats = tuple(name for name in first if all(name in row.formats for row in every))
        sample = max((row.sampled // row.times for row in every if row.sampled < row.count), default=None)
        spec = StatsSpec(formats, all(row.histogram is not None for row in every), np.dtype(np.float64), sample)
        shape = len(steps), len(keys)
        counts = np.zeros((*shape, 2, spec.columns), np.uint32)
        extremes = np.broadcast_to([0.0, math.inf], (*shape, 2)).copy()
        exponents = np.full(shape, -1074, np.int32)  # below all of float64
        sums = np.zeros((*shape, 1 + 2 * len(formats), 2))
        for i, rows in enumerate(keyed):
            for j, key in enumerate(keys):
                if (row := rows.get(key)) is not None:
                    words = np.array(_restore_counts(row, spec), np.uint64)
                    counts[i, j] = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
                    extremes[i, j] = row.amax, math.inf if row.min_nonzero is None else row.min_nonzero
                    exponents[i, j] = math.frexp(row.amax)[1]
                    sums[i, j, :, 0] = _restore_sums(row, spec)
        return Stats(Record(counts, extremes, exponents, sums), StatsLayout([info for info, _ in keys], spec))  # pyright: ignore[reportArgumentType]

    def plot_underflow(self, format: str = "float16", *, direction: str | None = None) -> "Figure":
        """Draws the share of elements that a format rounds to zero as a heat map of layers over steps.

        A row of the map is a path and iteration in one pass, with all operations there. Rows without loss are counted
        in the title. At most 150 rows are drawn, those with the largest loss.

        Args:
          format: one of the formats that were measured.
          direction: the pass to draw, `"backward"` for gradients; `None` for each.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: the format was not measured, or the direction is unknown.
          ImportError: matplotlib is not installed.
        """
        check_direction(direction)
        steps = list(self)
        name = parse_format(format).name
        measured = dict.fromkeys(name for _, rows in steps for row in rows for name in row.formats)
        if measured and name not in measured:
            raise ValueError(f"The format {name!r} was not measured. {did_you_mean(name, measured)}")
        lost = lambda rows: sum(row.formats[name].underflow * row.count for row in rows)
        found = _tabulate(steps, direction, lambda rows: lost(rows) / max(1, sum(row.count for row in rows)))
        peaks = {(way, row): _find_peak(shares) for way, part in found.items() for row, shares in part.items()}
        chosen = sorted((place for place in peaks if peaks[place] > 0), key=lambda place: -peaks[place])[:MOST_ROWS]
        if peaks and not chosen:
            return make_note(f"{name} makes none of the {len(peaks)} rows lose a number to zero.")
        panels, idle = {}, []
        for title, part in found.items():
            shown = {row: shares for row, shares in part.items() if (title, row) in chosen}
            if shown:
                panels[_count_left_out(title, part, len(shown))] = shown
            else:
                idle.append(title)
        title = f"{name}: what becomes zero" + (f" (nothing in: {', '.join(idle)})" if idle else "")
        return plot_heat_map(title, "share of all numbers", "step", [str(step) for step, _ in steps], panels)

    def plot_amax(self, formats: Sequence[str] | None = None, *, direction: str | None = None) -> "Figure":
        """Draws the largest magnitudes over the steps, and the largest numbers of formats as lines.

        Each path and iteration of a pass is a curve. The highest curves have colors and names. A format whose largest
        number is far above all curves has no line.

        Args:
          formats: formats whose largest number to draw; `None` for those that were measured. Block-scaled formats have
            no line.
          direction: the pass to draw; `None` for each.

        Returns:
          A `matplotlib.figure.Figure`.

        Raises:
          ValueError: a format or direction is unknown.
          ImportError: matplotlib is not installed.
        """
        check_direction(direction)
        steps = list(self)
        measured = dict.fromkeys(name for _, rows in steps for row in rows for name in row.formats)
        ranges = list(list_ranges(measured if formats is None else formats).values())
        panels = _tabulate(steps, direction, _find_exponent)
        if not panels:
            return make_note("Nothing was measured.")
        longest = max(len(name) for curves in panels.values() for name in curves)
        figure = make_figure(_WIDTH + _CHARACTER_WIDTH * max(longest, _LEGEND_CHARACTERS), _HEIGHT * len(panels))
        all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (name, curves) in zip(all_axes, panels.items(), strict=True):
            axes.set_title(f"{name}: largest magnitude", loc="left", fontsize=10)
            _draw_curves(axes, [step for step, _ in steps], curves)
            peak = max(map(_find_peak, curves.values()))
            for limit in (each for each in ranges if each.most <= max(20, peak + _FAR)):
                axes.axhline(limit.most, **limit.style.line | {"linewidth": 1.3}, label=f"largest {limit.name}")
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
        all_axes[-1].set_xlabel("step")
        return figure


def _count_left_out(title: str, rows: dict[str, list[float]], shown: int) -> str:
    """Returns the title of a panel, with the number of rows that lose nothing, or less than those drawn."""
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


def _tabulate(steps: Steps, direction: str | None, read: Callable[[list[Row]], float]) -> Panels:
    """Applies `read` to the rows of each layer at each step, in the order of the program."""
    panels: Panels = {name: {} for name in DIRECTIONS}
    for column, (_, rows) in enumerate(steps):
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in rows:
            if row.times and direction in (None, row.direction):
                name = row.path or row.primitive or "(no module)"
                name += "".join(f"[{turn}]" for turn in list_turns(row.turn))
                groups.setdefault((row.direction, name), []).append(row)
        for (way, name), group in groups.items():
            panels[way].setdefault(name, [math.nan] * len(steps))[column] = read(group)
    return {way: part for way, part in panels.items() if part}


def _find_exponent(rows: list[Row]) -> float:
    """Returns the logarithm of the largest amax; nan if all elements are zero."""
    amax = max(row.amax for row in rows)
    return math.log2(amax) if amax > 0 else math.nan


def _find_peak(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=-math.inf)


def _tell_apart(rows: Iterable[Row]) -> Iterable[tuple[tuple[TensorInfo, int], Row]]:
    """Yields the rows with their tensors, numbered where several rows are of one."""
    seen: dict[TensorInfo, int] = {}
    for row in rows:
        where = row.path, row.primitive, row.source, row.function, row.direction, row.turn
        info = TensorInfo(*where, row.dtype, math.prod(row.shape), row.shape)
        yield (info, seen.setdefault(info, 0)), row
        seen[info] += 1


def _restore_counts(row: Row, spec: StatsSpec) -> list[int]:
    shares = [row.formats[name] for name in spec.formats]
    parts = [part for share in shares for part in (share.underflow, share.subnormal, share.overflow)]
    bins = [] if not spec.histogram or row.histogram is None else row.histogram.tolist()
    assert len(bins) in (0, HISTOGRAM_BINS)
    sampled = row.times * spec.count_sampled(row.shape)
    lost = [round(part * sampled) for part in parts]
    bins = [round(count * sampled / max(1, row.count)) for count in bins]
    return [row.times, round(row.zeros * row.count), row.nans, row.infs, *lost, *bins]


def _restore_sums(row: Row, spec: StatsSpec) -> list[float]:
    """Returns the sum of squares and the sums of squared errors, in units of the square of the largest binade."""
    unit = math.frexp(row.amax)[1]
    finite = (row.count - row.nans - row.infs) * spec.count_sampled(row.shape) * row.times / max(1, row.count)
    square = math.ldexp(row.rms, -unit) ** 2 * finite
    errors = [error for name in spec.formats for error in (row.formats[name].error, row.formats[name].scaled_error)]
    return [square, *(error**2 * square for error in errors)]


def _read_step(step: SupportsIndex) -> int:
    try:
        return operator.index(step)
    except TypeError as error:
        raise TypeError(f"A step is an integer, got {quote(step)}: history.append(100, stats).") from error
