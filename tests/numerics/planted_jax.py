"""Faults in plain JAX: matmuls, promotions, sums and casts."""


import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from planted import bf16, f16, f32, ints, planted


def wide(x):
    return x.astype(jnp.float32)


def half(x):
    return x.astype(jnp.bfloat16)


@planted(bf16(4, 8), f32(8, 2))
class float32_weight_in_matmul:
    def faulty(x, w):
        return jnp.tanh(x) @ wide(w)  # fault: float32-matmul # fault: accidental-promotion

    def clean(x, w):
        return jnp.tanh(x) @ half(w)


@planted(bf16(4, 8), f32(8, 2))
class widened_matmul:
    def faulty(x, w):
        y = wide(jnp.tanh(x))
        return half(y @ w)  # fault: float32-matmul

    def clean(x, w):
        return jnp.tanh(x) @ half(w)


@planted(bf16(1, 8, 8, 3), f32(3, 3, 3, 4))
class float32_convolution:
    def faulty(x, w):
        return lax.conv_general_dilated(  # fault: float32-matmul
            wide(x), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def clean(x, w):
        return lax.conv_general_dilated(x, half(w), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@planted(bf16(4, 8), f32(8, 2))
class mixed_matmul_in_the_backward_pass:
    def faulty(x, w):
        def loss(w):
            return jnp.sum(jnp.dot(x, half(w), preferred_element_type=jnp.float32) ** 2)  # fault: float32-matmul

        return jax.grad(loss)(w)

    def clean(x, w):
        return jax.grad(lambda w: jnp.sum(wide(x @ half(w)) ** 2))(w)


@planted(bf16(3, 4, 8), f32(8, 8))
class float32_matmul_in_a_scan:
    def faulty(x, w):
        def body(carry, x):
            return jnp.tanh(carry @ w), None  # fault: float32-matmul

        return lax.scan(body, wide(x[0]), x)[0]

    def clean(x, w):
        return lax.scan(lambda carry, x: (jnp.tanh(carry @ half(w)), None), x[0], x)[0]


@planted(bf16(4, 8))
class numpy_scalar:
    def faulty(x):
        return x * np.float32(0.5)  # fault: accidental-promotion

    def clean(x):
        return x * 0.5


@planted(bf16(4, 8))
class numpy_array:
    def faulty(x):
        return x + np.arange(8, dtype=np.float32)  # fault: accidental-promotion

    def clean(x):
        return x + np.arange(8).astype(x.dtype)


@planted(bf16(4, 8))
class constant_of_default_dtype:
    def faulty(x):
        return jnp.maximum(x, jnp.zeros(8))  # fault: accidental-promotion

    def clean(x):
        return jnp.maximum(x, jnp.zeros(8, x.dtype))


@planted(f16(4, 8), f32(8))
class float32_bias:
    def faulty(x, b):
        y = x * 2
        return y + b  # fault: accidental-promotion

    def clean(x, b):
        y = x * 2
        return y + b.astype(y.dtype)


@planted(bf16(4, 8), f32(4, 8))
class where_with_a_float32_branch:
    def faulty(x, y):
        return jnp.where(x > 0, x, y)  # fault: accidental-promotion

    def clean(x, y):
        return jnp.where(x > 0, x, half(y))


@planted(bf16(16, 8))
class sum_in_half:
    def faulty(x):
        return lax.reduce_sum(x, axes=(0,))  # fault: half-reduction

    def clean(x):
        return jnp.sum(x, 0)  # in float32


@planted(bf16(16, 8))
class einsum_that_only_sums:
    def faulty(x):
        return jnp.einsum("ij->j", x)  # fault: half-reduction

    def clean(x):
        return jnp.einsum("ij->j", wide(x))


@planted(f16(16))
class product_in_half:
    def faulty(x):
        return jax.jit(lambda x: lax.reduce_prod(x, axes=(0,)))(x)  # fault: half-reduction

    def clean(x):
        return jax.jit(jnp.prod)(x)


@planted(bf16(16, 4), ints(16))
class segment_sum_in_half:
    def faulty(x, segments):
        return jax.ops.segment_sum(x, segments, 3)  # fault: half-reduction

    def clean(x, segments):
        return jax.ops.segment_sum(wide(x), segments, 3)


@planted(bf16(16, 4))
class running_sum_in_half:
    def faulty(x):
        def body(total, row):
            return total + row, None  # fault: half-reduction

        return lax.scan(body, jnp.zeros(4, x.dtype), x)[0]

    def clean(x):
        return lax.scan(lambda total, row: (total + wide(row), None), jnp.zeros(4), x)[0]


@planted(bf16(16))
class cumsum_in_half:
    def faulty(x):
        return jnp.cumsum(x)  # fault: half-cumulative

    def clean(x):
        return half(jnp.cumsum(wide(x)))


@planted(f16(4, 16))
class cumprod_in_half_under_vmap:
    def faulty(x):
        return jax.vmap(jnp.cumprod)(x)  # fault: half-cumulative

    def clean(x):
        return jax.vmap(lambda row: jnp.cumprod(wide(row)).astype(row.dtype))(x)


@planted(bf16(4, 8))
class round_trip:
    def faulty(x):
        y = wide(x).reshape(8, 4)
        return y.T.astype(x.dtype)  # fault: round-trip-cast

    def clean(x):
        return half(jnp.exp(wide(x)).reshape(8, 4).T)


@planted(bf16(4, 8))
class round_trip_out_of_a_checkpoint:
    def faulty(x):
        y = jax.checkpoint(lambda x: wide(jnp.tanh(x)))(x)
        return y.astype(x.dtype) * 2  # fault: round-trip-cast

    def clean(x):
        return jax.checkpoint(jnp.tanh)(x) * 2
