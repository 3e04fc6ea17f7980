"""What is NVFP4's own: the Hadamard transform and stochastic rounding of gradients, against NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.quant import NVFP4, dot_general

DIMENSIONS = (((1,), (0,)), ((), ()))
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NEAREST = NVFP4(min_size=0)
MIXED = NVFP4(min_size=0, hadamard=True)
NOISY = NVFP4(min_size=0, stochastic_rounding=True)


def draw(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


X, W, G = draw(48, 32), draw(32, 64, seed=1), draw(48, 64, seed=2)


@functools.partial(jax.jit, static_argnums=0)
def gradients(format, x, w, g, key=None):
    """The gradients of input and weight, where that of the product is `g`."""
    product = lambda x, w: dot_general(x, w, DIMENSIONS, quantization=format, key=key)
    return jax.vjp(product, x, w)[1](g)


def round_columns(x, block=16):
    """E2M1 in blocks of rows with a scale in e4m3, and one of the tensor, in NumPy."""
    x = np.asarray(x, np.float64)
    scale_of_tensor = 2688 / np.abs(x).max()
    blocks = x.reshape(-1, block, x.shape[-1])
    scale = (np.abs(blocks).max(1, keepdims=True) * scale_of_tensor / 6).astype(jnp.float8_e4m3fn).astype(np.float64)
    values = np.clip(blocks * scale_of_tensor / scale, -6, 6).astype(jnp.float4_e2m1fn).astype(np.float64)
    return (values * scale / scale_of_tensor).reshape(x.shape)


def mix(x, block=16):
    """Sylvester's matrix and the signs, written another way."""
    matrix = np.ones((1, 1))
    for _ in range(int(np.log2(block))):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    bits = [f"{n:04b}" for n in range(block)]
    signs = [(-1) ** ((b[:2] == "11") + (b[2:] == "11")) for b in bits]
    blocks = x.reshape(-1, block, x.shape[-1])
    return np.einsum("ij,bjf->bif", matrix * signs / np.sqrt(block), blocks).reshape(x.shape)


def relative_error(got, expected):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(48, "float32"), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((41, "float32"), (48, "bfloat16")))],
)
def test_the_gradient_of_a_weight_alone_is_of_mixed_operands_if_they_are_rows_in_whole_blocks_or_not(rows, dtype):
    x, w, g = (array.astype(dtype) for array in (X[:rows], W, G[:rows]))
    pad = lambda array: np.pad(np.asarray(array, np.float64), ((0, -rows % 16), (0, 0)))
    plain = round_columns(pad(x)).T @ round_columns(pad(g))
    mixed = round_columns(mix(pad(x))).T @ round_columns(mix(pad(g)))
    # A number that float32 sums to the other side of a tie moves by a step: few of 1,536, each in a sum of 48 products.
    bound = 2e-3 if dtype == "float32" else 5e-3  # the result is rounded to bfloat16
    (of_x, of_w), (also_of_x, mixed_of_w) = (gradients(format, x, w, g) for format in (NEAREST, MIXED))
    assert relative_error(of_w, plain) < bound
    assert relative_error(mixed_of_w, mixed) < bound
    assert relative_error(plain, mixed) > 0.05
    np.testing.assert_array_equal(of_x, also_of_x)


@pytest.mark.slow
def test_noise_is_right_on_average_and_rounding_to_nearest_is_not():
    # Inputs that e2m1 has, so that gradients alone are rounded; these lie on one side of a tie.
    x = jnp.asarray(np.random.default_rng(0).choice(E2M1[1:], (16, 16)).astype(np.float32)).at[0].set(6)
    g = (0.1 * draw(16, 64, seed=5) + 1.1).at[0].set(6)
    exact, draws = np.asarray(x, np.float64).T @ np.asarray(g, np.float64), 64
    drawn = np.stack([gradients(NOISY, x, W[:16], g, key)[1] for key in jax.random.split(jax.random.key(0), draws)])
    drawn = drawn.astype(np.float64)
    # Of 1,024 numbers none is beyond 5 of the standard errors of its mean, more than noise in steps of 2**-17 is off.
    assert np.all(np.abs(drawn.mean(0) - exact) < 5 * drawn.std(0) / np.sqrt(draws) + 1e-6 * np.abs(exact))
    assert relative_error(drawn.mean(0), exact) < relative_error(drawn[0], exact) / 4  # 1 / 8 is expected
    nearest = gradients(NEAREST, x, W[:16], g)[1]
    assert relative_error(nearest, exact) > 3 * relative_error(drawn.mean(0), exact)


@pytest.mark.slow
def test_the_forward_pass_draws_no_noise():
    nearest = dot_general(X, W, DIMENSIONS, quantization=NEAREST)
    for key in (jax.random.key(0), None):
        np.testing.assert_array_equal(dot_general(X, W, DIMENSIONS, quantization=NOISY, key=key), nearest)
