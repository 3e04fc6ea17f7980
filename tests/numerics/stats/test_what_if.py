"""Formats that a tensor might be cast to, and what integers with a scale per block lose."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.quant._block_numbers import dequantize, quantize_mx, quantize_nv

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


def measure_random(formats, shape):
    """Random numbers over six decades with zeros among them, and the counts and sums of errors that are measured."""
    rng = np.random.default_rng()
    x = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape), np.float32)
    x = np.where(rng.random(shape) < 0.2, np.float32(0), x)
    record = jax.jit(StatsSpec(tuple(formats), False).measure)(jnp.asarray(x))
    counts, sums = np.asarray(record.counts)[0, 0], np.asarray(record.sums, np.float64)[0].sum(-1)
    sums *= 4.0 ** int(record.exponents[0])
    return x, counts, sums


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (7,), (300,), (5, 257), (3, 4, 64)], ids=str)
def test_integers_lose_what_rounding_by_blocks_loses(shape):
    x, counts, sums = measure_random(INTEGERS, shape)
    for i, (largest, block) in enumerate(INTEGERS.values()):
        lost, errors = round_with_numpy(np.atleast_1d(x), largest, block)
        assert counts[4 + 3 * i : 7 + 3 * i].tolist() == [lost, 0, 0]
        # The product of up to 127 and a scale is rounded in float32, and an error is up to half of the scale.
        np.testing.assert_allclose(sums[1 + 2 * i : 3 + 2 * i], errors, rtol=2.0**-14, atol=1e-12 * sums[0])


@pytest.mark.exhaustive
def test_blocks_stand_between_floats_in_the_order_of_the_meter():
    x = jnp.asarray(np.random.default_rng().standard_normal(200), jnp.float32)
    mixed = jax.jit(StatsSpec(("int8", "float16", "mxfp4", "bfloat16")).measure)(x)
    floats = jax.jit(StatsSpec(("float16", "bfloat16")).measure)(x)
    integers = jax.jit(StatsSpec(("int8", "mxfp4")).measure)(x)
    for i, (other, j) in enumerate([(integers, 0), (floats, 0), (integers, 1), (floats, 1)]):
        here, there = slice(4 + 3 * i, 7 + 3 * i), slice(4 + 3 * j, 7 + 3 * j)
        assert mixed.counts[..., here].tolist() == other.counts[..., there].tolist()
        here, there = slice(1 + 2 * i, 3 + 2 * i), slice(1 + 2 * j, 3 + 2 * j)
        np.testing.assert_allclose(mixed.sums[:, here], other.sums[:, there], rtol=1e-6, atol=1e-9)
    assert mixed.counts[..., 16:].tolist() == floats.counts[..., 10:].tolist()


def test_what_is_not_finite_is_left_out_of_a_block():
    x = jnp.asarray([np.inf, 1.0, -np.nan, 0.001, 0.0])
    record = jax.jit(StatsSpec(("int8",), False).measure)(x)
    assert record.counts[0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert np.isfinite(record.sums).all()


SCALED = {
    "mxfp8": (quantize_mx, "float8_e4m3fn", 32),
    "mxfp8_e5m2/64": (quantize_mx, "float8_e5m2", 64),
    "mxfp4": (quantize_mx, "float4_e2m1fn", 32),
    "nvfp4": (quantize_nv, None, 16),
    "nvfp4/64": (quantize_nv, None, 64),
}


def round_as_in_training(x: np.ndarray, quantize, dtype, block: int):
    """What `StatsSpec` counts, and the squared error, of the numbers that training multiplies by; in float64."""
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % block)])
    blocks = quantize(jnp.asarray(x), *([dtype] if dtype else []), -1, block)
    back, values = (np.asarray(each, np.float64) for each in (dequantize(blocks, -1), blocks.values))
    info = jnp.finfo(blocks.values.dtype)
    lost, subnormal = (values == 0) & (x != 0), (values != 0) & (np.abs(values) < float(info.smallest_normal))
    # The largest numbers of a block are clipped where its scale, in e4m3 next to zero, was rounded down by so much that
    # they are nearer to a number that the format no longer has.
    largest = float(info.max)
    beyond = largest + (largest - float(np.nextafter(info.max, info.dtype.type(0)))) / 2
    clipped = (np.abs(values) == largest) & (np.abs(x) * largest >= np.abs(back) * beyond)
    return [int(each.sum()) for each in (lost, subnormal, clipped)], ((back - x) ** 2).sum()


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(), (7,), (300,), (5, 257), (3, 4, 64)], ids=str)
def test_floats_in_blocks_lose_what_training_loses(shape):
    x, counts, sums = measure_random(SCALED, shape)
    for i, how in enumerate(SCALED.values()):
        expected, error = round_as_in_training(np.atleast_1d(x), *how)
        assert counts[4 + 3 * i : 7 + 3 * i].tolist() == expected
        # Two roundings of float32, of a number and of an error that is at least a 32nd of its distance.
        np.testing.assert_allclose(sums[1 + 2 * i : 3 + 2 * i], [error] * 2, rtol=2.0**-14, atol=1e-12 * sums[0])


@pytest.mark.slow
def test_numbers_beyond_a_scale_that_is_too_coarse_are_clipped():
    # Beside 1 a block of 2**-9 and less has the scale 2 or 3 times 2**-9 / 2688: steps so coarse that 2.4 becomes 2.
    small = np.float32(2.4 * 6 * 2.0**-9 / 2688)
    x = jnp.asarray([1.0] + [0.0] * 15 + [small] * 3 + [0.0] * 13)
    record = jax.jit(StatsSpec(("nvfp4", "mxfp4"), False).measure)(x)
    assert record.counts[0, 0, 4:].tolist() == [0, 0, 3, 3, 0, 0]


def test_float64_beyond_float32_is_clipped_in_blocks():
    with jax.enable_x64(True):
        spec = StatsSpec(("mxfp8",), False, np.dtype("float64"))
        record = jax.jit(spec.measure)(jnp.asarray([1e300, 1.0, np.nan]))
        assert record.counts[0, 0, 4:].tolist() == [1, 0, 1]
        assert np.isfinite(record.sums).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", SCALED)
def test_what_is_not_finite_is_left_out_of_a_block_of_floats(format):
    x = jnp.asarray([np.inf, 1.0, -np.nan, 1e-30, 0.0, 3.4e38])
    first, last = (jax.jit(StatsSpec((format,), False).measure)(part) for part in (x[:5], x))
    assert first.counts[0, 0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert np.isfinite(last.sums).all()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**120])
def test_errors_of_blocks_neither_overflow_nor_vanish(scale):
    x = np.random.default_rng().standard_normal(256).astype(np.float32)
    errors = []
    for y in (x, x * np.float32(scale)):
        sums = np.asarray(jax.jit(StatsSpec(("int8", "mxfp8", "nvfp4"), False).measure)(jnp.asarray(y)).sums)[0].sum(-1)
        errors.append(sums[1:] / sums[0])
    np.testing.assert_allclose(errors[1], errors[0], rtol=1e-6)
