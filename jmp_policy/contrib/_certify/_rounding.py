"""Bounds of a rounded result, from bounds of the exact one."""

import math
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from ..._base import is_floating_dtype
from ..._jaxpr import Fact, having
from ...policy import find_format
from ._intervals import INF, Interval, bound_dtype, count_terms

_ULPS = {
    **dict.fromkeys(having(Fact.EXACT, Fact.MOVES, Fact.KEEPS, Fact.CHOOSES, Fact.CONTRACTS, Fact.SUMS), 0.5),
    **dict.fromkeys(("add", "add_any", "sub", "mul", "sqrt", "square", "convert_element_type"), 0.5),
    "div": 2.5,  # on GPUs, `div.full.f32` is within 2 units
    **dict.fromkeys(("exp2", "erfc", "sinh", "cosh", "pow"), 128.0),
}  # fmt: skip
"""Largest error in units in the last place. It is 8 for other functions, which is more than XLA's on any platform."""

_LIMITS = {
    "exp": (0.0, INF), "exp2": (0.0, INF), "logistic": (0.0, 1.0), "tanh": (-1.0, 1.0), "erf": (-1.0, 1.0),
    "erfc": (0.0, 2.0), "rsqrt": (0.0, INF), "cosh": (1.0, INF), "expm1": (-1.0, INF), "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0), "pow": (0.0, INF),
}  # fmt: skip
"""Bounds that a rounded result keeps."""


def round_interval(eqn: JaxprEqn, dtype: Any, exact: Interval, largest: float) -> tuple[Interval, bool]:
    """Bounds the rounded result of an equation, and tells whether it may overflow.

    A compiler may leave out a rounding, so the bounds contain the exact value too. `largest`: a sum of positive terms
    is at least its largest term.
    """
    name = eqn.primitive.name
    if not is_floating_dtype(dtype):
        return _round_integers(np.dtype(dtype), exact), False
    eps = find_format(dtype).eps
    ulps = 2.0 + abs(eqn.params["y"]) if name == "integer_pow" else _ULPS.get(name, 8.0)
    relative, absolute = (ulps - 0.5) * eps, 0.0
    if (terms := count_terms(eqn)) > 1:
        growth = terms * eps / 2  # in any order and for any number of terms: Rump, BIT 2012
        growth = math.expm1(min(growth, 100.0)) if name in ("reduce_prod", "cumprod") else growth
        relative += growth if exact.low >= 0 else 0.0
        absolute = 0.0 if exact.low >= 0 else growth * max(map(abs, exact[:2]))
    low, overflows_down = _round_bound(dtype, exact.low, -1, relative, absolute)
    high, overflows_up = _round_bound(dtype, exact.high, 1, relative, absolute)
    peak = -INF if exact.peak == -INF else _round_bound(dtype, exact.peak, -1, relative, absolute)[0]
    least, most = _LIMITS.get(name, (-INF, INF))
    low = max(low, least, max(0.0, largest) if terms > 1 and exact.low >= 0 else -INF)
    if name == "logistic" and low < 2 / find_format(dtype).max:
        low = 0.0  # 1 / (1 + exp(-x)), if the exponential overflows
    return Interval(low, min(high, most), peak), overflows_down or overflows_up


def _round_bound(dtype: Any, bound: float, side: int, relative: float, absolute: float) -> tuple[float, bool]:
    """Rounds a lower (`side` is -1) or upper bound outwards, and tells whether it overflows."""
    limit = find_format(dtype).max
    if math.isinf(bound):
        overflows = bound == side * INF
        return (side * limit if overflows else bound), overflows
    outward = bound + side * (relative * abs(bound) + absolute)
    near = _round_to_dtype(outward, dtype)
    if near != outward:  # not a number of the dtype; then float64 may have rounded it inwards
        outward = math.nextafter(outward, side * INF)
        near = _round_to_dtype(outward, dtype)
    if not math.isfinite(near):
        return math.copysign(limit, bound), True
    outward = (min if side < 0 else max)(outward, near)
    # Functions may compute with smaller numbers than their result.
    is_flushed = side * outward < 0 and abs(outward) < find_tiny(dtype) * (4 if relative > 0 else 1)
    return 0.0 if is_flushed else outward, False


def _round_to_dtype(value: float, dtype: Any) -> float:
    with np.errstate(all="ignore"):
        return float(np.asarray(value).astype(dtype))


def _round_integers(dtype: np.dtype, exact: Interval) -> Interval:
    """Returns bounds that are integers, or all values of the dtype if some do not fit."""
    whole = bound_dtype(dtype)
    fits = whole.low <= exact.low and exact.high <= whole.high
    return Interval(float(np.floor(exact.low)), float(np.ceil(exact.high)), exact.peak) if fits else whole


def find_eps(dtype: Any, low: float) -> float:
    """Returns the relative error of a rounded value that is at least `low`; 0 for integers."""
    if not is_floating_dtype(dtype):
        return 0.0
    # Subnormal numbers of float16 have few bits.
    return 0.4 if dtype == np.float16 and low < 6.2e-5 else 16 * find_format(dtype).eps


def find_tiny(dtype: Any) -> float:
    """Returns the smallest positive number of a dtype that is not flushed to zero; 0 for integers."""
    if not is_floating_dtype(dtype):
        return 0.0
    known = find_format(dtype)
    # Processors may flush subnormal results in float32 and bfloat16. They compute float16 in float32, or keep them.
    return math.ldexp(1.0, known.least_exponent if dtype == np.float16 else known.min_exponent)


def next_above(dtype: Any, bound: float) -> float:
    """Returns a bound for the numbers of a dtype above `bound`."""
    if not is_floating_dtype(dtype):
        return bound + 1
    return find_tiny(dtype) if bound == 0 else bound + abs(bound) * find_format(dtype).eps / 2


def round_inside(bound: float, dtype: Any, side: int) -> float:
    """Returns the first number of a dtype at or above a bound, or below it if `side` is -1."""
    if not is_floating_dtype(dtype):
        return float(math.ceil(bound) if side > 0 else math.floor(bound))
    near = np.asarray(bound).astype(dtype)
    if side * (float(near) - bound) < 0:
        near = np.nextafter(near, np.asarray(side * INF).astype(dtype))
    return float(near)
