"""Rounding by hand is the rounding of ml_dtypes, and splitting loses no bit."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import cost

from jmp_policy import quant

# Steps of optimizers and quantized layers would take a program for each way to round.
from jmp_policy._base import (
    join_float32,
    keep_rounding,
    round_as_float32,
    round_stochastically,
    round_to_half,
    split_float32,
)

HALVES = ["bfloat16", "float16"]
ALL_BITS = jnp.arange(2**16, dtype=jnp.uint16)


def make_words():
    """Bit patterns of float32: random ones, ties, subnormals, zeros, infinities, and numbers beyond bfloat16."""
    rng = np.random.default_rng(20261121)
    ties = rng.integers(0, 2**16, 2**14, dtype=np.uint32) << 16 | 0x8000
    near_f16 = (rng.uniform(2.0**-26, 2.0**-13, 2**14).astype(np.float32)).view(np.uint32)
    edges = [0, 0x80000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 1, 0x80000001, 0x7F7F8000, 0x477FF000]
    drawn = rng.integers(0, 2**32, 2**16, dtype=np.uint32)
    words = np.concatenate([drawn, ties, near_f16, np.array(edges, np.uint32)])
    return words[~np.isnan(words.view(np.float32))]


WORDS = make_words()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES)
def test_rounded_is_the_nearest_half_precision_number_which_no_rounding_changes(dtype):
    x = WORDS.view(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(jnp.dtype(dtype))
    narrow = jax.jit(round_to_half, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(np.asarray(narrow).view(np.uint16), expected.view(np.uint16))
    wide = jax.jit(round_as_float32, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(wide, expected.astype(np.float32))
    for bits in (0, 2**15, 2**16 - 1):
        again = round_stochastically(wide, dtype, jnp.full(x.shape, bits, jnp.uint16))
        np.testing.assert_array_equal(np.asarray(again).view(np.uint16), expected.view(np.uint16))
    assert np.isnan(round_stochastically(jnp.full(2**16, jnp.nan), dtype, ALL_BITS).astype(jnp.float32)).all()


@pytest.mark.slow
def test_split_float32_is_the_nearest_bfloat16_and_joins_to_every_bit():
    x = WORDS.view(np.float32)
    high, low = jax.jit(split_float32)(x)
    assert (high.dtype, low.dtype) == (jnp.bfloat16, jnp.uint16)
    np.testing.assert_array_equal(np.asarray(jax.jit(join_float32)(high, low)).view(np.uint32), WORDS)
    is_far = np.abs(x) >= 3e38
    high, nearest = (np.where(is_far, 0, np.asarray(y, np.float64)) for y in (high, round_as_float32(x, "bfloat16")))
    wide = np.where(is_far, 0, x.astype(np.float64))
    np.testing.assert_array_equal(np.abs(high - wide), np.abs(nearest - wide))  # ties are as near on either side
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    high, low = split_float32(nans)
    assert np.isnan(np.asarray(high).astype(np.float32)).all()
    assert np.isnan(join_float32(high, low)).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "dtype"), [(1.004, "bfloat16"), (-1.0001, "float16"), (3e-6, "float16"), (65000.3, "bfloat16")]
)
def test_stochastic_rounding_is_right_on_average_over_all_bits(number, dtype):
    x = jnp.full(2**16, number, jnp.float32)
    got = np.asarray(round_stochastically(x, dtype, ALL_BITS)).astype(np.float64)
    below, above = np.unique(got)
    assert below <= number <= above
    # The chance is a multiple of 2**-16 (bfloat16) or 2**-13 (float16) of the distance between the neighbours.
    assert abs(got.mean() - np.float64(x[0])) <= (above - below) * 2.0**-13


@pytest.mark.slow
def test_both_halves_are_of_one_value_where_xla_fuses_and_optimizes_nothing():
    """Fused twice, the sum had a fused multiply-add in one half alone: at this level in 60 of 100,000 numbers."""

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def step(high, low, grad):
        return split_float32(join_float32(high, low) + grad.astype(jnp.float32) * -0.1)

    start, *grads = (jax.random.normal(jax.random.key(i), (100_000,), jnp.bfloat16) for i in range(4))
    halves = start, jnp.zeros_like(start, jnp.uint16)
    for grad in grads:
        halves = step(*halves, grad)
    want = np.asarray(start, np.float64) - sum(np.asarray(grad, np.float64) for grad in grads) * np.float32(0.1)
    error = np.abs(np.asarray(join_float32(*halves), np.float64) - want)
    # Each step rounds a product and a sum of numbers below 8 to float32, by 2**-22 at most, and a factor of two is
    # spared. Halves of two values join to a number that is off by a unit of bfloat16: by 0.004 in the worst place.
    assert error.max() < 6 * 2**-21


def barriers(fun, platform):
    text = jax.export.export(jax.jit(fun), platforms=[platform])(jnp.ones((16, 32))).mlir_module()
    return re.findall(r"stablehlo.optimization_barrier %\w+ : tensor<[0-9x]+x(\w+)>", text)


@pytest.mark.parametrize(
    ("platform", "found"), [("cuda", ["f8E4M3FN"]), ("rocm", ["f8E4M3FN"]), ("cpu", []), ("tpu", [])]
)
def test_a_cast_that_is_cast_back_is_kept_on_gpus_by_a_barrier(platform, found):
    cast = lambda x: keep_rounding(x.astype(jnp.float8_e4m3fn)).astype(jnp.float32)
    assert barriers(cast, platform) == found


@pytest.mark.parametrize("format", ["mxfp8/8", "float8(recipe=current,min_size=0)"])
def test_operands_are_rounded_on_gpus_although_they_are_cast_up_for_the_matmul(format):
    """XLA for GPUs dropped the casts: elements were scaled and not rounded, and statistics of blocks were wrong."""
    rows = (((1,), (1,)), ((), ()))
    multiply = lambda x: quant.dot_general(x, x, rows, quantization=format)
    assert barriers(multiply, "cuda") == ["f8E4M3FN"] * 2


@pytest.mark.cpu("temporaries of XLA:CPU")
def test_a_split_needs_memory_for_its_value_alone():
    """A loop that made both halves needed as much again for its results."""
    step = lambda high, low, grad: split_float32(join_float32(high, low) + grad * -0.1)
    arrays = [jax.ShapeDtypeStruct((2**16,), dtype) for dtype in (jnp.bfloat16, jnp.uint16, jnp.float32)]
    assert cost(step, *arrays).temporaries <= 4.1 * 2**16
