"""Records of tensors, written down with NumPy from what a record is, and layouts for them."""

import math

import ml_dtypes
import numpy as np

# Rows of given numbers without a program that measures them, which would take a second for each test to compile.
from jmp_policy.numerics._stats_counting import FIRST_EXPONENT, HISTOGRAM_BINS
from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.numerics._stats_record import Record
from jmp_policy.numerics._stats_row import StatsLayout, TensorInfo

FORMATS = ("float16", "bfloat16", "float8_e4m3fn")
SHAPE = (4, 8)


def make_site(path="head", primitive="dot_general", direction="forward", turn=None, shape=SHAPE, line=12):
    size = math.prod(shape)
    return TensorInfo(path, primitive, f"/home/me/train.py:{line}", "loss", direction, turn, "float32", size, shape)


def make_layout(*sites, formats=FORMATS, histogram=True):
    return StatsLayout(sites or [make_site()], StatsSpec(formats, histogram))


def make_record(tensors, formats=FORMATS, histogram=True):
    """The record of one tensor a row."""
    parts = [_measure(np.asarray(tensor, np.float64), formats, histogram) for tensor in tensors]
    return Record(*(np.stack(leaves) for leaves in zip(*parts, strict=True)))


def split_words(counts):
    return np.stack([np.array([count & 0xFFFFFFFF for count in counts]), np.array([count >> 32 for count in counts])])


def _measure(x, formats, histogram):
    magnitude = np.abs(x[np.isfinite(x)])
    nonzero = magnitude[magnitude > 0]
    counts = [1, int((x == 0).sum()), int(np.isnan(x).sum()), int(np.isinf(x).sum())]
    amax = magnitude.max(initial=0.0)
    exponent = math.frexp(amax)[1] - 1
    sums = [np.sum(np.ldexp(magnitude, -exponent) ** 2)]
    for name in formats:
        info = ml_dtypes.finfo(name)
        with np.errstate(over="ignore"):
            cast = magnitude.astype(info.dtype).astype(np.float64)
        counts += [
            int(((cast == 0) & (magnitude > 0)).sum()),
            int(((cast > 0) & (cast < float(info.smallest_normal))).sum()),
            int((~np.isfinite(cast)).sum()),
        ]
        error = np.where(np.isfinite(cast), cast, float(info.max)) - magnitude
        sums += [np.sum(np.ldexp(error, -exponent) ** 2), 0.0]
    if histogram:
        bins = np.clip(np.frexp(nonzero)[1] - FIRST_EXPONENT, 0, HISTOGRAM_BINS - 1)
        counts += np.bincount(bins, minlength=HISTOGRAM_BINS).tolist()
    high = np.float32(sums)
    return (
        split_words(counts).astype(np.uint32),
        np.float32([amax, nonzero.min(initial=np.inf)]),
        np.int32(exponent),
        np.stack([high, np.float32(sums - high.astype(np.float64))], -1),
    )
