"""Law 1: any spelling of a dtype is that dtype."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy._base import at_least_float32, did_you_mean, dtype_names, is_floating_dtype, parse_dtype

SPELLINGS = {
    "bfloat16": ["bf16", "bfloat16", " BFloat16 ", jnp.bfloat16, ml_dtypes.bfloat16, np.dtype("bfloat16")],
    "float16": ["f16", "fp16", "float16", "F16", jnp.float16, np.float16, np.dtype("float16")],
    "float32": ["f32", "fp32", "full", "Full", jnp.float32, np.float32, np.dtype("float32"), np.dtype(">f4")],
    "float64": ["f64", "fp64", "float64", jnp.float64, np.float64, np.dtype("float64")],
    "float8_e4m3fn": ["float8_e4m3fn", jnp.float8_e4m3fn, ml_dtypes.float8_e4m3fn, np.dtype("float8_e4m3fn")],
}

EXOTIC = [name for name in dtype_names() if name.startswith(("float4_", "float6_", "float8_"))]


@pytest.mark.parametrize(("name", "spelling"), [(name, s) for name, all_ in SPELLINGS.items() for s in all_])
def test_every_spelling_is_one_dtype(name, spelling):
    assert parse_dtype(spelling) is parse_dtype(name)
    assert hash(parse_dtype(spelling)) == hash(np.dtype(name))


@pytest.mark.parametrize("name", EXOTIC)
def test_every_format_of_ml_dtypes_is_known_by_name_and_by_type(name):
    assert parse_dtype(name) == parse_dtype(getattr(ml_dtypes, name)) == np.dtype(getattr(ml_dtypes, name))
    assert jmp.get_policy(name).name == name


def test_no_floating_format_of_ml_dtypes_is_missing():
    scalar_types = (getattr(ml_dtypes, name) for name in dir(ml_dtypes))
    floating = {t.__name__ for t in scalar_types if isinstance(t, type) and is_floating_dtype(t)}
    assert floating <= set(dtype_names())
    assert {"float8_e5m2", "float8_e4m3b11fnuz", "float8_e8m0fnu", "float4_e2m1fn"} <= floating


@pytest.mark.parametrize("spelling", dtype_names())
def test_every_offered_name_can_be_read(spelling):
    assert is_floating_dtype(parse_dtype(spelling))


@pytest.mark.parametrize(
    "spec",
    [
        "", "bflaot16", "int32", "float", "float128", "complex64", "bool", "f", "none",
        float, int, bool, 3, 1.5, object(), [], {}, jnp.int32, np.int8, np.bool_, np.complex64, np.dtype("int32"),
        np.dtype([("a", "f4")]), np.floating, np.inexact, np.generic, np.dtype, np.ones(2), np.float32(1),
        jax.random.key(0).dtype, jnp.ones, type,
    ],
)  # fmt: skip
def test_anything_else_is_a_value_error_that_begins_with_unknown_dtype(spec):
    with pytest.raises(ValueError, match=r"^Unknown dtype .*For example: 'bfloat16'\.$"):
        parse_dtype(spec)


def test_error_quotes_the_name_its_place_and_the_nearest_one():
    with pytest.raises(ValueError, match=r"^Unknown dtype 'bflaot16' in 'c=bflaot16'\. Did you mean 'bfloat16'\?"):
        parse_dtype("bflaot16", where=" in 'c=bflaot16'")


def test_nearest_name_or_all_of_them_are_offered():
    assert did_you_mean("Flaot16", ["float16", "bfloat16"]) == "Did you mean 'float16'?"
    assert did_you_mean("xyz", ["a", "b"]) == "Known are 'a', 'b'."


def test_half_is_float16_except_on_tpu(monkeypatch):
    assert jmp.half_dtype() is jnp.float16
    assert parse_dtype("half") == np.float16
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert jmp.half_dtype() is jnp.bfloat16
    assert parse_dtype(" Half ") == np.dtype("bfloat16")
    assert jmp.get_policy("half").name == "bfloat16"
    assert jmp.cast_to_half(np.float32(1)).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", dtype_names())
def test_numbers_are_scaled_in_float32_unless_wider(name):
    dtype = parse_dtype(name)
    assert at_least_float32(dtype) == (np.float64 if dtype == np.float64 else np.float32)
