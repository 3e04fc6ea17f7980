"""What a row says of a tensor, against NumPy and casts of ml_dtypes; and that rows add up."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jmp_policy.numerics import collect

# Only TPUs run the second form of the counts; a layer that rounds in blocks has no other way to its rounded weights.
from jmp_policy.numerics._stats_counting import measure_exactly
from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.policy import parse_format
from jmp_policy.quant._block_numbers import dequantize, quantize_mx, quantize_nv

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
TIES = [2.0**-25, 65520, 464, 61440, 2.0**-10, 2.0**-17, 2.0**-14 - 2.0**-25, 2.0**-6 - 2.0**-10, 248, 2.0**-134]
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-39, 3.4e38, 2.0**-46, 2.0**16, *TIES], np.float32)


def measure(formats):
    """Returns a function that returns the statistics of its argument."""
    observed = collect(lambda x: None, formats, of="arguments", sample=None)
    return jax.jit(lambda x: observed(x)[1])


def read(x, formats=FLOATS):
    [row] = measure(formats)(jnp.asarray(x))
    return row


def count_losses(row, name):
    shares = row.formats[name]
    return [round(share * row.count) for share in (shares.underflow, shares.subnormal, shares.overflow)]


def check(x, formats=FLOATS, rtol=None):
    """Counts and extremes are those of NumPy exactly, and sums to `rtol`."""
    row = read(x, formats)
    with np.errstate(all="ignore"):
        sizes = np.abs(x.astype(np.float64)).ravel()
        finite = sizes[np.isfinite(sizes)]
        nonzero = finite[finite > 0]
        for name in formats:
            info = ml_dtypes.finfo(name)
            cast = np.abs(x.astype(name).astype(np.float64)).ravel()
            # Formats without infinity and nan saturate what would be rounded to more than the largest number.
            step = 2.0 ** (np.frexp(float(info.max))[1] - 1 - info.nmant)
            beyond = ~np.isfinite(cast) | (np.rint(sizes / step) * step > float(info.max))
            expected = (sizes > 0) & (cast == 0), (cast > 0) & (cast < float(info.smallest_normal)), beyond
            assert count_losses(row, name) == [int((np.isfinite(sizes) & each).sum()) for each in expected]
    assert (row.times, row.count, row.nans, row.infs) == (1, x.size, np.isnan(sizes).sum(), np.isinf(sizes).sum())
    assert round(row.zeros * row.count) == (sizes == 0).sum()
    assert (row.amax, row.min_nonzero) == (finite.max(initial=0), nonzero.min() if nonzero.size else None)
    assert row.histogram.tolist() == np.bincount(np.clip(np.frexp(nonzero)[1] + 46, 0, 63), minlength=64).tolist()
    if rtol is not None and nonzero.size:
        assert row.rms == pytest.approx(np.sqrt(np.mean(finite**2)), rel=rtol / 10)
        for name in formats:
            errors = row.formats[name].error, row.formats[name].scaled_error
            np.testing.assert_allclose(errors, [*find_errors(finite, name)], rtol=rtol)
    return row


def find_errors(x, name):
    """The relative errors of casts that saturate, as they are and with the best power of two."""
    largest = float(ml_dtypes.finfo(name).max)
    for by in (1.0, 2.0 ** np.floor(np.log2(largest / x.max()))):
        cast = np.clip(x * by, -largest, largest).astype(name).astype(np.float64) / by
        yield np.linalg.norm(cast - x) / np.linalg.norm(x)


def draw(*shape):
    rng = np.random.default_rng()
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 4, shape)).astype(np.float32)


@pytest.mark.slow
def test_ties_subnormal_numbers_and_what_is_not_finite_are_counted_as_casts_have_them():
    neighbours = [np.nextafter(SPECIAL, np.float32(to)) for to in (0, np.inf)]
    check(np.concatenate([SPECIAL, -SPECIAL, *neighbours]))


@pytest.mark.parametrize(
    "shape",
    [(3, 257), *[pytest.param(shape, marks=pytest.mark.slow) for shape in
                 ((), (1,), (1023,), (1024,), (1025,), (100_003,), (4, 50, 3, 8), (700, 1), (2, 0))]],
    ids=str,
)  # fmt: skip
def test_a_row_is_that_of_numpy_whatever_the_shape(shape):
    check(draw(*shape), rtol=1e-5)  # squares and errors are rounded in float32, and added up in two parts


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_number_is_counted_exactly(name):
    if name == "float32":
        x = np.random.default_rng().integers(0, 2**32, (301, 331), np.uint32).view(np.float32)
    else:
        size = np.dtype(name).itemsize
        x = np.arange(2 ** (8 * size), dtype=f"uint{8 * size}").view(np.dtype(name))
    check(x, ("float16", "float8_e5m2"))


FORMATS_OF_ML_DTYPES = [name for name in sorted(dir(ml_dtypes)) if name.startswith(("float4", "float6", "float8"))]
ALL_FORMATS = tuple(
    name
    for name in FORMATS_OF_ML_DTYPES  # without those that JAX does not know
    if "e8m0" not in name and jnp.issubdtype(getattr(ml_dtypes, name), jnp.floating)
)


@pytest.mark.slow
def test_every_format_loses_what_a_cast_of_ml_dtypes_loses():
    rng, formats = np.random.default_rng(), (*ALL_FORMATS, "float16", "bfloat16", "float32")
    x = (rng.standard_normal(9001) * 2.0 ** rng.uniform(-20, 20, 9001)).astype(np.float32)
    bounds = [bound for name in formats for bound in parse_format(name).find_thresholds(np.dtype("float32"))]
    with np.errstate(over="ignore"):
        above = np.nextafter(np.float32(bounds), np.float32(np.inf))
    check(np.concatenate([x, np.float32(bounds), above]), formats)
    for binade in (-60, 0, 9, 60):
        check((rng.standard_normal(3001) * 2.0**binade).astype(np.float32), ALL_FORMATS, rtol=1e-5)


@pytest.mark.slow
def test_float64_is_counted_exactly():
    rng, formats = np.random.default_rng(), (*FLOATS, "float32")
    with jax.enable_x64(True):
        check(rng.integers(0, 2**64, 5003, np.uint64).view(np.float64), formats)
        check(SPECIAL.astype(np.float64), formats)
        numbers = rng.standard_normal(5003) * 10.0 ** rng.uniform(-9, 4, 5003)
        check(numbers, ("float32",), rtol=1e-9)
        # XLA casts to half precision by way of float32: numbers of float64 near a tie would be rounded twice.
        check(numbers.astype(np.float32).astype(np.float64), FLOATS, rtol=1e-9)


def test_float64_needs_sums_in_float64():
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"float64 needs float64 sums: StatsSpec.*dtype=np\.dt"):
        jax.eval_shape(StatsSpec(FLOATS).look, jnp.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (2000,), (3, 2053), (2053, 3), (2, 3, 50, 40)])
def test_the_form_for_tpus_measures_the_same(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 1e-5, jnp.float32)

    @jax.jit
    def look_both_ways(x):
        wide = x if x.ndim else x[None]
        most = measure_exactly(wide).most
        return [StatsSpec(FLOATS)._count_along(wide, most, keeps_last=keeps) for keeps in (False, True)]

    (counts, sums), (counts_across, sums_across) = look_both_ways(x)
    np.testing.assert_array_equal(counts, counts_across)
    np.testing.assert_allclose(sum(sums), sum(sums_across), rtol=1e-6)


def draw_steps(count):
    """Tensors of very different magnitudes, with zeros and what is not finite."""
    rng = np.random.default_rng()
    x = (rng.standard_normal((count, 40)) * 10.0 ** rng.uniform(-12, 8, (count, 1))).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = 0
    x[:3, 0] = np.inf, np.nan, 1e-45
    return jnp.asarray(x)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 1000])
def test_records_merge_to_that_of_all_at_once(count):
    formats = ("float16", "float8_e4m3fn")
    xs, of_one = draw_steps(count), measure(formats)
    empty = jax.eval_shape(of_one, xs[0]).empty()
    merged, each = jax.jit(lambda xs: lax.scan(lambda all, x: (all.merge(one := of_one(x)), one), empty, xs))(xs)
    whole = read(xs, formats)
    for [row] in (merged, each):  # iteration by iteration, and all at once, as `vmap` and loops do
        assert (row.times, row.count, row.nans, row.infs) == (count, whole.count, 1, 1)
        assert (row.amax, row.min_nonzero, row.zeros) == (whole.amax, whole.min_nonzero, whole.zeros)
        assert row.histogram.tolist() == whole.histogram.tolist()
        assert row.rms == pytest.approx(whole.rms, rel=1e-6)
        for name in formats:  # casts without a scale are the same ones; the best scale is another for each record
            assert count_losses(row, name) == count_losses(whole, name)
            assert row.formats[name].error == pytest.approx(whole.formats[name].error, rel=1e-6)


@pytest.mark.slow
def test_a_billion_merges_of_a_billion_numbers_overflow_nothing():
    stats = measure(("float16",))(jnp.asarray(np.random.default_rng().uniform(1, 2, 1000), jnp.float32))
    [row] = jax.jit(lambda stats: lax.fori_loop(0, 50, lambda _, merged: merged.merge(merged), stats))(stats)
    assert (row.times, row.count) == (2**50, 1000 * 2**50)
    assert row.rms == pytest.approx(stats.rows()[0].rms, rel=1e-12)
    [row] = jax.jit(lambda a: lax.fori_loop(0, 100_000, lambda _, merged: merged.merge(a), a.empty()))(stats)
    assert row.times == 100_000
    assert row.rms == pytest.approx(stats.rows()[0].rms, rel=1e-12 * 1e5**0.5)


INTEGERS = {"int8": (127, 128), "int4": (7, 128), "int4/32": (7, 32)}


def round_integers(x, largest, block):
    """The number of integers that became zero, and squared errors, with a scale as it is and a power of two."""
    lost, errors = 0, np.zeros(2)
    for row in x.reshape(-1, x.shape[-1]):
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


def draw_in_blocks(shape):
    """Random numbers over six decades with zeros among them."""
    rng = np.random.default_rng()
    x = np.asarray(rng.standard_normal(shape) * 10.0 ** rng.uniform(-3, 3, shape), np.float32)
    return np.where(rng.random(shape) < 0.2, np.float32(0), x)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(5, 257), (), (300,), (3, 4, 64)], ids=str)
def test_integers_lose_what_rounding_by_blocks_loses(shape):
    x = draw_in_blocks(shape)
    row, norm = read(x, tuple(INTEGERS)), np.linalg.norm(np.float64(x))
    for name, (largest, block) in INTEGERS.items():
        lost, errors = round_integers(np.atleast_1d(x), largest, block)
        assert count_losses(row, name) == [lost, 0, 0]
        # The product of up to 127 and a scale is rounded in float32, and an error is up to half of the scale.
        found = row.formats[name].error, row.formats[name].scaled_error
        np.testing.assert_allclose(found, np.sqrt(errors) / (norm or 1), rtol=2.0**-14, atol=1e-6)


SCALED = {
    "mxfp8": (quantize_mx, "float8_e4m3fn", 32),
    "mxfp8_e5m2/64": (quantize_mx, "float8_e5m2", 64),
    "mxfp4": (quantize_mx, "float4_e2m1fn", 32),
    "nvfp4": (quantize_nv, None, 16),
}


def round_as_in_training(x, quantize, dtype, block):
    """The counts of a row, and the squared error, of the numbers that training multiplies by; in float64."""
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(7,), (5, 257)], ids=str)
def test_floats_in_blocks_lose_what_training_loses(shape):
    x = draw_in_blocks(shape)
    row, norm = read(x, tuple(SCALED)), np.linalg.norm(np.float64(x))
    for name, how in SCALED.items():
        expected, error = round_as_in_training(x, *how)
        assert count_losses(row, name) == expected
        # Two roundings of float32, of a number and of an error that is at least a 32nd of its distance.
        found = row.formats[name].error, row.formats[name].scaled_error
        np.testing.assert_allclose(found, [np.sqrt(error) / norm] * 2, rtol=2.0**-14, atol=1e-6)


def test_what_is_not_finite_is_left_out_of_a_block():
    row = read(np.float32([np.inf, 1.0, -np.nan, 1e-30, 0.0]), ("int8", "mxfp8"))
    assert (row.zeros, row.nans, row.infs) == (0.2, 1, 1)
    for name, shares in row.formats.items():
        assert count_losses(row, name) == [1, 0, 0]
        assert np.isfinite(shares.error)


@pytest.mark.slow
def test_numbers_beyond_a_scale_that_is_too_coarse_are_clipped():
    # Beside 1 a block of 2**-9 and less has the scale 2 or 3 times 2**-9 / 2688: steps so coarse that 2.4 becomes 2.
    small = np.float32(2.4 * 6 * 2.0**-9 / 2688)
    row = read(np.float32([1.0] + [0.0] * 15 + [small] * 3 + [0.0] * 13), ("nvfp4", "mxfp4"))
    assert [count_losses(row, name) for name in row.formats] == [[0, 0, 3], [3, 0, 0]]


def test_float64_beyond_float32_is_clipped_in_blocks():
    with jax.enable_x64(True):
        row = read(np.array([1e300, 1.0, np.nan]), ("mxfp8",))
        assert count_losses(row, "mxfp8") == [1, 0, 1]
        assert np.isfinite(row.formats["mxfp8"].error)
