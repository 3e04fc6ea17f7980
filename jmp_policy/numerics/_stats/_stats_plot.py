"""What statistics are drawn from: histograms of exponents, and the ranges of formats below them."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...report import ExponentChart, FormatRange, Histogram, list_styles
from ._counting import FIRST_EXPONENT
from ._layout import DIRECTIONS, check_direction
from ._row import Row
from ._stats_report import format_share, shorten_format
from ._what_if import FloatFormat, parse_format

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_exponents(rows: Sequence[Row], formats: Iterable[str], direction: str | None = None) -> "Figure":
    """Draws a histogram of the rows of each pass, or of one pass, above the ranges of formats.

    Raises:
      ValueError: a format or direction is unknown, or there are no histograms.
      ImportError: matplotlib is not installed.
    """
    check_direction(direction)
    ranges = list_ranges(formats)
    measured = [row for row in rows if row.times and direction in (None, row.direction)]
    if any(row.histogram is None for row in measured):
        raise ValueError(
            "There are no histograms to draw: these Stats were collected without. Collect with them: "
            "numerics.collect(fun, histogram=True)."
        )
    groups = {name: [row for row in measured if row.direction == name] for name in DIRECTIONS}
    histograms = [_make_histogram(name, group, ranges) for name, group in groups.items() if group]
    return ExponentChart(FIRST_EXPONENT - 1, histograms, list(ranges.values())).draw()


def list_ranges(formats: Iterable[str]) -> dict[str, FormatRange]:
    """The ranges of formats by name; numbers in blocks have none, since their scale moves it.

    Raises:
      ValueError: a format is unknown.
    """
    parsed = [parse_format(name) for name in formats]
    floats = {of_format.name: of_format for of_format in parsed if isinstance(of_format, FloatFormat)}
    styles = list_styles(floats)
    return {
        name: FormatRange(
            shorten_format(name),
            styles[name],
            of_format.min_exponent - of_format.mantissa_bits,
            of_format.min_exponent,
            math.log2(of_format.max),
        )
        for name, of_format in floats.items()
    }


def _make_histogram(direction: str, rows: Sequence[Row], ranges: Iterable[str]) -> Histogram:
    count = max(1, sum(row.count for row in rows))
    total = np.sum([row.histogram for row in rows if row.histogram is not None], axis=0)
    losses = {}
    for name in ranges:
        if all(name in row.formats for row in rows):
            zero, overflow = (
                sum(getattr(row.formats[name], key) * row.count for row in rows) / count
                for key in ("underflow", "overflow")
            )
            losses[shorten_format(name)] = _describe_losses(zero, overflow)
    return Histogram(_describe_rows(direction, rows, count), (total / count).tolist(), losses)


def _describe_losses(zero: float, overflow: float) -> str:
    parts = {"become zero": format_share(zero), "overflow": format_share(overflow)}
    return ", ".join(f"{share} {what}" for what, share in parts.items() if share)


def _describe_rows(direction: str, rows: Sequence[Row], count: int) -> str:
    """The title of a histogram: which rows, and what is in none of its bins."""
    paths = {row.path for row in rows}
    which = f"{rows[0].path or rows[0].primitive}, {direction}" if len(paths) == 1 else f"{direction}, {len(rows)} rows"
    parts = {
        "zeros": sum(row.zeros * row.count for row in rows) / count,
        "nan or infinite": sum(row.nans + row.infs for row in rows) / count,
    }
    outside = [f"{format_share(share)} {what}" for what, share in parts.items() if share]
    return "; ".join([which, *outside])
