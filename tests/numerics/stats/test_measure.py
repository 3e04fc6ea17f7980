"""What is measured of a tensor, against NumPy and casts of ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics._stats_counting import FIRST_EXPONENT, HISTOGRAM_BINS, measure_exactly
from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.numerics._stats_record import Record
from jmp_policy.policy import parse_format

FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SPEC = StatsSpec(FLOATS)
TIES = [2.0**-25, 65520, 464, 61440, 2.0**-10, 2.0**-17, 2.0**-14 - 2.0**-25, 2.0**-6 - 2.0**-10, 248, 2.0**-134]
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-39, 3.4e38, 2.0**-46, 2.0**16, *TIES], np.float32)


@functools.partial(jax.jit, static_argnums=0)
def measure(spec: StatsSpec, x: jax.Array) -> Record:
    return spec.measure(x)


def read_counts(record: Record) -> np.ndarray:
    low, high = (np.asarray(record.counts)[0, i].astype(np.int64) for i in (0, 1))
    return low + (high << 32)


def read_sums(record: Record) -> np.ndarray:
    """The sums of the row, in float64."""
    return np.asarray(record.sums, np.float64)[0].sum(-1) * 4.0 ** int(record.exponents[0])


def count_with_numpy(x: np.ndarray, formats: tuple[str, ...]) -> np.ndarray:
    with np.errstate(all="ignore"):
        magnitudes = np.abs(x.astype(np.float64)).ravel()
        finite = np.isfinite(magnitudes)
        columns = [1, (magnitudes == 0).sum(), np.isnan(magnitudes).sum(), np.isinf(magnitudes).sum()]
        for name in formats:
            info = ml_dtypes.finfo(name)
            cast = np.abs(x.astype(name).astype(np.float64)).ravel()
            lost = ~np.isfinite(cast) | _is_beyond(magnitudes, info)
            is_subnormal = (cast > 0) & (cast < float(info.smallest_normal))
            columns += [(finite & (magnitudes > 0) & (cast == 0)).sum(), is_subnormal.sum(), (finite & lost).sum()]
    exponents = np.frexp(magnitudes[finite & (magnitudes > 0)])[1] - 1
    bins = np.clip(exponents - FIRST_EXPONENT + 1, 0, HISTOGRAM_BINS - 1)
    return np.array([*columns, *np.bincount(bins, minlength=HISTOGRAM_BINS)])


def _is_beyond(magnitudes: np.ndarray, info) -> np.ndarray:
    """What would be rounded to more than the largest number: formats without infinity and nan saturate it."""
    step = 2.0 ** (np.frexp(float(info.max))[1] - 1 - info.nmant)
    return np.rint(magnitudes / step) * step > float(info.max)


def sum_with_numpy(x: np.ndarray, formats: tuple[str, ...]) -> np.ndarray:
    """The squares, and the squared errors of casts that saturate, as they are and with the best power of two."""
    x = x.astype(np.float64)
    x = x[np.isfinite(x)]
    sums = [(x**2).sum()]
    for name in formats:
        largest = float(ml_dtypes.finfo(name).max)
        scale = 2.0 ** np.floor(np.log2(largest / np.abs(x).max()))
        for by in (1.0, scale):
            cast = np.clip(x * by, -largest, largest).astype(name).astype(np.float64) / by
            sums.append(((cast - x) ** 2).sum())
    return np.array(sums)


def check(x: np.ndarray, spec: StatsSpec = SPEC) -> Record:
    """Counts and extremes are those of NumPy, exactly."""
    record = measure(spec, jnp.asarray(x))
    with np.errstate(invalid="ignore"):  # a nan that signals
        magnitudes = np.abs(x.astype(np.float64))
    assert read_counts(record).tolist() == count_with_numpy(x, spec.formats).tolist()
    finite = magnitudes[np.isfinite(magnitudes)]
    least = finite[finite > 0].min(initial=np.inf)
    assert np.asarray(record.extremes, np.float64)[0].tolist() == [finite.max(initial=0), least]
    return record


def count_bytes(lowered) -> float:
    return lowered.compile().cost_analysis()["bytes accessed"]


def normal(rng, *shape):
    return (rng.standard_normal(shape) * 10.0 ** rng.uniform(-9, 4, shape)).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (7,), (255,), (1023,), (1024,), (1025,), (2053,), (100_003,), (3, 257), (4, 50, 3, 8), (700, 1), (2, 0)],
    ids=str,
)
def test_counts_are_those_of_numpy_whatever_the_shape(shape):
    rng = np.random.default_rng()
    x = normal(rng, *shape)
    record = check(x)
    if x.size:
        # Squares and errors are rounded in float32, and added up in two parts.
        np.testing.assert_allclose(read_sums(record)[0], (x.astype(np.float64) ** 2).sum(), rtol=1e-6)
        np.testing.assert_allclose(read_sums(record), sum_with_numpy(x, FLOATS), rtol=1e-5)


@pytest.mark.slow
def test_ties_subnormal_numbers_and_what_is_not_finite_are_counted_as_casts_have_them():
    neighbours = [np.nextafter(SPECIAL, np.float32(to)) for to in (0, np.inf)]
    check(np.concatenate([SPECIAL, -SPECIAL, *neighbours]))


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, 1e-42, 1.0])
def test_a_large_tensor_of_one_value_overflows_no_counter(value):
    check(np.full((3, 100_000), value, np.float32))


@pytest.mark.slow
def test_random_bits_of_float32_are_counted_exactly():
    check(np.random.default_rng().integers(0, 2**32, (301, 331), np.uint32).view(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_number_of_16_bits_is_counted_exactly(name):
    x = np.arange(2**16, dtype=np.uint16).view(np.dtype(name))
    record = check(x)
    assert {leaf.dtype for leaf in (record.extremes, record.sums)} == {np.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz"])
def test_every_number_of_8_bits_is_counted_exactly(name):
    check(np.arange(2**8, dtype=np.uint8).view(np.dtype(name)), StatsSpec(("float16", "float8_e5m2")))


ALL_FORMATS = tuple(
    name
    for name in sorted(dir(ml_dtypes))
    if name.startswith(("float4", "float6", "float8")) and name != "float8_e8m0fnu"
)


@pytest.mark.slow
def test_every_format_loses_what_a_cast_of_ml_dtypes_loses():
    rng = np.random.default_rng()
    spec = StatsSpec((*ALL_FORMATS, "float16", "bfloat16", "float32"))
    x = (rng.standard_normal(9001) * 2.0 ** rng.uniform(-20, 20, 9001)).astype(np.float32)
    thresholds = [bound for name in spec.formats for bound in parse_format(name).find_thresholds(np.dtype("float32"))]
    bounds = np.array(thresholds, np.float32)
    with np.errstate(over="ignore"):
        above = np.nextafter(bounds, np.float32(np.inf))
    record = check(np.concatenate([x, bounds, above]), spec)
    assert record.sums.shape == (1, 1 + 2 * len(spec.formats), 2)


@pytest.mark.slow
def test_errors_of_every_format_are_those_of_casts_that_saturate():
    spec, rng = StatsSpec(ALL_FORMATS), np.random.default_rng()
    for binade in (-60, -3, 0, 9, 60):
        x = (rng.standard_normal(3001) * 2.0**binade).astype(np.float32)
        np.testing.assert_allclose(read_sums(measure(spec, jnp.asarray(x))), sum_with_numpy(x, ALL_FORMATS), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("value", [1e-37, 0.1, 3e38])
def test_a_root_mean_square_is_right_to_six_digits_where_roundings_add_up(value):
    x = np.full((3, 33_333), value, np.float32)
    x[0, 0] *= 1.1
    squares = (x.astype(np.float64) ** 2).sum()
    assert abs(np.sqrt(read_sums(measure(SPEC, jnp.asarray(x)))[0] / squares) - 1) < 1e-6


@pytest.mark.slow
def test_subnormal_numbers_are_counted_and_are_zeros_in_sums():
    record = check(np.array([1e-40, 2e-41, 0], np.float32))
    if jax.default_backend() == "cpu":
        assert read_sums(record).tolist() == [0.0] * 9


@pytest.mark.slow
def test_float64_is_counted_exactly():
    rng = np.random.default_rng()
    spec = StatsSpec((*FLOATS, "float32"), dtype=np.dtype("float64"))
    x = rng.integers(0, 2**64, 5003, np.uint64).view(np.float64)
    y = rng.standard_normal(5003) * 10.0 ** rng.uniform(-9, 4, 5003)
    with jax.enable_x64(True):
        check(x, spec)
        check(SPECIAL.astype(np.float64), spec)
        record = check(y, spec)
        np.testing.assert_allclose(read_sums(record), sum_with_numpy(y, spec.formats), rtol=1e-9)
        narrow = check(SPECIAL, spec)
        assert {leaf.dtype.name for leaf in narrow} == {"uint32", "int32", "float64"}


def test_float64_needs_sums_in_float64():
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match=r"float64 needs float64 sums: StatsSpec.*dtype=np\.dtype"),
    ):
        SPEC.measure(jnp.ones(3, jnp.float64))


@pytest.mark.slow
def test_without_formats_and_histogram_the_counts_are_four():
    record = measure(StatsSpec((), False), jnp.asarray(SPECIAL))
    assert read_counts(record).tolist() == [1, 2, 1, 2]
    assert record.sums.shape == (1, 1, 2)


@pytest.mark.slow
def test_it_is_the_same_under_vmap():
    x = jnp.asarray(normal(np.random.default_rng(), 3, 130))
    batched = jax.jit(jax.vmap(SPEC.measure))(x)
    for i in range(3):
        jax.tree.map(
            np.testing.assert_array_equal, jax.tree.map(lambda leaf, i=i: leaf[i], batched), measure(SPEC, x[i])
        )


@pytest.mark.slow
def test_it_has_no_gradient_and_runs_in_a_loop():
    def loss(x):
        def body(carry, _):
            record = SPEC.measure(carry)
            return carry * 0.5, record

        last, records = jax.lax.scan(body, x, None, length=3)
        return jnp.sum(last), records

    x = jnp.asarray([1.0, -8.0, 0.25])
    grads, records = jax.grad(loss, has_aux=True)(x)
    assert grads.tolist() == [0.125] * 3
    assert records.extremes[:, 0, 0].tolist() == [8.0, 4.0, 2.0]


@pytest.mark.exhaustive
def test_a_sharded_tensor_is_measured_where_it_is():
    mesh = make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = normal(np.random.default_rng(), 64, 512)
    for spec in (P("a", "b"), P("a"), P(None, "a"), P(("a", "b"))):
        sharded = jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))
        compiled = jax.jit(SPEC.measure).lower(sharded).compile()
        gathered = [line for line in compiled.as_text().splitlines() if "f32[64,512]" in line or "s32[64,512]" in line]
        assert gathered == []
        assert read_counts(compiled(sharded)).tolist() == count_with_numpy(x, FLOATS).tolist()


@pytest.mark.slow
def test_it_is_measured_inside_shard_map():
    mesh = make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.asarray(normal(np.random.default_rng(), 8, 16))
    fun = jax.shard_map(SPEC.measure, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    records = jax.jit(fun)(x)
    assert records.counts.shape[0] == 4
    for i in range(4):
        want = count_with_numpy(np.asarray(x[2 * i : 2 * i + 2]), FLOATS)
        assert records.counts[i, 0].tolist() == want.tolist()


@pytest.mark.slow
def test_a_value_that_xla_knows_is_not_measured_while_it_compiles():
    lowered = jax.jit(lambda x: (x, SPEC.measure(jnp.zeros((16, 16))))).lower(jnp.ones(2))
    assert count_bytes(lowered) > 2 * 16 * 16 * 4  # it is read in two passes


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (7,), (2000,), (64, 64), (3, 2053), (2053, 3), (2, 3, 50, 40)])
def test_the_form_for_tpus_measures_the_same(shape):
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 1e-5, jnp.float32)

    @jax.jit
    def look_both_ways(x):
        wide = x if x.ndim else x[None]
        most = measure_exactly(wide).most
        return [SPEC._count_along(wide, most, keeps_last=keeps) for keeps in (False, True)]

    (counts, sums), (counts_across, sums_across) = look_both_ways(x)
    np.testing.assert_array_equal(counts, counts_across)
    np.testing.assert_allclose(sum(sums), sum(sums_across), rtol=1e-6)
