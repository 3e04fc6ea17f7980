"""Numbers of 8 and 4 bits for the moments of an optimizer, relative to the largest number of their block.

Encoders and decoders are elementwise, without tables, so that XLA fuses them into the loops that call them, and return
the same bits on every platform, eager or compiled: numbers are compared as integers, since some backends read
subnormal float32 as zero, and no product of two floats is added to another, which compilers may round once or twice.
"""

import dataclasses
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MAGNITUDE = 0x7FFFFFFF  # of the bits of float32


class MomentCode(Protocol):
    """Entries between -1 or 0 and 1, in ascending order, and the rounding of numbers to them."""

    @property
    def bits(self) -> int:
        """How many bits a code has, 8 or 4; in both cases it takes a byte, and packing is the caller's."""
        ...

    @property
    def is_signed(self) -> bool: ...

    @property
    def values(self) -> np.ndarray:
        """All entries, float32."""
        ...

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        """Rounds float32 to the codes, uint8, of the nearest entries, or at random to one of both neighbours.

        Of two entries that are equally near, the lower one. What is larger than the entries is clipped, and nan has
        any code: the caller's scale shows it.

        Args:
          x: float32.
          noise: uniformly random uint8 or uint16, of the shape of `x`; the nearer neighbour is the likelier.
        """
        ...

    def decode(self, codes: jax.Array) -> jax.Array:
        """The entries, float32, of codes."""
        ...


@dataclasses.dataclass(frozen=True)
class DynamicCode:
    """Decades of the same length, each with twice the entries of the one below; zero; and one.

    A decade's entries are the means of neighbours among equally spaced numbers between a tenth and one, times a power
    of ten. There is one decade fewer than there are bits. They are those of bitsandbytes' `create_dynamic_map` bit for
    bit, as it computes them where PyTorch's `linspace` multiplies and adds in one rounding: on CPUs with FMA.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015; Dettmers et al., 8-bit Optimizers via
    Block-wise Quantization, ICLR 2022; with 4 bits Li et al., Memory Efficient Optimizers with 4-bit States, 2023.

    >>> DynamicCode(4, is_signed=True).values.round(4).tolist()[7:]
    [0.0, 0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """

    bits: int
    is_signed: bool

    # An entry's place among its equals, q, is a decade's power of two plus its place in the decade: as float32, the
    # exponent of q counts decades, and its mantissa is the place.

    @property
    def values(self) -> np.ndarray:
        place = np.arange(self._first, self._top)
        upper = _find_values_in_numpy(place, self._first, self.bits - 1)
        positive = np.concatenate([[0.0], upper, [1.0]]).astype(np.float32)
        return np.concatenate([-positive[-2:0:-1], positive]) if self.is_signed else positive

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        words = lax.bitcast_convert_type(x, jnp.int32)
        is_negative = words < 0
        magnitude = words & _MAGNITUDE if self.is_signed else jnp.maximum(words, 0)
        place = self._find_nearest(magnitude, is_negative)
        if noise is not None:
            place = self._choose_neighbour(magnitude, place, noise)
        if not self.is_signed:
            return jnp.maximum(place - 1, 0).astype(jnp.uint8)
        zero = self._top - 1
        return jnp.where(is_negative, jnp.maximum(zero - place, 0), zero + place).astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        codes = codes.astype(jnp.int32)
        if not self.is_signed:
            return self._find_value(codes + 1)
        place = codes - (self._top - 1)
        value = self._find_value(jnp.abs(place))
        return jnp.where(place < 0, -value, value)

    @property
    def _first(self) -> int:
        """The place of the least positive entry."""
        return 1 if self.is_signed else 2

    @property
    def _top(self) -> int:
        """The place of 1."""
        return 2 ** (self.bits - 1) if self.is_signed else 2**self.bits

    @property
    def _decades(self) -> list[tuple[int, np.float32]]:
        """Of each decade the place of its least entry, and the power of ten that it ends at, times `_UNIT`."""
        count = self.bits - 1
        return [(self._first << i, np.float32(10.0 ** (i + 1 - count)) * _UNIT) for i in range(count)]

    def _find_value(self, place: jax.Array) -> jax.Array:
        tens = jnp.float32(0)
        for first, ten in self._decades:
            tens = jnp.where(place >= first, ten, tens)
        value = _interpolate(place, tens)
        return jnp.where(place == self._top, np.float32(1), value)

    def _find_nearest(self, magnitude: jax.Array, is_negative: jax.Array) -> jax.Array:
        """The place of the nearest entry, 0 for zero.

        Args:
          magnitude: the bits of float32 without their sign.
          is_negative: where the larger of two equally near magnitudes is the lower number.
        """
        # The decade, by comparisons with what lies half way between its least entry and the one below.
        entries = self.values[self.values >= 0].astype(np.float64)
        tens, first = jnp.float32(_UNIT), jnp.int32(1)
        borders = []
        for place, ten in self._decades:
            below = place - self._first
            is_above = _is_above(magnitude, is_negative, entries[below : below + 2].mean())
            tens, first = jnp.where(is_above, ten, tens), jnp.where(is_above, np.int32(place), first)
            borders.append(is_above)
        is_top = _is_above(magnitude, is_negative, entries[-2:].mean())

        # The two entries in it on both sides of the number: a quotient is near enough, however it is rounded.
        x = lax.bitcast_convert_type(magnitude, jnp.float32)
        guess = (x / tens * np.float32(_UNIT / 0.9) - np.float32(1 / 9)) * first.astype(jnp.float32)
        upper = jnp.maximum(jnp.minimum((guess + np.float32(0.5)).astype(jnp.int32), first - 1), 1)

        # Which of them is nearer, exactly, in integers: of the decade the last place of the least number that it has.
        exponent = lax.bitcast_convert_type(tens, jnp.int32) & 0x7F800000
        per_unit = lax.bitcast_convert_type(np.int32(250 << 23) - exponent, jnp.float32)
        a, b = ((_interpolate(first + at, tens) * per_unit).astype(jnp.int32) for at in (upper - 1, upper))
        doubled = (x * per_unit).astype(jnp.int32) * 2 + is_negative.astype(jnp.int32)
        nearest = first + upper - (doubled <= a + b).astype(jnp.int32)
        nearest = jnp.minimum(nearest, 2 * first - 1)
        return jnp.where(is_top, self._top, jnp.where(borders[0], nearest, 0))

    def _choose_neighbour(self, magnitude: jax.Array, nearest: jax.Array, noise: jax.Array) -> jax.Array:
        x = lax.bitcast_convert_type(magnitude, jnp.float32)
        zero = self._first - 1
        nearest = jnp.maximum(nearest, zero)
        lower = jnp.minimum(nearest - (x < self._find_value(nearest)).astype(jnp.int32), self._top - 1)
        a, b = self._find_value(lower), self._find_value(lower + 1)
        chance = (noise.astype(jnp.int32) * 2 + 1).astype(jnp.float32) * np.float32(
            2.0 ** -(noise.dtype.itemsize * 8 + 1)
        )
        return lower + (x - a > (b - a) * chance).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class UnsignedFloatCode:
    """Floating numbers of 5 exponent and 3 mantissa bits whose largest is 1; zero is given to exact zeros alone.

    A positive number, however small, has the least positive entry, 1.25 * 2**-32, or a larger one: an update that is
    divided by the root of a second moment is never divided by the root of zero.

    >>> code = UnsignedFloatCode()
    >>> code.decode(code.encode(jnp.float32([0, 1e-30, 0.3, 1]))).tolist()
    [0.0, 2.9103830456733704e-10, 0.3125, 1.0]
    """

    bits: ClassVar[int] = 8
    is_signed: ClassVar[bool] = False

    @property
    def values(self) -> np.ndarray:
        words = np.arange(256, dtype=np.int32) + _LEAST_WORD << 20
        return np.where(np.arange(256) == 0, np.float32(0), words.view(np.float32))

    def encode(self, x: jax.Array, noise: jax.Array | None = None) -> jax.Array:
        # Code and sign, exponent and the first three bits of the mantissa differ by a constant.
        words = jnp.minimum(jnp.maximum(lax.bitcast_convert_type(x, jnp.int32), 0), _ONE)
        if noise is None:
            rounded = words + (2**19 - 1)
        else:
            rounded = words + (noise.astype(jnp.int32) << (20 - 8 * noise.dtype.itemsize))
        codes = jnp.maximum((rounded >> 20) - _LEAST_WORD, (words > 0).astype(jnp.int32))
        return codes.astype(jnp.uint8)

    def decode(self, codes: jax.Array) -> jax.Array:
        words = codes.astype(jnp.int32) + _LEAST_WORD << 20
        return jnp.where(codes == 0, np.float32(0), lax.bitcast_convert_type(words, jnp.float32))


_ONE = 127 << 23  # the bits of 1
_LEAST_WORD = (_ONE >> 20) - 255  # what the first 12 bits of float32 are for code 0

DYNAMIC = DynamicCode(8, is_signed=True)
DYNAMIC_UNSIGNED = DynamicCode(8, is_signed=False)
UNSIGNED_FLOAT = UnsignedFloatCode()


def _is_above(magnitude: jax.Array, is_negative: jax.Array, border: float) -> jax.Array:
    """Compares bits of float32 with a number that float32 may lack; where negative, equal is above."""
    word = np.float32(border).view(np.int32)
    if np.float32(border) == border:
        return magnitude + is_negative.astype(jnp.int32) > word
    return magnitude > (word if np.float32(border) < border else word - 1)


# The ends of a decade's equal intervals, k / 128 of the way from .1 to 1 in units of 2**-30. Both halves are counted
# from their ends, as PyTorch does: from float32's .1, and from 1.
_STEP, _LOWER_START, _UPPER_START = 7549747, 107374184, 107374208
_UNIT = np.float32(2.0**-31)  # of the sum of two ends


def _interpolate(place: jax.Array, tens: jax.Array) -> jax.Array:
    """The sum of an interval's ends, times a power of ten; its place is float32's mantissa of `place`."""
    words = lax.bitcast_convert_type(jnp.maximum(place, 1).astype(jnp.float32), jnp.int32)
    start = (words >> 16) & 127
    length = 128 >> jnp.minimum((words >> 23) - 127, 31)
    return (_find_end(start) + _find_end(start + length)) * tens


def _find_end(k: jax.Array) -> jax.Array:
    # An integer of 30 bits, which conversion rounds to nearest.
    return (k * _STEP + jnp.where(k < 64, np.int32(_LOWER_START), np.int32(_UPPER_START))).astype(jnp.float32)


def _find_values_in_numpy(place: np.ndarray, first: int, count: int) -> np.ndarray:
    exponent = np.floor(np.log2(place)).astype(int)
    start = (place << (7 - exponent)) & 127
    ends = [
        (k * _STEP + np.where(k < 64, _LOWER_START, _UPPER_START)).astype(np.float32)
        for k in (start, start + (128 >> exponent))
    ]
    tens = (10.0 ** (exponent - exponent[0] + 1 - count)).astype(np.float32) * _UNIT
    return (ends[0] + ends[1]) * tens
