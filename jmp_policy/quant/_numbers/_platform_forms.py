"""Steps of a quantized matmul that XLA fuses well in different forms on different platforms.

- H100: the kernel of an int8 matmul cannot fuse scales that the same program computes, and would write float32 sums.
  They are rounded to bfloat16 before the scales, behind a barrier. Magnitudes are compared as integers, because XLA
  may write the `select` of a nan to memory before its maximum.
- TPU: both scales fuse into the matmul, and the integer form writes more.
- CPU: XLA merges a bfloat16 matmul into float32 with a transpose of its operand or result, and then may have no kernel
  ("Unsupported element type for DotThunk::Execute: BF16 x BF16 = F32", jax 0.10.2 and 0.12). Barriers prevent that.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ._numbers import measure_amax


@functools.partial(jax.jit, static_argnums=1, inline=True)  # eager calls then compile the branches once
def measure_row_amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest magnitude over `axes`, as `measure_amax` does."""
    by_bits, by_select = functools.partial(_measure_by_bits, axes=axes), functools.partial(measure_amax, axes=axes)
    return lax.platform_dependent(x, cuda=by_bits, default=by_select)


def _measure_by_bits(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Compares magnitudes by their bits, where a nan is larger than infinity."""
    if not x.size:
        return measure_amax(x, axes)
    bits = lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
    amax = lax.bitcast_convert_type(jnp.max(bits, axis=axes, keepdims=True), jnp.float32)
    return lax.select(jnp.isnan(amax), lax.full_like(amax, jnp.inf), amax)


@functools.partial(jax.jit, inline=True)
def narrow_sums(sums: jax.Array) -> jax.Array:
    """Rounds float32 sums to bfloat16 and back on CUDA; the output is then rounded twice (at most 2**-7)."""
    return lax.platform_dependent(sums, cuda=_round_behind_barrier, default=lambda sums: sums)


def _round_behind_barrier(sums: jax.Array) -> jax.Array:
    return lax.optimization_barrier(sums.astype(jnp.bfloat16)).astype(jnp.float32)


@functools.partial(jax.jit, inline=True)
def fence_on_cpu(arrays: Any) -> Any:
    """On CPU, inserts a barrier so that XLA does not fuse the producers of `arrays` into their consumer."""
    return lax.platform_dependent(arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays)
