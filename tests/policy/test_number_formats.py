"""The table of number formats: their names, and what dtypes and policies say of them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_policy.policy import find_format, find_operand_format, parse_format, parse_quantization


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("bf16", "bfloat16"), (" Float16 ", "float16"), (jnp.float8_e5m2, "float8_e5m2"), ("int8", "int8"),
     ("INT8 / 64", "int8/64"), ("int4/128", "int4"), ("float4_e2m1fn", "float4_e2m1fn"),
     ("MXFP8 / 32", "mxfp8"), ("mxfp8_e5m2/16", "mxfp8_e5m2/16"), ("mxfp4", "mxfp4"), ("nvfp4/16", "nvfp4")],
)  # fmt: skip
def test_formats_have_one_name(spelling, name):
    assert parse_format(spelling).name == name
    assert parse_format(parse_format(spelling).name) == parse_format(spelling)
    scales = {"int": "float32", "mxf": "float8_e8m0fnu", "nvf": "float8_e4m3fn"}
    assert parse_format(spelling).scale == scales.get(name[:3], "")
    assert bool(parse_format(spelling).block) == (name[:3] in scales)


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("flaot16", "'float16'"), ("int5", "'int4'|'int8'"), ("int8/", "'int8"), ("int8/0", "'int8"), (["float16"], ""),
     ("mxfp6", "'mxfp[48]'"), ("nvfp4/0", "'nvfp4'"), ("mxfp8_e3m4", "'mxfp8_e5m2'"),
     ("float8_e8m0fnu", "'float8_e")],
)  # fmt: skip
def test_an_unknown_format_is_quoted_with_the_nearest(spelling, near):
    with pytest.raises(ValueError, match=rf"Unknown format .*({near}).*For example: 'float16'") as caught:
        parse_format(spelling)
    assert repr(spelling) in str(caught.value)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
def test_the_table_says_what_finfo_says(name):
    info, known = ml_dtypes.finfo(name), find_format(np.dtype(name))
    assert (known.eps, known.max) == (float(info.eps), float(info.max))
    exponents = known.min_exponent, known.least_exponent
    assert exponents == tuple(np.log2(float(each)) for each in (info.smallest_normal, info.smallest_subnormal))
    integers = find_format(np.dtype("int4"))
    assert (integers.max, integers.least_exponent, integers.has_integers) == (7, 0, True)


@pytest.mark.parametrize(
    ("quantization", "format", "of_gradients"),
    [("int8", "int8", "int8"), ("int4/128", "int4", "int4"), ("int4/64", "int4/64", "int4/64"),
     ("int4/-1", "int4", "int4"),
     ("float8/16(margin=1)", "float8_e4m3fn", "float8_e5m2"), ("mxfp8", "mxfp8", "mxfp8"),
     ("mxfp8/64(gradients=e5m2)", "mxfp8/64", "mxfp8_e5m2/64"), ("nvfp4(hadamard=true)", "nvfp4", "nvfp4")],
)  # fmt: skip
def test_operands_of_a_quantized_matmul_have_a_format(quantization, format, of_gradients):
    parsed = parse_quantization(quantization)
    assert find_operand_format(parsed).name == format
    assert find_operand_format(parsed, is_gradient=True).name == of_gradients
