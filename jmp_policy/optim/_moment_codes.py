"""The moments in an optimizer's state, and the 8-bit codes of their elements."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base import PyTree

MU, NU = "mu", "nu"  # averages of gradients, and averages of their squares

# Names of fields with the same meaning in all optax states ...
_ROLES = {
    "mu": MU, "trace": MU, "ema": MU, "exp_avg": MU,
    "nu": NU, "nu_max": NU, "exp_avg_sq": NU, "sum_of_squares": NU, "v_row": NU, "v_col": NU,
}  # fmt: skip
# ... and states in which names have another meaning.
_ROLES_OF = {
    "FactoredState": {"v_row": NU, "v_col": NU, "v": NU},
    "ScaleByAdaDeltaState": {"e_g": NU, "e_x": NU},
    "ScaleByAdanState": {"m": MU, "v": MU, "n": NU},
    "ScaleByAdemamixState": {"m1": MU, "m2": MU, "nu": NU},
    "ScaleBySM3State": {"mu": NU, "nu": MU},
    "ScaleBySimplifiedAdEMAMixState": {"m": MU, "n": NU},
}


def has_moments(node: object) -> bool:
    """True if a node of a state has fields that are moments."""
    return isinstance(node, tuple) and bool(roles_of(node))


def roles_of(node: object) -> dict[str, str]:
    """Returns the roles of the fields of a node that are moments.

    >>> import optax
    >>> roles_of(optax.TraceState(trace=None))
    {'trace': 'mu'}
    """
    fields = getattr(node, "_fields", ())
    named: Any = _ROLES_OF.get(type(node).__name__)
    return named or {name: _ROLES[name] for name in fields if name in _ROLES}


def find_role(names: Sequence[str]) -> str | None:
    """Returns the role of a leaf from the names on its path, or None, if its container has lost its class.

    >>> find_role(("opt_state", "0", "mu", "dense", "kernel"))
    'mu'
    """
    return next((_ROLES[name] for name in reversed(names) if name in _ROLES), None)


def map_moments(fun: Callable[[str, PyTree], Any], state: PyTree, otherwise: Callable[[Any], Any] = lambda x: x) -> Any:
    """Applies `fun(role, field)` to each field of moments, and `otherwise` to each other leaf."""

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
    """Lists the fields of moments of a state with their roles, in the order of its leaves.

    >>> import optax
    >>> [role for role, _ in list_moments(optax.adam(1e-3).init({}))]
    ['mu', 'nu']
    """
    found: list[tuple[str, PyTree]] = []
    map_moments(lambda role, field: found.append((role, field)), state)
    return found


def list_roles(state: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[str | None]:
    """Lists the role of each leaf of a state, or None if it is not a moment."""
    plain = jax.tree.map(lambda _: 0, state, is_leaf=is_leaf)
    marked = map_moments(lambda role, field: jax.tree.map(lambda _: role, field), plain, lambda _: "")
    return [role or None for role in jax.tree.leaves(marked)]


def find_step(state: PyTree) -> jax.Array | None:
    """Returns the first count of steps in a state, or None.

    >>> import optax
    >>> find_step(optax.adam(1e-3).init({})).dtype, find_step(optax.trace(0.9).init({}))
    (dtype('int32'), None)
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_count = jax.tree_util.keystr(path[-1:], simple=True) == "count"
        if is_count and jnp.ndim(leaf) == 0 and jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf
    return None


Array = TypeVar("Array", jax.Array, np.ndarray)


# A code has 256 entries in [-1, 1], and is the index of its entry in ascending order. The caller divides each block by
# its element with the largest magnitude, with its sign: every code has 1, and none has -1. `encode` rounds float32 to
# the nearest entry (ties to the lower one; within 2**-19 of a tie, `DynamicCode` to either), or with uniformly
# distributed uint16 `noise` to one of both neighbors. Over all noise, the average of `DynamicCode` is right within
# 2**-12 of their distance, and the average of the logarithm of `UnsignedFloatCode` within half a percent of it. Larger
# inputs are clipped.


@dataclasses.dataclass(frozen=True)
class DynamicCode:
    """Code with decades below 1, each with twice the entries of the one below it; zero; and 1, but not -1.

    The entries of a decade are the middles of equal intervals between a tenth of a power of ten and that power. They
    equal bitsandbytes' `create_dynamic_map` bit for bit, as computed by float32 PyTorch on a CPU with FMA.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016; Dettmers et al., 8-bit
    Optimizers via Block-wise Quantization, ICLR 2022.

    >>> [round(value, 4) for value in DYNAMIC.values[-3:].tolist()], DYNAMIC.encode(jnp.float32([-1, 0, 1])).tolist()
    ([0.9789, 0.993, 1.0], [0, 127, 255])
    """

    # The index of an entry (its place) is the number of entries of its decade, a power of two, plus its index there. So
    # in float32 the exponent of a place is the decade, and the mantissa is the index there. Zero is first, 1 is last.

    @property
    def values(self) -> np.ndarray:
        decades = []
        for count, tens in _DECADES:
            ends = _find_interval_end(np.arange(count + 1, dtype=np.int32) * np.int32(128 // count))
            decades.append((ends[:-1] + ends[1:]) * tens)
        positive = np.concatenate(decades)
        return np.concatenate([-positive[::-1], np.zeros(1, np.float32), positive, np.ones(1, np.float32)])

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        words = lax.bitcast_convert_type(x, jnp.int32)
        magnitude = lax.bitcast_convert_type(jnp.minimum(words & 0x7FFFFFFF, _ONE), jnp.float32)
        place = self._find_nearest(magnitude) if noise is None else self._choose_neighbor(magnitude, noise)
        codes = _ZERO + jnp.where(words < 0, -place, place)
        return jnp.maximum(codes, 0).astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        place = codes.astype(jnp.int32) - _ZERO
        look_up = lambda place: jnp.asarray(self.values).at[place + _ZERO].get(mode="promise_in_bounds")
        return lax.platform_dependent(place, cpu=look_up, default=self._compute_value)

    def _compute_value(self, place: jax.Array) -> jax.Array:
        """Computes an entry: a lookup in a table is slow on accelerators."""
        magnitude = jnp.abs(place)
        tens = jnp.float32(0)
        for count, each in _DECADES:
            tens = jnp.where(magnitude >= count, each, tens)
        words = lax.bitcast_convert_type(magnitude.astype(jnp.float32), jnp.int32)
        start = (words >> 16) & 127
        length = 128 >> jnp.maximum((words >> 23) - 127, 0)  # the place 0 has no exponent
        value = (_find_interval_end(start) + _find_interval_end(start + length)) * tens
        value = jnp.where(magnitude == _TOP, np.float32(1), value)
        return jnp.where(place < 0, -value, value)

    def _find_nearest(self, x: jax.Array) -> jax.Array:
        """Finds the place of the entry nearest to a number in [0, 1]."""
        # Find the decade by a binary search among the middles between its first entry and the one before, and multiply
        # by a power of ten, so that numbers of all decades lie between a tenth and 1, or slightly above.
        entries = self.values[_ZERO:].astype(np.float64)
        borders = [(entries[n - 1] + entries[n]) / 2 for n in (1, 2, 4, 8, 16, 32, 64, 128)]
        lowest: list[Any] = [np.float32(borders[i - 1] * 10.0 ** (8 - i - (i & -i))) for i in range(1, 8)]
        steps, is_top = [], x > np.float32(borders[7])
        for size in (4, 2, 1):
            is_above = x > lowest[size - 1]
            lowest = [jnp.where(is_above, *pair) for pair in zip(lowest[size:], lowest[: size - 1], strict=True)]
            x = jnp.where(is_above, x, x * np.float32(10.0**size))
            steps.append((is_above, size))

        # Map a tenth to 1, and 1 to 2: the leading bits of the significand are then the place. No platform fuses a sum
        # and the product after it into one operation with one rounding.
        words = lax.bitcast_convert_type((x + np.float32(0.8)) * np.float32(1 / 0.9), jnp.int32)
        place = (jnp.minimum(words, _ONE + 2**23 - 1) - (_ONE - 2**23)) >> 17
        for is_above, size in steps:
            place = jnp.where(is_above, place, place >> size)
        return jnp.where(is_top, _TOP, place)

    def _choose_neighbor(self, x: jax.Array, noise: jax.Array) -> jax.Array:
        """Finds the place of one of both entries around a number in [0, 1]."""
        # A decade reaches from the last entry of the one below to its own last entry. The distance from its first entry
        # is counted in 65536ths of an interval.
        entries = self.values[_ZERO:].astype(np.float64)
        first, start, slope = np.int32(1), np.float32(entries[1]), np.float32(0.6 * 2**16 / entries[1])
        for n in (2, 4, 8, 16, 32, 64):
            is_inside = x > np.float32(entries[n - 1])
            first = jnp.where(is_inside, np.int32(n), first)
            start = jnp.where(is_inside, np.float32(entries[n]), start)
            slope = jnp.where(is_inside, np.float32(2**16 * (n - 1) / (entries[2 * n - 1] - entries[n])), slope)
        distance = (x - start) * slope
        # The interval below the first entry has 0.6 of the length of the others, the one below 1 has half of it.
        distance = jnp.where(distance < 0, distance * np.float32(1 / 0.6), distance).astype(jnp.int32)
        distance = jnp.maximum(distance, 2 * distance - (63 << 16))
        # The noise stays 8 away from its bounds, so that rounding errors do not move a number that is an entry.
        return first + ((distance + (noise & np.uint16(0xFFF0)).astype(jnp.int32) + 8) >> 16)


@dataclasses.dataclass(frozen=True)
class UnsignedFloatCode:
    """Code of floats with 5 exponent and 3 mantissa bits and largest value 1; only zero is encoded as zero.

    Every positive number becomes at least 1.25 * 2**-32, so that no update is divided by the root of a second moment
    that was rounded to zero.

    >>> code = UnsignedFloatCode()
    >>> code.decode(code.encode(jnp.float32([0, 1e-30, 0.3, 1]))).tolist()
    [0.0, 2.9103830456733704e-10, 0.3125, 1.0]
    """

    @property
    def values(self) -> np.ndarray:
        values = ((np.arange(256, dtype=np.int32) + _WORD_OF_0) << 20).view(np.float32)
        return np.where(np.arange(256) > 0, values, np.float32(0))

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        # A code is the float32 exponent and the first three bits of the mantissa, minus a constant.
        words = jnp.minimum(jnp.maximum(lax.bitcast_convert_type(x, jnp.int32), 0), _ONE)
        up = np.int32(2**19 - 1) if noise is None else self._make_increment(noise)
        codes = ((words + up) >> 20) - _WORD_OF_0
        return jnp.maximum(codes, (words > 0).astype(jnp.int32)).astype(jnp.uint8)

    def _make_increment(self, noise: jax.Array) -> jax.Array:
        """Returns integers below 2**20, which may carry into a code."""
        # Not evenly distributed: the average of the logarithm is right. With the average of the number, a decay by less
        # than an entry per step would be 4.6 % too fast, since the chance of a step is that of its larger end; and the
        # root of a noisy second moment is too small on average. 0.045 is right for an octave of 8 entries: its linear
        # decay takes 1/9 + ... + 1/16 = 0.663 in place of log(2), and its growth 1/8 + ... + 1/15 = 0.725.
        chance = (noise.astype(jnp.int32) * 2 + 1).astype(jnp.float32) * np.float32(2.0**-17)
        chance = chance * (np.float32(1.045) - np.float32(0.045) * chance)
        return (chance * np.float32(2**20)).astype(jnp.int32)

    def decode(self, codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        words = jnp.where(codes > 0, (codes + _WORD_OF_0) << 20, 0)
        return lax.bitcast_convert_type(words, jnp.float32)


MomentCode = DynamicCode | UnsignedFloatCode
DYNAMIC = DynamicCode()
UNSIGNED_FLOAT = UnsignedFloatCode()

_ZERO, _TOP = 127, 128  # the dynamic code of zero, and the place of 1
_ONE = 127 << 23  # the bits of 1
_WORD_OF_0 = (_ONE >> 20) - 255  # the code 255 is 1

# Ends of intervals between 0.1 and 1 are 30-bit integers, which conversion to float32 rounds to nearest. PyTorch
# computes ends below the middle from float32 0.1, and the others from 1.
_LENGTH, _FIRST_END, _CORRECTION = np.int32(7549747), np.int32(107374184), np.int32(24)
_UNIT = np.float32(2.0**-31)  # of the sum of two ends

# The number of entries of each decade, and the power of ten at its end, times `_UNIT`.
_DECADES = [(1 << i, np.float32(10.0 ** (i - 6)) * _UNIT) for i in range(7)]


def _find_interval_end(k: Array) -> Array:
    """Returns the end that is `k` 128ths of the way from 0.1 to 1."""
    return (k * _LENGTH + (k >= 64).astype(np.int32) * _CORRECTION + _FIRST_END).astype(np.float32)
