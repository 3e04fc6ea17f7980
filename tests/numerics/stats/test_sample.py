"""Formats and histograms from a sample: what is exact, and how far the rest may be off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from meshes import make_mesh

from jmp_policy.numerics import collect

FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
SAMPLE = 4096


def measure(formats=FORMATS, sample=SAMPLE):
    """Returns a function that returns the statistics of its argument."""
    observed = collect(lambda x: None, formats, of="arguments", sample=sample)
    return jax.jit(lambda x: observed(x)[1])


def read(x, formats=FORMATS, sample=SAMPLE):
    [row] = measure(formats, sample)(jnp.asarray(x))
    return row


def draw(kind, shape=(128, 1024)):
    rng = np.random.default_rng(0)
    draws = {
        "normal": lambda: rng.standard_normal(shape) * 1e-6,
        "log-normal": lambda: np.exp(4.6 * rng.standard_normal(shape)),
        "Cauchy": lambda: rng.standard_cauchy(shape) * 1e-3,
        "sparse": lambda: rng.standard_normal(shape) * (rng.random(shape) < 0.01),
        "one large column": lambda: rng.standard_normal(shape) * np.where(np.arange(shape[1]) == 5, 1e6, 1e-6),
        "period of a row": lambda: np.broadcast_to(np.exp(np.linspace(-30, 10, shape[1])), shape),
        "period of a column": lambda: np.broadcast_to(np.exp(np.linspace(-30, 10, shape[0]))[:, None], shape),
    }
    return jnp.asarray(draws[kind](), jnp.float32)


def list_shares(row):
    shares = [share for each in row.formats.values() for share in (each.underflow, each.subnormal, each.overflow)]
    return np.array([*shares, *row.histogram / row.count])


EXACT = ("count", "times", "amax", "min_nonzero", "zeros", "nans", "infs")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["normal", "log-normal", "Cauchy", "sparse", "one large column", "period of a row", "period of a column"]
)
def test_a_share_of_a_sample_is_within_five_standard_deviations_of_a_binomial_share(kind):
    """76 shares of 7 tensors: of independent draws, one in 1,000 such runs would have a share beyond five."""
    every, some = (read(draw(kind), sample=sample) for sample in (None, SAMPLE))
    assert [getattr(some, name) for name in EXACT] == [getattr(every, name) for name in EXACT]
    share = list_shares(every)
    deviation = np.sqrt(np.maximum(share * (1 - share), 1 / SAMPLE) / SAMPLE)
    assert (np.abs(list_shares(some) - share) <= 5 * deviation).all()


def test_extremes_zeros_and_what_is_not_finite_are_exact():
    x = np.asarray(draw("normal", (70, 1024))).copy()
    x[3, 7], x[5, 8], x[6, 9:12], x[8, 20], x[9, 30:37] = 1e30, 1e-42, np.nan, np.inf, 0
    row = read(x, ("float16",))
    assert [getattr(row, name) for name in EXACT] == [x.size, 1, np.float32(1e30), np.float32(1e-42), 7 / x.size, 3, 1]
    assert row.sampled == SAMPLE
    assert row.formats["float16"].overflow >= 1 / row.count  # the extremes prove it
    assert abs(row.histogram.sum() / (x.size - 11) - 1) < 0.01


def test_the_rms_of_a_heavy_tail_is_exact():
    """Blocks of 4,096 squares are added up in float32, then their sums, each with half a unit of rounding at most."""
    observed, shape = measure(("float16",)), (70, 1024)
    for kind in ("log-normal", "Cauchy", "sparse", "one large column"):
        for scale in (1e-11, 1.0, 1e3):
            x = draw(kind, shape) * np.float32(scale)
            [row] = observed(x)
            exact = np.sqrt(np.mean(np.asarray(x, np.float64) ** 2))
            np.testing.assert_allclose(row.rms, exact, rtol=(4096 + x.size // 4096 + 4) * 2**-25)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e20])
def test_the_rms_is_of_the_sample_where_squares_do_not_fit_float32(scale):
    """A mean of 4,096 squares of a normal distribution is within 11 % in 5 standard deviations."""
    x = draw("normal", (70, 1024)) / np.float32(1e-6) * np.float32(scale)
    np.testing.assert_allclose(read(x).rms, np.float64(x).std(), rtol=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(), (0, 3), (4096,), (64, 64), (3, 5, 7), (31, 130)], ids=str)
@pytest.mark.parametrize("formats", [FORMATS, ("int8", "float16", "mxfp4")], ids=["floats", "blocks"])
def test_a_small_tensor_is_measured_whole(shape, formats):
    """What fills the sample up is not counted."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    some, every = read(x, formats).to_dict(), read(x, formats, None).to_dict()
    for name in [*EXACT, "sampled", "histogram"]:
        assert some[name] == every[name], name
    assert some["rms"] == pytest.approx(every["rms"], rel=1e-6)
    for name in formats:
        assert some["formats"][name] == pytest.approx(every["formats"][name], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "spec"),
    [(AxisType.Auto, P("a", "b")), (AxisType.Explicit, P(None, "a")), (AxisType.Explicit, P(("a", "b")))],
    ids=str,
)
def test_no_tensor_is_gathered_on_a_mesh(kind, spec):
    mesh = make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    x = draw("normal", (64, 512))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = measure().lower(placed).compile()
        gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
        assert not [line for line in gathers if "f32[" in line.partition("all-gather")[0]]
        found = compiled(placed)
    np.testing.assert_array_equal(found.record.counts, measure()(x).record.counts)


@pytest.mark.slow
def test_each_device_of_a_shard_map_samples_its_shard():
    mesh = make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    observed = jax.jit(collect(mapped, FORMATS, of="forward"))
    x = draw("normal", (512, 1000))
    assert "all_gather" not in observed.lower(x).as_text()
    (row,) = observed(x)[1]
    assert (row.times, row.count, row.sampled) == (4, 4 * 128 * 128, 4 * SAMPLE)


def test_rows_of_another_sample_do_not_merge():
    some, every = (jax.eval_shape(measure(("float16",), n), jnp.ones((100, 100))) for n in (SAMPLE, None))
    with pytest.raises(ValueError, match="the sample of one is 4096, and of the other None"):
        some.merge(every)
