"""Interval arithmetic: bounds of a result from bounds of its operands, in real numbers and rounded."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..._base import is_floating_dtype
from ..._jaxpr import Fact, having
from ...policy import find_format

INF = math.inf


class Interval(NamedTuple):
    """Bounds of the elements of an array. Those of a constant with a nan are nan."""

    low: float
    high: float
    peak: float = -INF  # in each slice along some axes, the largest element is at least this


Rule = Callable[..., Interval]
"""`(eqn, *operands) -> Interval` of each result."""


def hull(*intervals: Interval) -> Interval:
    """Returns the smallest interval that contains all of these."""
    return Interval(min(x.low for x in intervals), max(x.high for x in intervals), min(x.peak for x in intervals))


def is_real(dtype: Any) -> bool:
    """True for the dtypes of real numbers and booleans, False for complex numbers and random keys."""
    return dtype == np.bool_ or is_floating_dtype(dtype) or jnp.issubdtype(dtype, jnp.integer)


def bound_dtype(dtype: Any) -> Interval:
    """Returns the interval of all finite values of a dtype."""
    if dtype == np.bool_ or not is_real(dtype):
        return Interval(0.0, 1.0)
    info = jnp.finfo(dtype) if is_floating_dtype(dtype) else jnp.iinfo(dtype)
    return Interval(float(info.min), float(info.max))


def count_terms(eqn: JaxprEqn) -> int:
    """Returns how many terms an element of the result is a sum or product of."""
    name, params = eqn.primitive.name, eqn.params
    shapes: list[Any] = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
    if name == "dot_general":
        return math.prod(shapes[0][axis] for axis in params["dimension_numbers"][0][0])
    if name == "conv_general_dilated":
        return math.prod(shapes[1]) // max(1, shapes[1][params["dimension_numbers"].rhs_spec[0]])
    if name in ("cumsum", "cumprod"):
        return shapes[0][params["axis"]]
    if name in ("reduce_window_sum", "select_and_scatter_add"):
        return math.prod(params["window_dimensions"])
    if name in ("reduce_sum", "reduce_prod"):
        return math.prod(shapes[0][axis] for axis in params["axes"])
    return math.prod(shapes[2]) + 1 if name == "scatter-add" else 1


def is_in_bounds(eqn: JaxprEqn, indices: Interval) -> bool:
    """True if a gather reads only elements of its operand, or puts no other value in place of missing ones."""
    if "FILL" not in str(eqn.params["mode"]):
        return True
    sizes, operand = eqn.params["slice_sizes"], eqn.invars[0].aval
    shape: Any = getattr(operand, "shape", ())
    most = min((shape[i] - sizes[i] for i in eqn.params["dimension_numbers"].start_index_map), default=0)
    return indices.low >= 0 and indices.high <= most


def _dtype_of(eqn: JaxprEqn) -> Any:
    return getattr(eqn.outvars[0].aval, "dtype", None)


def _any(eqn: JaxprEqn, *operands: Interval) -> Interval:
    """Bounds a result by its dtype."""
    return bound_dtype(_dtype_of(eqn))


def _apply(fun: Callable[..., float], *values: float) -> float:
    with np.errstate(all="ignore"):
        return float(fun(*map(np.float64, values)))


def _increasing(fun: Callable[..., float]) -> Rule:
    apply = functools.partial(_apply, fun)
    return lambda eqn, x: Interval(apply(x.low), apply(x.high), apply(x.peak) if x.peak > -INF else -INF)


def _decreasing(fun: Callable[..., float]) -> Rule:
    return lambda eqn, x: Interval(_apply(fun, x.high), _apply(fun, x.low))


def _even(fun: Callable[..., float]) -> Rule:
    """Bounds a function of the magnitude that increases with it."""

    def bound(eqn: JaxprEqn, x: Interval) -> Interval:
        least = 0.0 if x.low <= 0 <= x.high else min(abs(x.low), abs(x.high))
        return Interval(_apply(fun, least), _apply(fun, max(abs(x.low), abs(x.high))))

    return bound


def _corners(fun: Callable[..., float]) -> Rule:
    """Bounds a function of two operands that is monotone in each of them."""

    def bound(eqn: JaxprEqn, x: Interval, y: Interval) -> Interval:
        name = eqn.primitive.name
        if x.peak == -INF and name in ("add", "mul", "max"):
            x, y = y, x
        values = [value for a in x[:2] for b in y[:2] if not math.isnan(value := _apply(fun, a, b))]
        keeps_order = name in ("add", "sub", "max") or y.low > 0
        peak = min(_apply(fun, x.peak, b) for b in y[:2]) if keeps_order and x.peak > -INF else -INF
        return Interval(min(values, default=-INF), max(values, default=INF), peak)

    return bound


def _integer_pow(eqn: JaxprEqn, x: Interval) -> Interval:
    y, dtype = eqn.params["y"], _dtype_of(eqn)
    power = _even if y % 2 == 0 else _increasing
    positive = Interval(*power(lambda v: np.power(v, float(abs(y))))(eqn, x)[:2])
    if y >= 0:
        return positive
    inverse = _decreasing(np.reciprocal)(eqn, positive)  # which is 0 if the power overflows
    overflows = max(map(abs, positive[:2])) > bound_dtype(dtype).high / 2
    return hull(inverse, Interval(0.0, 0.0)) if overflows else inverse


def _rem(eqn: JaxprEqn, x: Interval, y: Interval) -> Interval:
    most = min(max(map(abs, x[:2])), max(map(abs, y[:2])))
    return Interval(0.0 if x.low >= 0 else -most, 0.0 if x.high <= 0 else most)


def _sum(eqn: JaxprEqn, x: Interval) -> Interval:
    n = count_terms(eqn)
    return Interval(max(n * x.low, x.peak + (n - 1) * x.low), n * x.high) if n else Interval(0.0, 0.0)


def _sum_windows(eqn: JaxprEqn, x: Interval, *others: Interval) -> Interval:
    return _sum(eqn, hull(Interval(*x[:2]), Interval(0.0, 0.0)))  # padding, and windows that choose another element


def _find_extremes(eqn: JaxprEqn, x: Interval) -> Interval:
    """Bounds the largest or smallest element of each window. One outside of the array gives an infinity."""
    params, sign = eqn.params, 1 if eqn.primitive.name == "reduce_window_max" else -1
    is_padded = any(
        max(pads) >= size for pads, size in zip(params["padding"], params["window_dimensions"], strict=True)
    )
    is_dilated = {1} != {*params["base_dilation"], *params["window_dilation"]}
    return hull(Interval(*x[:2]), Interval(*[-sign * INF] * 2)) if is_padded or is_dilated else Interval(*x[:2])


def _products(eqn: JaxprEqn, x: Interval) -> Interval:
    n = count_terms(eqn)
    most = _apply(np.power, max(1.0, *map(abs, x[:2])), n)
    return Interval(_apply(np.power, min(1.0, x.low), n) if x.low >= 0 else -most, most)


def _matmul(eqn: JaxprEqn, x: Interval, y: Interval) -> Interval:
    n, term = count_terms(eqn), Interval(*_corners(np.multiply)(eqn, x, y)[:2])
    if eqn.primitive.name != "dot_general":
        term = hull(term, Interval(0.0, 0.0))  # padding
    # TPUs and TF32 round the operands of float32 matmuls to as little as 8 bits.
    slack = max(map(abs, term[:2])) * 2.0**-7
    low = 0.0 if 0 <= term.low <= slack else term.low - slack
    return Interval(n * low, n * (term.high + slack)) if n else Interval(0.0, 0.0)


def _compare(eqn: JaxprEqn, x: Interval, y: Interval) -> Interval:
    name = eqn.primitive.name
    if name in ("eq", "ne"):
        same, differ = x[:2] == y[:2] and x.low == x.high, x.high < y.low or y.high < x.low
        holds, fails = (same, differ) if name == "eq" else (differ, same)
    else:
        x, y = (x, y) if name in ("lt", "le") else (y, x)
        strict = name in ("lt", "gt")
        holds = x.high < y.low if strict else x.high <= y.low
        fails = x.low >= y.high if strict else x.low > y.high
    return Interval(float(holds), float(not fails))


def _combine_booleans(fun: Callable[..., float]) -> Rule:
    def bound(eqn: JaxprEqn, *operands: Interval) -> Interval:
        ends = [fun(x.low for x in operands), fun(x.high for x in operands)]
        return Interval(min(ends), max(ends)) if _dtype_of(eqn) == np.bool_ else _any(eqn)

    return bound


def _count_positions(eqn: JaxprEqn, *operands: Interval) -> Interval:
    params, operand = eqn.params, eqn.invars[0].aval if eqn.invars else None
    shape: Any = getattr(operand, "shape", params.get("shape"))
    axes = params["axes"] if operand else [params["dimension"]]
    return Interval(0.0, max(0.0, math.prod(shape[axis] for axis in axes) - 1.0))


def _keep(eqn: JaxprEqn, x: Interval, *others: Interval) -> Interval:
    return x if eqn.primitive.name in _KEEPING else Interval(*x[:2])


_KEEPING = having(Fact.KEEPS) - having(Fact.ANNOTATES)

RULES: dict[str, Rule] = {
    **{name: _increasing(getattr(np, name)) for name in (
        "sign", "floor", "ceil", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "cbrt", "tanh", "sinh"
    )},
    "asin": _increasing(np.arcsin), "acos": _decreasing(np.arccos), "atan": _increasing(np.arctan),
    "asinh": _increasing(np.arcsinh), "acosh": _increasing(np.arccosh), "atanh": _increasing(np.arctanh),
    "logistic": _increasing(lambda x: 1 / (1 + np.exp(-x))), "rsqrt": _decreasing(lambda x: 1 / np.sqrt(x)),
    "erf": _increasing(math.erf), "erfc": _decreasing(math.erfc), "convert_element_type": _increasing(np.float64),
    "neg": _decreasing(np.negative), "abs": _even(np.float64), "square": _even(np.square), "cosh": _even(np.cosh),
    "one_minus_square": lambda eqn, x: _decreasing(lambda square: 1 - square)(eqn, _even(np.square)(eqn, x)),
    # Halves are rounded in either direction.
    "round": lambda eqn, x: Interval(_apply(np.ceil, x.low - 0.5), _apply(np.floor, x.high + 0.5)),
    **dict.fromkeys(("sin", "cos"), lambda eqn, x: Interval(-1.0, 1.0)), "integer_pow": _integer_pow,
    "add": _corners(np.add), "add_any": _corners(np.add), "sub": _corners(np.subtract), "mul": _corners(np.multiply),
    "div": _corners(np.divide), "max": _corners(np.maximum), "min": _corners(np.minimum), "rem": _rem,
    "pow": lambda eqn, x, y: (_corners(np.power) if is_floating_dtype(_dtype_of(eqn)) else _any)(eqn, x, y),
    "clamp": lambda eqn, low, x, high: Interval(*(min(max(x[i], low[i]), high[i]) for i in range(2))),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compare),
    "is_finite": lambda eqn, x: Interval(float(INF not in map(abs, x[:2])), 1.0),
    "and": _combine_booleans(min), "or": _combine_booleans(max), "not": _combine_booleans(lambda x: 1 - next(x)),
    **dict.fromkeys(("dot_general", "conv_general_dilated"), _matmul), "reduce_sum": _sum,
    "cumsum": lambda eqn, x: hull(x, _sum(eqn, Interval(*x[:2]))),
    "reduce_prod": _products, "cumprod": _products, **dict.fromkeys(("argmax", "argmin", "iota"), _count_positions),
    "reduce_max": lambda eqn, x: Interval(max(x.low, x.peak), x.high),
    **dict.fromkeys(("reduce_window_sum", "select_and_scatter_add"), _sum_windows),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), _find_extremes),
    "empty2": lambda eqn: Interval(0.0, 0.0),
    **dict.fromkeys(("reduce_min", "cummax", "cummin", "slice", "split", "unstack", "dynamic_slice", *_KEEPING), _keep),
    "gather": lambda eqn, x, indices: (_keep if is_in_bounds(eqn, indices) else _any)(eqn, x),
    "dynamic_update_slice": lambda eqn, x, update, *indices: hull(x, update),
    **dict.fromkeys(("scatter", "scatter-max", "scatter-min"), lambda eqn, x, indices, updates: hull(x, updates)),
    "scatter-add": lambda eqn, x, indices, updates: _corners(np.add)(
        eqn, x, hull(Interval(0.0, 0.0), Interval(*(count_terms(eqn) * bound for bound in updates[:2])))
    ),
    "select_n": lambda eqn, which, *cases: hull(*cases),
    **dict.fromkeys(("pad", "concatenate", "stack"), lambda eqn, *operands: hull(*operands)),
}  # fmt: skip
"""The one table of rules. Other primitives are unknown."""

OPEN_LIMITS = {
    "exp": (5e-324, INF), "exp2": (5e-324, INF), "logistic": (5e-324, 1 - 1e-14), "tanh": (1e-14 - 1, 1 - 1e-14),
    "erf": (1e-14 - 1, 1 - 1e-14), "erfc": (5e-324, 2 - 1e-14), "expm1": (1e-14 - 1, INF),
}  # fmt: skip
"""Bounds of exact results that are never 0 or 1. Those of float64 would be, for large operands."""


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
