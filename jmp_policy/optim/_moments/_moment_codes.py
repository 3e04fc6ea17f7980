"""The moments in an optimizer's state, and the 8-bit codes of their elements."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base import PyTree

MU, NU = "mu", "nu"
"""Averages of gradients, and averages of their squares."""

# The names of fields that mean the same in every state of optax that has them ...
_ROLES = {
    "mu": MU, "trace": MU, "ema": MU, "exp_avg": MU,
    "nu": NU, "nu_max": NU, "exp_avg_sq": NU, "sum_of_squares": NU, "v_row": NU, "v_col": NU,
}  # fmt: skip
# ... and the states whose names mean something of their own.
_ROLES_OF = {
    "FactoredState": {"v_row": NU, "v_col": NU, "v": NU},
    "ScaleByAdaDeltaState": {"e_g": NU, "e_x": NU},
    "ScaleByAdanState": {"m": MU, "v": MU, "n": NU},
    "ScaleByAdemamixState": {"m1": MU, "m2": MU, "nu": NU},
    "ScaleBySM3State": {"mu": NU, "nu": MU},
    "ScaleBySimplifiedAdEMAMixState": {"m": MU, "n": NU},
}


def has_moments(node: object) -> bool:
    """Whether a node of a state has fields that are moments."""
    return isinstance(node, tuple) and bool(roles_of(node))


def roles_of(node: object) -> dict[str, str]:
    """The roles of the fields of a node that are moments.

    >>> import optax
    >>> roles_of(optax.TraceState(trace=None))
    {'trace': 'mu'}
    """
    fields = getattr(node, "_fields", ())
    named: Any = _ROLES_OF.get(type(node).__name__)
    return named or {name: _ROLES[name] for name in fields if name in _ROLES}


def find_role(names: Sequence[str]) -> str | None:
    """The role of a leaf by the names on its path, where what held it has lost its class; `None` if no name tells.

    >>> find_role(("opt_state", "0", "mu", "dense", "kernel"))
    'mu'
    """
    return next((_ROLES[name] for name in reversed(names) if name in _ROLES), None)


def map_moments(fun: Callable[[str, PyTree], Any], state: PyTree, otherwise: Callable[[Any], Any] = lambda x: x) -> Any:
    """A state with `fun(role, field)` in place of each field of moments, and `otherwise` of each other leaf."""

    def visit(node: Any) -> Any:
        if not has_moments(node):
            return otherwise(node)
        roles = roles_of(node)
        fields = {name: getattr(node, name) for name in node._fields}
        visited = {
            name: fun(roles[name], field) if name in roles else map_moments(fun, field, otherwise)
            for name, field in fields.items()
        }
        return node._replace(**visited)

    return jax.tree.map(visit, state, is_leaf=has_moments)


def list_moments(state: PyTree) -> list[tuple[str, PyTree]]:
    """The fields of moments of a state with their roles, in the order of its leaves.

    >>> import optax
    >>> [role for role, _ in list_moments(optax.adam(1e-3).init({}))]
    ['mu', 'nu']
    """
    found: list[tuple[str, PyTree]] = []
    map_moments(lambda role, field: found.append((role, field)), state)
    return found


def list_roles(state: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str | None]:
    """For each leaf of a state its role; `None` where it is no moment."""
    plain = jax.tree.map(lambda _: 0, state, is_leaf=is_leaf)
    marked = map_moments(lambda role, field: jax.tree.map(lambda _: role, field), plain, lambda _: "")
    return [role or None for role in jax.tree.leaves(marked)]


Array = TypeVar("Array", jax.Array, np.ndarray)


class MomentCode(Protocol):
    """Entries from -1 or 0 to 1, and the rounding of numbers to them.

    A code is the place of its entry in ascending order. Scales are the caller's part: a block is divided by its number
    that is largest in magnitude, with its sign, since every code has 1 and none has -1; and by nan, if it has one.
    """

    @property
    def values(self) -> np.ndarray:
        """All entries, ascending, in float32."""
        ...

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Rounds to the nearest entry, of two equally near ones the lower; or at random to one of both neighbours.

        Args:
          x: float32. What is beyond the entries is clipped, and nan becomes any of them.
          noise: uniformly random uint8 or uint16, of the shape of `x`. The nearer neighbour is the likelier: over all
            noise of n bits, the average is right within 2**-n of the neighbours' distance.

        Returns:
          Codes, uint8.
        """
        ...

    def decode(self, codes: jax.Array) -> jax.Array:
        """The entries that codes stand for, in float32."""
        ...


@dataclasses.dataclass(frozen=True)
class DynamicCode:
    """Decades below 1, each with twice the entries of the one below it; zero; and 1, of which the negative is missing.

    A decade's entries are the middles of equal intervals between a tenth of a power of ten and that power. There is one
    decade fewer than there are bits. They are bitsandbytes' `create_dynamic_map`, in every bit: as float32 of PyTorch
    on a CPU that multiplies and adds in one rounding, from which a CPU without FMA is up to 2 ulp away.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016; Dettmers et al., 8-bit
    Optimizers via Block-wise Quantization, ICLR 2022.

    >>> [round(value, 4) for value in DYNAMIC.values[-3:].tolist()], DYNAMIC.encode(jnp.float32([-1, 0, 1])).tolist()
    ([0.9789, 0.993, 1.0], [0, 127, 255])
    """

    # An entry's place is how many entries its decade has, a power of two, plus its place in the decade: in float32, the
    # exponent of a place is the decade, and its mantissa the place there. Zero is before all of them, 1 after.

    @property
    def values(self) -> np.ndarray:
        decades = []
        for count, tens in _DECADES:
            ends = _find_end(np.arange(count + 1, dtype=np.int32) * np.int32(128 // count))
            decades.append((ends[:-1] + ends[1:]) * tens)
        positive = np.concatenate(decades)
        return np.concatenate([-positive[::-1], np.zeros(1, np.float32), positive, np.ones(1, np.float32)])

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        words = lax.bitcast_convert_type(x, jnp.int32)
        is_negative = words < 0
        magnitude = words & 0x7FFFFFFF
        place = self._find_nearest(magnitude, is_negative)
        if noise is not None:
            place = self._choose_neighbour(lax.bitcast_convert_type(magnitude, jnp.float32), place, noise)
        codes = _ZERO + jnp.where(is_negative, -place, place)
        return jnp.maximum(codes, 0).astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        place = codes.astype(jnp.int32) - _ZERO
        value = self._find_value(jnp.abs(place))
        return jnp.where(place < 0, -value, value)

    def _find_value(self, place: jax.Array) -> jax.Array:
        tens = jnp.float32(0)
        for count, each in _DECADES:
            tens = jnp.where(place >= count, each, tens)
        words = lax.bitcast_convert_type(place.astype(jnp.float32), jnp.int32)
        start = (words >> 16) & 127
        length = 128 >> jnp.maximum((words >> 23) - 127, 0)  # the place 0 has no exponent
        value = (_find_end(start) + _find_end(start + length)) * tens
        return jnp.where(place == _TOP, np.float32(1), value)

    def _find_nearest(self, magnitude: jax.Array, is_negative: jax.Array) -> jax.Array:
        """Finds the place of the nearest entry.

        Args:
          magnitude: the bits of float32, without sign.
          is_negative: where the larger of two equally near magnitudes is the lower entry.
        """
        # The decade, by what lies half way between its first entry and the one before.
        entries = self.values[_ZERO:].astype(np.float64)
        borders = (entries[:-1] + entries[1:]) / 2
        shift, tens = jnp.int32(0), jnp.float32(_UNIT)
        for count, each in _DECADES:
            is_above = _is_above(magnitude, is_negative, borders[count - 1])
            shift = jnp.where(is_above, np.int32(8 - count.bit_length()), shift)
            tens = jnp.where(is_above, each, tens)

        # The nearest end between two of its intervals, and both their entries. A quotient is precise enough for that,
        # however a platform rounds it.
        x = lax.bitcast_convert_type(magnitude, jnp.float32)
        count, length = 128 >> shift, 1 << shift
        distance = (x / tens * np.float32(_UNIT / 0.9 * 128) - np.float32(0.1 / 0.9 * 128)).astype(jnp.int32)
        nearest = jnp.maximum(jnp.minimum((distance + (length >> 1)) >> shift, count - 1), 1)
        end = _find_end(nearest << shift)
        lower = (_find_end((nearest << shift) - length) + end) * tens
        upper = (end + _find_end((nearest << shift) + length)) * tens

        # The nearer one, in integers: multiples of the last bit of a number at the decade's beginning.
        exponent = lax.bitcast_convert_type(tens, jnp.int32) & 0x7F800000
        scale = lax.bitcast_convert_type(np.int32(250 << 23) - exponent, jnp.float32)
        both = (lower * scale).astype(jnp.int32) + (upper * scale).astype(jnp.int32)
        twice = (x * scale).astype(jnp.int32) * 2 + is_negative.astype(jnp.int32)
        place = count + nearest - (twice <= both).astype(jnp.int32)
        place = jnp.minimum(place, 2 * count - 1)  # a decade of one entry has no end between two

        is_above_zero = _is_above(magnitude, is_negative, borders[0])
        is_top = _is_above(magnitude, is_negative, borders[-1])
        return jnp.where(is_top, _TOP, jnp.where(is_above_zero, place, 0))

    def _choose_neighbour(self, x: jax.Array, nearest: jax.Array, noise: jax.Array) -> jax.Array:
        value = self._find_value(nearest)
        other = jnp.minimum(nearest + jnp.where(x < value, np.int32(-1), np.int32(1)), _TOP)
        is_other = jnp.abs(x - value) > jnp.abs(self._find_value(other) - value) * _make_chance(noise)
        return jnp.where(is_other, other, nearest)


@dataclasses.dataclass(frozen=True)
class UnsignedFloatCode:
    """Floating numbers of 5 exponent and 3 mantissa bits, of which the largest is 1; zero stands for zero alone.

    A positive number, however small, becomes 1.25 * 2**-32 or more, so that nothing is divided by the root of a second
    moment that was rounded to zero.

    >>> code = UnsignedFloatCode()
    >>> code.decode(code.encode(jnp.float32([0, 1e-30, 0.3, 1]))).tolist()
    [0.0, 2.9103830456733704e-10, 0.3125, 1.0]
    """

    @property
    def values(self) -> np.ndarray:
        values = ((np.arange(256, dtype=np.int32) + _WORD_OF_0) << 20).view(np.float32)
        return np.where(np.arange(256) > 0, values, np.float32(0))

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        # A code differs by a constant from the exponent and the first three bits of the mantissa of float32.
        words = jnp.minimum(jnp.maximum(lax.bitcast_convert_type(x, jnp.int32), 0), _ONE)
        up = np.int32(2**19 - 1) if noise is None else (_make_chance(noise) * np.float32(2**20)).astype(jnp.int32)
        codes = ((words + up) >> 20) - _WORD_OF_0
        return jnp.maximum(codes, (words > 0).astype(jnp.int32)).astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        words = jnp.where(codes > 0, (codes + _WORD_OF_0) << 20, 0)
        return lax.bitcast_convert_type(words, jnp.float32)


DYNAMIC = DynamicCode()
UNSIGNED_FLOAT = UnsignedFloatCode()

_ZERO, _TOP = 127, 128
"""The dynamic code of zero, and the place of 1."""

_ONE = 127 << 23  # the bits of 1
_WORD_OF_0 = (_ONE >> 20) - 255  # the code 255 is 1

# Ends of intervals between .1 and 1 are integers of 30 bits, which conversion to float32 rounds to nearest. PyTorch
# counts those below the middle from .1 as float32 has it, the others from 1.
_LENGTH, _FIRST_END, _CORRECTION = np.int32(7549747), np.int32(107374184), np.int32(24)
_UNIT = np.float32(2.0**-31)  # of the sum of two ends

_DECADES = [(1 << i, np.float32(10.0 ** (i - 6)) * _UNIT) for i in range(7)]
"""How many entries each decade has, and the power of ten at its end, times `_UNIT`."""


def _find_end(k: Array) -> Array:
    """The end that is `k` 128ths of the way from .1 to 1."""
    return (k * _LENGTH + (k >= 64).astype(np.int32) * _CORRECTION + _FIRST_END).astype(np.float32)


def _is_above(magnitude: jax.Array, is_negative: jax.Array, border: float) -> jax.Array:
    """Compares bits of float32 with a float64 number; where they are equal, negative numbers are above it."""
    nearest = np.float32(border)
    if nearest == border:
        return magnitude + is_negative.astype(jnp.int32) > nearest.view(np.int32)
    return magnitude > nearest.view(np.int32) - np.int32(nearest > border)


def _make_chance(noise: jax.Array) -> jax.Array:
    """Numbers between 0 and 1, of which neither is one: a decay by less than a step of them is not always rounded."""
    bits = 8 * noise.dtype.itemsize
    return (noise.astype(jnp.int32) * 2 + 1).astype(jnp.float32) * np.float32(0.5**bits / 2)
