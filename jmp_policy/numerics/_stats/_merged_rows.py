"""Rows of many steps, added up on the host: one `Stats` of them all."""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ._counting import HISTOGRAM_BINS
from ._layout import Layout, Site
from ._measure import Meter
from ._record import Record
from ._row import Row
from ._stats import Stats

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
