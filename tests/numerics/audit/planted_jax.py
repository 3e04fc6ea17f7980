"""Faults in plain JAX: matmuls, promotions, sums and casts."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from planted import bf16, f16, f32, ints, planted


def wide(x):
    return x.astype(jnp.float32)


def half(x):
    return x.astype(jnp.bfloat16)


ZERO = np.float32(0)


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


@planted(bf16(4, 8))
class numbers_that_the_program_counts:
    def faulty(x):
        return x * jnp.arange(8.0)  # fault: accidental-promotion

    def clean(x):
        return x * jnp.arange(8, dtype=x.dtype)


@planted(bf16(4, 8))
class table_that_the_program_computes:
    def faulty(x):
        angles = jnp.linspace(0, 1, 8) ** 2 * jnp.pi
        return x + jnp.cos(angles)  # fault: accidental-promotion

    def clean(x):
        angles = jnp.linspace(0, 1, 8) ** 2 * jnp.pi
        return x + half(jnp.cos(angles)) + half(jnp.cos(angles) * wide(x))  # meant


@planted(bf16(4, 8), jax.eval_shape(jax.random.key, 0))
class noise_of_default_dtype:
    def faulty(x, key):
        return x + 0.1 * jax.random.normal(key, x.shape)  # fault: accidental-promotion

    def clean(x, key):
        return x + 0.1 * jax.random.normal(key, x.shape, x.dtype)


@planted(bf16(4, 8), ints(4))
class mask_of_default_dtype:
    def faulty(x, tokens):
        mask = (tokens != 0).astype(jnp.float32)
        return x * mask[:, None]  # fault: accidental-promotion

    def clean(x, tokens):
        return x * half(tokens != 0)[:, None] + x * jax.nn.one_hot(tokens, 8, dtype=x.dtype)


@planted(bf16(4, 8), ints(4))
class labels_of_default_dtype:
    def faulty(x, labels):
        return x * jax.nn.one_hot(labels, 8)  # fault: accidental-promotion

    def clean(x, labels):  # what is computed from numbers in half is float32 for a reason
        return x * jax.nn.one_hot(labels, 8, dtype=x.dtype), half(x * jnp.exp(wide(x)))


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


@planted(bf16(1, 64, 64, 3))
class average_pooling_in_half:
    def faulty(x):
        return lax.reduce_window(x, half(ZERO), lax.add, (1, 64, 64, 1), (1, 1, 1, 1), "VALID")  # fault: half-reduction

    def clean(x):
        return half(lax.reduce_window(wide(x), ZERO, lax.add, (1, 64, 64, 1), (1, 1, 1, 1), "VALID"))


@planted(f16(1, 8, 8, 3))
class windows_and_a_function_that_rounds:
    def faulty(x):
        return lax.reduce_window(  # fault: half-reduction
            x, np.float16(1), lambda a, b: (wide(a) * wide(b)).astype(a.dtype), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
        )

    def clean(x):
        larger = lambda a, b: jnp.where(jnp.abs(a) > jnp.abs(b), a, b)
        return lax.reduce_window(x, np.float16(0), larger, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@planted(bf16(16, 8))
class reduction_by_a_function:
    def faulty(x):
        return lax.reduce(x, half(ZERO), lambda a, b: a + b, (0,))  # fault: half-reduction

    def clean(x):
        return lax.reduce(x, half(-np.float32("inf")), lax.max, (0,))


@planted(bf16(16))
class count_by_windows_in_half:
    def faulty(x):
        return lax.reduce_window(half(x > 0), half(ZERO), lax.add, (16,), (1,), "VALID")  # fault: half-reduction

    def clean(x):
        return half(lax.reduce_window((x > 0).astype(int), 0, lax.add, (16,), (1,), "VALID"))


@planted(bf16(1, 9, 9, 3))
class overlapping_max_pooling_in_the_backward_pass:
    def faulty(x):
        def loss(x):
            return jnp.sum(wide(nn.max_pool(x, (3, 3), (2, 2))) ** 2)  # fault: half-reduction

        return jax.grad(loss)(x)

    def clean(x):
        def loss(x):
            pooled = nn.max_pool(nn.max_pool(wide(x), (3, 3), (2, 2)), (2, 2), (2, 2))
            return jnp.sum(wide(nn.max_pool(half(pooled), (2, 2), (2, 2))) ** 2)  # each number in one window

        return jax.grad(loss)(x)


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
