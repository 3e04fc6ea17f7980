"""Faults of operations: where they are, and the operands that an operation is invalid for."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from ..._base import is_floating_dtype
from ..._jaxpr import Step, find_line, find_origin, split_line
from ._intervals import INF, Interval, find_tiny, is_in_bounds

Around = tuple[tuple[JaxprEqn, Jaxpr], ...]
"""The enclosing equations, as in `Step`."""

Place = tuple[int, ...]
"""The ids of the enclosing equations and of an equation."""

OVERFLOW, DIVISION, INVALID, CANCELLATION = FAULTS = (
    "overflow", "division by zero", "invalid operation", "cancellation"
)  # fmt: skip


class Fault(NamedTuple):
    """A fault that an equation has, or may have."""

    kind: str  # one of `FAULTS`, or the reason why the equation is not understood
    place: Place = ()
    primitive: str = ""
    dtype: str = ""
    source: str = ""
    operands: tuple[tuple[float, float], ...] = ()


def make_fault(kind: str, eqn: JaxprEqn, around: Around, operands: Sequence[Interval]) -> Fault:
    name, step = eqn.primitive.name, Step(eqn.primitive.name, eqn.invars, eqn.outvars, eqn, "", around)
    dtype = str(getattr(eqn.outvars[0].aval, "dtype", ""))
    source = split_line(find_line(find_origin(step)))[0]
    return Fault(kind, locate(eqn, around), name, dtype, source, tuple((one.low, one.high) for one in operands))


def locate(eqn: JaxprEqn, around: Around) -> Place:
    return (*(id(call) for call, _ in around), id(eqn))


def find_invalid(eqn: JaxprEqn, operands: Sequence[Interval]) -> str:
    """Names the fault of an equation for some operands in these intervals; empty if they are all valid."""
    name, dtype = eqn.primitive.name, getattr(eqn.outvars[0].aval, "dtype", None)
    x, y = (*operands, Interval(1.0, 1.0), Interval(1.0, 1.0))[:2]
    if name in ("div", "rem") and y.low <= 0 <= y.high:
        return DIVISION
    if not is_floating_dtype(dtype):  # pyright: ignore[reportArgumentType]
        return ""
    least, most = _DOMAINS.get(name, (-INF, INF))
    if x.low < least or x.high > most or (name == "gather" and not is_in_bounds(eqn, y)):
        return INVALID
    if name == "integer_pow" and eqn.params["y"] < 0:  # is the reciprocal of a power, which may underflow
        least = 0.0 if x.low <= 0 <= x.high else min(map(abs, x[:2])) ** -float(eqn.params["y"])
        return DIVISION if least < 2 * find_tiny(dtype) else ""
    exponent = y.low if name == "pow" else 1
    if has_pole(name, exponent) and any(x.low <= pole <= x.high for pole in _POLES.get(name, (0.0,))):
        return DIVISION
    return INVALID if INF in map(abs, (*x[:2], *y[:2])) and _meet_infinities(name, x, y) else ""


_DOMAINS = {
    "log": (0.0, INF), "log2": (0.0, INF), "log1p": (-1.0, INF), "sqrt": (0.0, INF), "rsqrt": (0.0, INF),
    "asin": (-1.0, 1.0), "acos": (-1.0, 1.0), "acosh": (1.0, INF), "atanh": (-1.0, 1.0), "pow": (0.0, INF),
}  # fmt: skip
_POLES = {"log1p": (-1.0,), "atanh": (-1.0, 1.0)}


def has_pole(name: str, exponent: Any) -> bool:
    """True if a function of one operand is infinite for a finite one: zero, or one of `_POLES`."""
    return name in ("log", "log2", "log1p", "rsqrt", "atanh") or (name in ("pow", "integer_pow") and exponent < 0)


def _meet_infinities(name: str, x: Interval, y: Interval) -> bool:
    """True if operands may be infinite and give nan."""
    endless = [INF in map(abs, one[:2]) for one in (x, y)]
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return (endless[0] and y.low <= 0 <= y.high) or (endless[1] and x.low <= 0 <= x.high)
    if name == "sub":
        return (x.low == y.low == -INF) or (x.high == y.high == INF)
    if name in ("add", "add_any"):
        return (x.low == -INF and y.high == INF) or (x.high == INF and y.low == -INF)
    if name in ("reduce_sum", "cumsum"):
        return x.low == -INF and x.high == INF
    return name in ("sin", "cos", "rem") or (name == "div" and all(endless))


def is_cancelled(eqn: JaxprEqn, x: Interval, y: Interval) -> bool:
    """True if two operands that are not zero may cancel."""
    y = y if eqn.primitive.name == "sub" else Interval(-y.high, -y.low)
    low, high = max(x.low, y.low), min(x.high, y.high)
    return low <= high and (low, high) != (0.0, 0.0) and not math.isnan(low)
