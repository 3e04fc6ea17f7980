"""Statistics of many steps, on the host: to be drawn, and written beside a log."""

import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, SupportsIndex

from ..._base import quote
from ._history_plot import plot_amax, plot_underflow
from ._merged_rows import merge_rows
from ._row import Row
from ._stats import Stats

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
