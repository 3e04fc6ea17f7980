"""The steps of a product of narrow numbers that one platform computes otherwise than another.

On an H100 a product's kernel scales its sums by what entered the program alone: `GemmFusion` of XLA takes no operand
that was computed in it, and a row's scale is. Sums in float32 would be written and scaled by the next kernel. So they
are rounded to bfloat16 before the scales, and a barrier keeps XLA from undoing that. Magnitudes are compared as
integers: XLA may write the `select` of a nan to memory before its maximum. A TPU fuses both scales into the product,
and writes more for integers (1.474 for 1.375, two blocks); a CPU gains nothing from either.

Bytes accessed by the forward pass of a GPT of width 1024 and one block over those in bfloat16, weights stored in int8,
jax 0.10.2, by form of the product:

| | H100 | v5e |
|---|---|---|
| sums in float32, a `select` for nans | 1.285 | 1.333 |
| sums in bfloat16 behind a barrier, magnitudes as integers | 1.049 | |
| bfloat16 products of the int8 numbers, which do not pay for losing the rate of int8 | 1.262 | 1.322 |
| a barrier before inputs are rounded, which writes each of them once more | | 1.306 |

Empty cells were not measured.

On a CPU a product in blocks is one of bfloat16 into float32. Where an operand or the result is transposed, XLA makes
one operation of both, for which it then may find no kernel: "Unsupported element type for DotThunk::Execute: BF16 x
BF16 = F32" in 18 of 48 sizes with a transposed result, jax 0.10.2 and 0.12, whatever the level of optimization.
Barriers around the product keep them apart.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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


@functools.partial(jax.jit, inline=True)
def narrow_sums(sums: jax.Array) -> jax.Array:
    """Rounds sums of integers that end in bfloat16, float32, to bfloat16 and back, on CUDA; elsewhere they stay.

    The result is then rounded twice, before the scales and after them: by at most 2**-7 of itself, not 2**-8.

    >>> narrow_sums(jnp.float32([258, 259])).tolist()  # on a CPU
    [258.0, 259.0]
    """
    return lax.platform_dependent(sums, cuda=_round_behind_barrier, default=lambda sums: sums)


def _round_behind_barrier(sums: jax.Array) -> jax.Array:
    return lax.optimization_barrier(sums.astype(jnp.bfloat16)).astype(jnp.float32)


@functools.partial(jax.jit, inline=True)
def fence_on_cpu(arrays: Any) -> Any:
    """Keeps XLA on a CPU from making one operation of what computes arrays and what they are for; elsewhere nothing.

    Args:
      arrays: a tree of them.

    >>> fence_on_cpu(jnp.float32([258, 259])).tolist()
    [258.0, 259.0]
    """
    return lax.platform_dependent(arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays)
