"""The zoo: results, constants, dtypes and numbers of every sort."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from specimen import Zoo

VALUES = Zoo()

TABLE = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)


@VALUES.specimen((4, 4))
def closed_over_constants(x):
    mask = jnp.tril(jnp.ones((4, 4), bool))
    return jnp.where(mask, x @ TABLE, jnp.finfo(jnp.float32).min).max() + TABLE.sum()


@VALUES.specimen((4, 4), jnp.arange(4), jnp.array([True, False, True, False]))
def integers_and_truth_values(x, i, flags):
    return jnp.where(flags, x[i[::-1]], 0), (i * 2) // 3, ~flags, jnp.sum(flags)


@VALUES.specimen((4, 4), (4, 4))
def complex_numbers(x, y):
    z = lax.complex(x, y) @ lax.complex(y, x)
    return z.real, z.imag, jnp.abs(z)


@VALUES.specimen((0, 4), (4, 3))
def empty_arrays(x, w):
    return x @ w, jnp.sum(x), jnp.zeros((0,))


@VALUES.specimen((4, 4))
def constants_returned(x):
    return 1.0, TABLE, x.sum(), 3, True


@VALUES.specimen((4, 4), (4, 4))
def result_twice(x, w):
    h = x @ w
    return {"a": h, "b": [h, x, None, x], "c": ()}


@VALUES.specimen((4, 4))
def dtypes_by_name(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits, lax.bitcast_convert_type(bits & -256, jnp.float32), x.astype(jnp.int8), x.view(jnp.uint32)


@VALUES.specimen((4, 4), (4, 4))
def casts_of_the_author(x, w):
    half = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return half * 2, lax.reduce_precision(x, 8, 7), x.astype(jnp.float16)


@VALUES.specimen((4, 4))
def linear_algebra(x):
    a = x @ x.T + 4 * jnp.eye(4)
    return jnp.linalg.cholesky(a), jnp.linalg.solve(a, x), jnp.linalg.inv(a), jnp.linalg.slogdet(a)[1]


@VALUES.specimen(jax.random.key(0), (4, 4), differentiable=False)
def random_numbers(key, x):
    a, b = jax.random.split(key)
    kept = jax.random.bernoulli(a, 0.5, x.shape)
    return jax.random.normal(b, (3,)), jax.random.uniform(a), jnp.where(kept, x, 0), jax.random.key_data(b), b


@VALUES.specimen(jax.random.key(0), (4, 4))
def typed_key_as_a_carry(key, x):
    def body(key, x):
        key, sub = jax.random.split(key)
        return key, x * jax.random.truncated_normal(sub, -1, 1, x.shape)

    return lax.scan(body, key, x)[1]


@VALUES.specimen((2, 8, 8, 3), (3, 3, 3, 4))
def convolution_and_pooling(x, kernel):
    y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return pooled, lax.reduce_window(y, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@VALUES.specimen((6, 4), jnp.array([0, 0, 1, 2, 2, 2]))
def scatters_and_gathers(x, ids):
    sums = jax.ops.segment_sum(x, ids, 3)
    return sums, jnp.zeros((3, 4)).at[ids].max(x), x[ids], lax.dynamic_slice(x, (ids[1], 0), (2, 4))


@VALUES.specimen((4, 4), (4, 4))
def einsum_of_a_chosen_type(x, w):
    product = jnp.einsum("ij,kj->ik", x, w, preferred_element_type=jnp.float32, precision="highest")
    return product, lax.dot(x, w, precision=lax.DotAlgorithmPreset.F32_F32_F32)
