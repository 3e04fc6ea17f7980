"""Formats that a tensor might be cast to, and what integers with a scale per block lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.measurement._measure import Meter, parse_format
from jmp_policy.measurement._what_if import FloatFormat, IntegerFormat

INTEGERS = {"int8": (127, 128), "int4": (7, 128), "int8/64": (127, 64), "int4/32": (7, 32)}


def round_with_numpy(x: np.ndarray, largest: int, block: int):
    """The number of integers that became zero, and the squared errors, with a scale as it is and a power of two."""
    x = x.reshape(-1, x.shape[-1])
    lost, errors = 0, np.zeros(2)
    for row in x:
        for first in range(0, len(row), block):
            part = row[first : first + block]
            scale = np.abs(part).max() * np.float32(1 / largest)
            if scale == 0:
                continue
            integers = np.rint(part / scale)
            lost += ((integers == 0) & (part != 0)).sum()
            power = np.float32(2.0 ** np.ceil(np.log2(np.float64(scale))))
            casts = (integers.astype(np.float64) * scale, np.rint(part / power).astype(np.float64) * power)
            errors += [((cast - part) ** 2).sum() for cast in casts]
    return lost, errors


@pytest.mark.parametrize("shape", [(), (7,), (300,), (5, 257), (3, 4, 64)], ids=str)
def test_integers_lose_what_rounding_by_blocks_loses(shape):
    rng = np.random.default_rng()
    x = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape), np.float32)
    x = np.where(rng.random(shape) < 0.2, np.float32(0), x)
    record = jax.jit(Meter(tuple(INTEGERS), False).measure)(jnp.asarray(x))
    counts, sums = np.asarray(record.counts)[0, 0], np.asarray(record.sums, np.float64)[0].sum(-1)
    sums *= 4.0 ** int(record.exponents[0])
    for i, (largest, block) in enumerate(INTEGERS.values()):
        lost, errors = round_with_numpy(np.atleast_1d(x), largest, block)
        assert counts[4 + 3 * i : 7 + 3 * i].tolist() == [lost, 0, 0]
        # The product of up to 127 and a scale is rounded in float32, and an error is up to half of the scale.
        np.testing.assert_allclose(sums[1 + 2 * i : 3 + 2 * i], errors, rtol=2.0**-14, atol=1e-12 * sums[0])


def test_integers_stand_between_floats_in_the_order_of_the_meter():
    x = jnp.asarray(np.random.default_rng().standard_normal(200), jnp.float32)
    mixed = jax.jit(Meter(("int8", "float16", "int4/32", "bfloat16")).measure)(x)
    floats = jax.jit(Meter(("float16", "bfloat16")).measure)(x)
    integers = jax.jit(Meter(("int8", "int4/32")).measure)(x)
    for i, (other, j) in enumerate([(integers, 0), (floats, 0), (integers, 1), (floats, 1)]):
        here, there = slice(4 + 3 * i, 7 + 3 * i), slice(4 + 3 * j, 7 + 3 * j)
        assert mixed.counts[..., here].tolist() == other.counts[..., there].tolist()
        here, there = slice(1 + 2 * i, 3 + 2 * i), slice(1 + 2 * j, 3 + 2 * j)
        np.testing.assert_allclose(mixed.sums[:, here], other.sums[:, there], rtol=1e-6, atol=1e-9)
    assert mixed.counts[..., 16:].tolist() == floats.counts[..., 10:].tolist()


def test_what_is_not_finite_is_left_out_of_a_block():
    x = jnp.asarray([np.inf, 1.0, -np.nan, 0.001, 0.0])
    record = jax.jit(Meter(("int8",), False).measure)(x)
    assert record.counts[0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert np.isfinite(record.sums).all()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**120])
def test_errors_of_integers_neither_overflow_nor_vanish(scale):
    x = np.random.default_rng().standard_normal(256).astype(np.float32)
    errors = []
    for y in (x, x * np.float32(scale)):
        sums = np.asarray(jax.jit(Meter(("int8",), False).measure)(jnp.asarray(y)).sums)[0].sum(-1)
        errors.append(sums[1:] / sums[0])
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("bf16", "bfloat16"), (" Float16 ", "float16"), (jnp.float8_e5m2, "float8_e5m2"), ("int8", "int8"),
     ("INT8 / 64", "int8/64"), ("int4/128", "int4"), ("float4_e2m1fn", "float4_e2m1fn")],
)  # fmt: skip
def test_formats_have_one_name(spelling, name):
    assert parse_format(spelling).name == name
    assert parse_format(parse_format(spelling).name) == parse_format(spelling)
    assert isinstance(parse_format(spelling), IntegerFormat if "int" in name else FloatFormat)


@pytest.mark.parametrize(
    ("spelling", "near"),
    [("flaot16", "'float16'"), ("int5", "'int4'|'int8'"), ("int8/", "'int8"), ("int8/0", "'int8"), (["float16"], ""),
     ("float8_e8m0fnu", "'float8_e")],
)  # fmt: skip
def test_an_unknown_format_is_quoted_with_the_nearest(spelling, near):
    with pytest.raises(ValueError, match=rf"Unknown format .*({near}).*For example: 'float16'") as caught:
        parse_format(spelling)
    assert repr(spelling) in str(caught.value)
