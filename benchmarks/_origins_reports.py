"""Judges the report of a fault by one rule: no library is judged by eye. It imports neither JAX nor PyTorch.

A fault is a function, and comments of its source say where it is:

    y = jnp.exp(x)  # fault
    z = y - y  # fault
    z = jnp.where(mask, x, -jnp.inf)  # harmless

`# fault` is the line of the operation that made the number that is not finite out of finite ones. Where an operation
made a nan of infinities, its line has the mark, and the line of the infinities has `# cause`. `# harmless` is a line
whose infinities and nans reach no result.

A report is all that the user sees: output, warnings, and the traceback of an error. It names a line by `file:line`,
or by a traceback whose innermost frame in the function is that line.
"""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

SILENT = "silent"
FALSE_ALARM = "**false alarm**"
LINE_AND_CAUSE = "line and cause"
LINE = "line"
CAUSE = "cause"
ARGUMENT = "argument"
OTHER_LINE = "other line"
NO_LINE = "no line"
NAMES_IT = (LINE_AND_CAUSE, LINE, CAUSE, ARGUMENT)
"""The verdicts that count as named."""

ARGUMENTS: dict[str, tuple[list[Any], ...]] = {
    "exp that overflows": ([0.5, 60.0, 100.0],),
    "infinity minus infinity": ([0.5, 1.0, 2.0],),
    "entropy of a zero": ([0.5, 0.0, 0.5],),
    "norm of zeros": ([0.0, 0.0, 0.0],),
    "trap of where": ([0.5, 0.0, -1.0],),
    "harmless ones before it": ([0.5, 1.0, 2.0], [1.0, 0.0, 1.0]),
    "turn of a loop": ([0.5, 1.0, 2.0], [1.0, 1.0, 1.0, -1.0, 1.0, 1.0]),
    "under a remat": ([0.5, 1.0, 2.0],),
    "backward in float16": ([1e-6, 2e-6, 3e-6], [300.0, 300.0, 300.0]),
    "argument that is nan": ([0.5, 1.0, 2.0], [1.0, float("nan"), 2.0]),
}
"""What each fault is called on, in JAX and in PyTorch; its gradient is with respect to the first."""

TORCH_CONTESTANTS = ("PyTorch `detect_anomaly`", "Hugging Face `DebugUnderflowOverflow`")
"""Who looks for faults in PyTorch, if it is installed."""


class Fault(NamedTuple):
    """A function of some arrays that returns a scalar, and marked lines of its source.

    Attributes:
      fun: the function.
      file: where its source is.
      lines: the numbers of its lines.
      marks: the mark of a number of a line: "fault", "cause" or "harmless".
    """

    fun: Callable[..., Any]
    file: str
    lines: range
    marks: dict[int, str]

    @classmethod
    def read(cls, fun: Callable[..., Any]) -> "Fault":
        """The fault of a function, with what its comments say."""
        lines, first = inspect.getsourcelines(fun)
        found = {number: _MARK.search(line) for number, line in enumerate(lines, first)}
        marks = {number: match[1] for number, match in found.items() if match}
        return cls(fun, inspect.getfile(fun), range(first, first + len(lines)), marks)


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a fault, a key of `ARGUMENTS`."""
    return fun.__name__.replace("_", " ")


def judge(report: str, fault: Fault, argument: str) -> str:
    """The judgment of a report of a fault.

    Args:
      report: the text that the user saw; empty if there was nothing.
      fault: the fault.
      argument: how the library calls the second argument, in which the fault is where no line is marked.
    """
    if not report:
        return SILENT
    named = {fault.marks.get(line, "other") for line in find_lines(report, fault)}
    if "harmless" in named:
        return FALSE_ALARM
    if "fault" not in fault.marks.values() and argument in report:
        return ARGUMENT
    if "fault" in named:
        return LINE_AND_CAUSE if "cause" in named else LINE
    if "cause" in named:
        return CAUSE
    return OTHER_LINE if named else NO_LINE


def find_lines(report: str, fault: Fault) -> set[int]:
    """The lines of a fault's function that a report names."""
    file = re.escape(fault.file)
    tracebacks = [re.findall(rf'File "{file}", line (\d+)', part) for part in report.split("Traceback")]
    innermost = [_last_inside(map(int, numbers), fault.lines) for numbers in tracebacks]
    written = [int(number) for number in re.findall(rf"{file}:(\d+)", report)]
    return {number for number in (*innermost, *written) if number in fault.lines}


def _last_inside(numbers: Iterable[int], lines: range) -> int | None:
    inside = [number for number in numbers if number in lines]
    return inside[-1] if inside else None


_MARK = re.compile(r"# (fault|cause|harmless)\b")
