"""What platforms compute otherwise: how far apart they are, and each platform its own form in an exported program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from quant_reference import TINY, edge_columns, fresh

from jmp_policy.quant import dot_general, quantize_array
from jmp_policy.quant._numbers import _measure_by_bits, _round_behind_barrier, measure_amax

ROWS = (((1,), (0,)), ((), ()))
X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 32)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_magnitudes_compared_by_bits_are_those_compared_as_numbers(dtype, axes):
    x = np.stack([*edge_columns(33).values(), fresh(33)])
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.concatenate([x, np.where(np.arange(33) == 7, bad, x[:1])])
    x = jnp.asarray(x, dtype)
    by_bits, by_select = jax.jit(lambda x: (_measure_by_bits(x, axes), measure_amax(x, axes)))(x)
    # A CPU flushes what is subnormal, of which no scale is made.
    np.testing.assert_array_equal(np.maximum(by_bits, TINY), np.maximum(by_select, TINY))
    assert np.isinf(by_bits).any()
    assert (by_bits.shape, by_bits.dtype) == (by_select.shape, by_select.dtype)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_rows_and_rows_of_nothing_are_measured_by_bits(shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    np.testing.assert_array_equal(_measure_by_bits(x, (1,)), measure_amax(x, (1,)))


@pytest.mark.slow
def test_a_result_rounded_twice_is_within_two_roundings():
    """Against float64; ties lie halfway between bfloat16 numbers from 256 on."""
    sums = np.concatenate([np.round(fresh(4096) * 1e5), np.arange(-300, 300, 0.5)]).astype(np.float32)
    scale = np.abs(fresh(sums.size)).astype(np.float32) + np.float32(0.1)
    narrow = jax.jit(_round_behind_barrier)(sums)
    np.testing.assert_array_equal(narrow, sums.astype(jnp.bfloat16).astype(np.float32))
    twice = np.float64(jnp.asarray(narrow * scale, jnp.bfloat16))
    exact = np.float64(sums) * np.float64(scale)
    np.testing.assert_allclose(twice, exact, rtol=2**-7 + 2**-15)
    assert not np.allclose(twice, exact, rtol=2**-8, atol=0)


def exported(weight, *platforms, dtype=jnp.bfloat16):
    quantization = None if weight is not W else "int8"
    multiply = lambda x, w: dot_general(x, w, ROWS, quantization=quantization)
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    return export.export(jax.jit(multiply), platforms=platforms)(x, weight).mlir_module()


def barriers(text):
    """The types of what stands behind barriers."""
    return re.findall(r"stablehlo\.optimization_barrier .*: (tensor<\S+>)", text)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [W, quantize_array(W, "int8")], ids=["floating", "stored"])
def test_an_exported_program_has_the_form_of_its_platform(weight):
    cuda, tpu = exported(weight, "cuda"), exported(weight, "tpu")
    assert barriers(cuda) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in cuda
    assert barriers(tpu) == []
    assert "stablehlo.bitcast_convert" not in tpu
    every = exported(weight, "cpu", "cuda", "tpu")
    assert barriers(every) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in every


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sums_stay_wide_for_results_in_other_dtypes(dtype):
    text = exported(quantize_array(W, "int8"), "cuda", dtype=dtype)
    assert barriers(text) == []


@pytest.mark.slow
def test_the_largest_sums_of_float16_do_not_overflow():
    x, w = jnp.full((1, 2048), 2.0**-7, jnp.float16), jnp.full((2048, 1), 2.0)
    product = dot_general(x, quantize_array(w, "int8"), ROWS)
    np.testing.assert_allclose(product, [[32]], rtol=2**-9)
