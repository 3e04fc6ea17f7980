"""The steps of an integer product that one platform computes otherwise than another, to the same bits.

An H100 multiplies in a kernel that scales and narrows its sums by what entered the program, a weight's scale, but not
by what was computed in it, a row's scale (`GemmFusion` of XLA takes no other operand but a parameter). The sums are
narrowed between the two scales, so that the kernel writes bfloat16; a barrier keeps the second scale from undoing it.
There magnitudes are compared as integers, too: XLA writes the `select` of a nan to memory before some sums. A TPU
fuses both scales into the product, and the `select` into the maximum; it writes more for integers, and with barriers.

Bytes accessed by the forward pass of a GPT of width 1024 over those in bfloat16, weights stored in int8, jax 0.10.2:

| | H100, one block | two blocks | v5e, one block |
|---|---|---|---|
| scales in float32, `select` | 1.285 | 1.287 | 1.333 |
| narrowed behind a barrier, `select` | | | |
| narrowed behind a barrier, integers | 1.049 | 1.051 | |
| bfloat16 product of the int8 numbers | 1.262 | | 1.322 |
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .._rounding import round_as_float32
from ._numbers import measure_amax


@functools.partial(jax.jit, static_argnums=1, inline=True)  # what runs without a jit compiles its branches once
def measure_row_amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Measures the largest magnitude of each row, as `measure_amax` does.

    Args:
      x: floating, any shape.
      axes: the axes to reduce, which stay with length 1.

    Returns:
      float32, infinite where a number is not finite.

    >>> measure_row_amax(jnp.array([[1.0, -3.0], [jnp.nan, 0.0]]), (1,)).tolist()
    [[3.0], [inf]]
    """
    forms = (_measure_by_bits, measure_amax)
    by_bits, by_select = (functools.partial(form, axes=axes) for form in forms)
    return lax.platform_dependent(x, cuda=by_bits, default=by_select)


def _measure_by_bits(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Compares magnitudes by their bits: in order, and a nan above infinity."""
    if not x.size:
        return measure_amax(x, axes)
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    amax = lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)
    return lax.select(jnp.isnan(amax), lax.full_like(amax, jnp.inf), amax)


@functools.partial(jax.jit, static_argnums=1, inline=True)
def narrow_sums(sums: jax.Array, is_stored: bool) -> jax.Array:
    """Rounds sums that have the weight's scale, and not yet the row's, to bfloat16 numbers in float32.

    Args:
      sums: float32.
      is_stored: whether the weight's scale entered the program, so that a kernel may have scaled by it.
    """
    if not is_stored:
        return _round(sums)
    return lax.platform_dependent(sums, cuda=_round_behind_barrier, default=_round)


def _round(sums: jax.Array) -> jax.Array:
    return round_as_float32(sums, jnp.bfloat16)


def _round_behind_barrier(sums: jax.Array) -> jax.Array:
    return lax.optimization_barrier(sums.astype(jnp.bfloat16)).astype(jnp.float32)
