"""Records the smallest and largest element of each value, and the first iteration that was not finite."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._jaxpr import Fact, Order, Recorder, array_dtype, having, is_float

MOST_LOOPS = 3
"""Maximum number of nested merged loops (loops with one row for all iterations) with a recorded iteration."""

MOST_SPLIT = 64
"""A loop with at most this many iterations has one row per iteration."""

_LEAST, _MOST = np.iinfo(np.int32).min, np.iinfo(np.int32).max

NEVER = _MOST
"""Iteration of an event that did not happen."""

INFINITY = 0x7F800000
"""Key of infinity. The key of minus infinity is the bitwise complement; keys of nan are beyond both."""


class Extremes(NamedTuple):
    """A record of several values, as int32.

    Keys are integers in the order of the elements, from a negative nan to a positive nan. See `decode_key`.
    """

    low: jax.Array  # (rows,): the key of the smallest element
    high: jax.Array  # the key of the largest element
    first: jax.Array  # (rows, 2, MOST_LOOPS): the first iterations with a nan and with an infinity, or `NEVER`
    turns: jax.Array  # (rows,): the number of recorded iterations of the innermost `while`


@dataclasses.dataclass(frozen=True)
class ExtremesRecorder(Recorder):
    """Measures all floating values except those that are finite exactly if an operand is."""

    def enter(self, outer: None, eqn: JaxprEqn) -> None:
        return None

    def choose(self, eqn: JaxprEqn, context: None) -> Sequence[int]:
        pairs = enumerate(eqn.outvars)
        return [i for i, var in pairs if is_measurable(var) and find_telling_operand(eqn, i) is None]

    def splits(self, turns: int) -> bool:
        return turns <= MOST_SPLIT

    def measure(self, value: Any) -> tuple[jax.Array, jax.Array]:
        # XLA would measure a constant, such as a mask, while it compiles, for seconds each.
        return find_extremes(lax.optimization_barrier(lax.stop_gradient(value)))

    def gather(self, measured: tuple[jax.Array, jax.Array]) -> Extremes:
        low, high = measured
        has_nan, has_infinity = (high > INFINITY) | (low < ~INFINITY), (high == INFINITY) | (low == ~INFINITY)
        held = jnp.stack([has_nan, has_infinity], 1)[:, :, None]
        first = jnp.where(held, 0, jnp.full((len(low), 2, MOST_LOOPS), NEVER, jnp.int32))
        return Extremes(low, high, first, jnp.ones_like(low))

    def join(self, records: Sequence[Extremes]) -> Extremes:
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *records)

    def merge(self, one: Extremes, other: Extremes) -> Extremes:
        first = jnp.where(_has_happened(one.first), one.first, _enter_turn(other.first, one.turns[:, None, None]))
        low, high = _leave_out_nan(other.low, other.high)
        return Extremes(jnp.minimum(one.low, low), jnp.maximum(one.high, high), first, one.turns + 1)

    def fold(self, record: Extremes, order: Order) -> Extremes:
        low, high, first, _ = record
        if order == "backward":
            first = first[::-1]
        earliest = jnp.argmax(_has_happened(first), axis=0, keepdims=True)
        kept = jnp.take_along_axis(first, earliest, axis=0)[0]
        if order != "devices":
            kept = _enter_turn(kept, earliest[0])
        low, high = _leave_out_nan(low, high)
        return Extremes(jnp.min(low, 0), jnp.max(high, 0), kept, jnp.ones(low.shape[1:], jnp.int32))

    def empty(self, rows: int) -> Extremes:
        return Extremes(
            jnp.full(rows, _MOST, jnp.int32),
            jnp.full(rows, _LEAST, jnp.int32),
            jnp.full((rows, 2, MOST_LOOPS), NEVER, jnp.int32),
            jnp.zeros(rows, jnp.int32),
        )


def find_extremes(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the keys of the smallest and largest element, int32 scalars. For an empty array, low is above high.

    Reduces integers because XLA on CPUs loses nan in a float maximum, and computes float16 in the range of float32.
    """
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        (low, high), (other_low, other_high) = find_extremes(value.real), find_extremes(value.imag)
        return jnp.minimum(low, other_low), jnp.maximum(high, other_high)
    keys, start = encode_keys(value), (np.int32(_MOST), np.int32(_LEAST))
    join = lambda one, other: (lax.min(one[0], other[0]), lax.max(one[1], other[1]))
    return lax.reduce((keys, keys), start, join, tuple(range(keys.ndim)))


def encode_keys(value: jax.Array) -> jax.Array:
    """Returns int32 keys in the order of the elements."""
    if value.dtype == jnp.float16:
        bits = lax.bitcast_convert_type(value, jnp.int16).astype(jnp.int32)
        return (((bits & 0x7FFF) << _HALF_SHIFT) + _HALF_OFFSET) ^ (bits >> 31)
    if value.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(value, jnp.int16).astype(jnp.int32) << 16
    else:
        bits = lax.bitcast_convert_type(_make_single(value), jnp.int32)
    return (bits & 0x7FFFFFFF) ^ (bits >> 31)


def decode_key(key: jax.Array, is_half: jax.typing.ArrayLike) -> jax.Array:
    """Returns the float32 values of keys. `is_half` is True for keys of float16."""
    magnitude = key ^ (key >> 31)
    half = ((magnitude - _HALF_OFFSET) >> _HALF_SHIFT).astype(jnp.int16)
    single = lax.bitcast_convert_type(magnitude, jnp.float32)
    number = jnp.where(is_half, lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32), single)
    return jnp.where(key < 0, -number, number)


def is_measurable(atom: Any) -> bool:
    """True for a floating or complex array that is used."""
    dtype = array_dtype(atom)
    is_complex = dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)
    return (is_complex or is_float(atom)) and str(atom) != "_"


def moves_only(eqn: JaxprEqn) -> bool:
    """True if an equation only moves elements or upcasts them."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
        if not (jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)):
            return False
        return float(jnp.finfo(new).max) >= float(jnp.finfo(old).max)
    return name in _MOVES


class Telling(NamedTuple):
    """An operand that is finite exactly if a result is: the result is `scale` times the operand plus `shift`."""

    operand: int
    scale: float = 1.0
    shift: float = 0.0


def find_telling_operand(eqn: JaxprEqn, result: int) -> Telling | None:
    """Finds the operand that is finite exactly if a result is: of a move, a negation, or a harmless constant op.

    >>> import jax
    >>> eqns = jax.make_jaxpr(lambda x: 2.0 * (1.0 - 0.5 * -x))(1.0).eqns
    >>> for eqn in eqns:
    ...     print(eqn.primitive.name, find_telling_operand(eqn, 0))
    neg Telling(operand=0, scale=-1.0, shift=0.0)
    mul Telling(operand=1, scale=0.5, shift=0.0)
    sub Telling(operand=1, scale=-1.0, shift=1.0)
    mul None
    """
    name = eqn.primitive.name
    if moves_only(eqn):
        return Telling(result)
    if name == "neg":
        return Telling(0, -1.0)
    places = [i for i, atom in enumerate(eqn.invars) if isinstance(atom, Literal)]
    if len(places) != 1 or len(eqn.invars) != 2 or not is_float(eqn.invars[places[0]]):
        return None
    [place] = places
    number = float(eqn.invars[place].val)  # pyright: ignore[reportAttributeAccessIssue]
    limits = jnp.finfo(eqn.outvars[result].aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    is_little = abs(number) < float(limits.max) * float(limits.eps) / 8  # cannot overflow the largest
    if name == "add" and is_little:
        return Telling(1 - place, 1.0, number)
    if name == "sub" and is_little:
        return Telling(1 - place, -1.0 if place == 0 else 1.0, number if place == 0 else -number)
    if name == "mul" and 0 < abs(number) <= 1:
        return Telling(1 - place, number)
    if name == "div" and place == 1 and 1 <= abs(number) < math.inf:
        return Telling(0, 1 / number)
    return None


_MOVES = having(Fact.KEEPS)

# Shift and offset give infinity and nan the same keys in float16 and float32.
_HALF_SHIFT = 13
_HALF_OFFSET = INFINITY - (0x7C00 << _HALF_SHIFT)


def _make_single(value: jax.Array) -> jax.Array:
    """Casts to float32; finite float64 values that do not fit become its largest number."""
    if value.dtype != jnp.float64:
        return value.astype(jnp.float32)
    largest = float(jnp.finfo(jnp.float32).max)
    return jnp.where(jnp.isfinite(value), jnp.clip(value, -largest, largest), value).astype(jnp.float32)


def _leave_out_nan(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Drops the extremes of iterations with a nan, so that ranges are of the iterations before."""
    has_nan = (low < ~INFINITY) | (high > INFINITY)
    return jnp.where(has_nan, _MOST, low), jnp.where(has_nan, _LEAST, high)


def _has_happened(first: jax.Array) -> jax.Array:
    return first[..., :1] != NEVER


def _enter_turn(first: jax.Array, turn: jax.Array) -> jax.Array:
    """Prepends the iteration of a loop to the iterations of the loops inside it."""
    moved = jnp.concatenate([jnp.broadcast_to(turn, (*first.shape[:-1], 1)), first[..., :-1]], axis=-1)
    return jnp.where(_has_happened(first), moved.astype(jnp.int32), NEVER)
