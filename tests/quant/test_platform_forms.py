"""What platforms compute otherwise: how far apart they are, and each platform its own form in an exported program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from quant_reference import TINY, edge_columns, fresh

from jmp_policy.quant import dot_general, quantize_array

# What only CUDA gets, which a machine without a GPU can run by its name alone.
from jmp_policy.quant._numbers import _measure_by_bits, measure_amax

ROWS = (((1,), (0,)), ((), ()))
X, W = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 64), (64, 32)))


@pytest.mark.parametrize(("dtype", "axes"), [("float16", (1,)), ("bfloat16", (0, 1))])
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
    for empty in (jnp.zeros((0, 4), dtype), jnp.zeros((4, 0), dtype)):
        np.testing.assert_array_equal(_measure_by_bits(empty, (1,)), measure_amax(empty, (1,)))


def exported(weight, *platforms, dtype=jnp.bfloat16):
    quantization = None if weight is not W else "int8"
    multiply = lambda x, w: dot_general(x, w, ROWS, quantization=quantization)
    x = jax.ShapeDtypeStruct(X.shape, dtype)
    return export.export(jax.jit(multiply), platforms=platforms)(x, weight).mlir_module()


def barriers(text):
    """The types of what stands behind barriers."""
    return re.findall(r"stablehlo\.optimization_barrier .*: (tensor<\S+>)", text)


@pytest.mark.parametrize("is_stored", [False, True])
def test_an_exported_program_has_the_form_of_its_platform(is_stored):
    weight = quantize_array(W, "int8") if is_stored else W
    cuda, tpu = exported(weight, "cuda"), exported(weight, "tpu")
    assert barriers(cuda) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in cuda
    assert barriers(tpu) == []
    assert "stablehlo.bitcast_convert" not in tpu
    every = exported(weight, "cpu", "cuda", "tpu")
    assert barriers(every) == ["tensor<8x32xbf16>"]
    assert "stablehlo.bitcast_convert" in every
    assert barriers(exported(weight, "cuda", dtype=jnp.float16)) == []  # results in other dtypes have wide sums


@pytest.mark.slow
def test_the_largest_sums_of_float16_do_not_overflow():
    x, w = jnp.full((1, 2048), 2.0**-7, jnp.float16), jnp.full((2048, 1), 2.0)
    product = dot_general(x, quantize_array(w, "int8"), ROWS)
    np.testing.assert_allclose(product, [[32]], rtol=2**-9)
