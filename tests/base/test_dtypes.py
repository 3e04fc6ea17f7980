"""Law 1: any spelling of a dtype is that dtype."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_policy as jmp

SPELLINGS = {
    "bfloat16": ["bf16", "bfloat16", " BFloat16 ", jnp.bfloat16, ml_dtypes.bfloat16, np.dtype("bfloat16")],
    "float16": ["f16", "fp16", "float16", "F16", jnp.float16, np.float16, np.dtype("float16")],
    "float32": ["f32", "fp32", "full", "Full", jnp.float32, np.float32, np.dtype("float32"), np.dtype(">f4")],
    "float64": ["f64", "fp64", "float64", jnp.float64, np.float64, np.dtype("float64")],
}
# JAX 0.10 knows less than ml_dtypes has.
SCALARS = [kind for kind in vars(ml_dtypes).values() if isinstance(kind, type) and issubclass(kind, np.generic)]
FORMATS = [kind.__name__ for kind in SCALARS if jnp.issubdtype(kind, jnp.floating)]


def cast(spelling):
    return jmp.cast_floating(np.ones(1, np.float16 if spelling != "float16" else np.float32), spelling).dtype


@pytest.mark.parametrize(("name", "spelling"), [(name, s) for name, all_ in SPELLINGS.items() for s in all_])
def test_every_spelling_is_one_dtype(name, spelling):
    assert jmp.get_policy(spelling) is jmp.get_policy(name)
    assert jmp.get_policy(spelling).param_dtype == np.dtype(name)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_of_ml_dtypes_is_known_by_name_and_by_type(name):
    kind = getattr(ml_dtypes, name)
    assert cast(name) == cast(kind) == np.dtype(kind)
    assert jmp.get_policy(name).name == name


@pytest.mark.parametrize(
    "spec",
    [
        "", "bflaot16", "int32", "float", "float128", "complex64", "bool", "f", "none",
        float, int, 3, 1.5, object(), [], {}, jnp.int32, np.bool_, np.complex64, np.dtype("int32"),
        np.dtype([("a", "f4")]), np.floating, np.generic, np.dtype, np.ones(2), np.float32(1),
        jax.random.key(0).dtype, jnp.ones, type,
    ],
)  # fmt: skip
def test_anything_else_is_a_value_error_that_begins_with_unknown_dtype(spec):
    with pytest.raises(ValueError, match=r"^Unknown dtype .*For example: 'bfloat16'\.$"):
        jmp.cast_floating(np.ones(1), spec)


def test_the_nearest_name_and_its_place_or_all_names_are_offered():
    with pytest.raises(ValueError, match=r"^Unknown dtype 'bflaot16' in 'c=bflaot16'.*Did you mean 'bfloat16'\?"):
        jmp.get_policy("p=f32,c=bflaot16")
    with pytest.raises(ValueError, match=r"^Unknown dtype 'xyz'\. Known are .*'bfloat16', "):
        jmp.cast_floating(np.ones(1), "xyz")


def test_half_is_float16_except_on_tpu(monkeypatch):
    assert jmp.half_dtype() is jnp.float16
    assert cast("half") == np.float16
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert jmp.half_dtype() is jnp.bfloat16
    assert cast(" Half ") == jnp.bfloat16
    assert jmp.get_policy("half").name == "bfloat16"
    assert jmp.cast_to_half(np.float32(1)).dtype == jnp.bfloat16
