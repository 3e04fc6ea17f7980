"""Records add up: to what measuring all at once would have found, without overflow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_policy.numerics._stats_measure import StatsSpec
from jmp_policy.numerics._stats_record import Record, fold, join_records, merge

SPEC = StatsSpec(("float16", "float8_e4m3fn"))


def read_counts(record: Record) -> np.ndarray:
    words = np.asarray(record.counts).astype(object)
    return words[..., 0, :] + words[..., 1, :] * 2**32


def read_sums(record: Record) -> np.ndarray:
    units = 4.0 ** np.asarray(record.exponents, np.float64)
    return np.asarray(record.sums, np.float64).sum(-1) * units[..., None]


def assert_equal(a: Record, b: Record, rtol: float = 1e-12) -> None:
    assert (read_counts(a) == read_counts(b)).all()
    np.testing.assert_array_equal(a.extremes, b.extremes)
    np.testing.assert_array_equal(a.exponents, b.exponents)
    np.testing.assert_allclose(read_sums(a), read_sums(b), rtol=rtol)


@functools.lru_cache
def measure_many(count: int = 1000) -> tuple[np.ndarray, Record]:
    """Tensors of very different magnitudes, and their records, stacked."""
    rng = np.random.default_rng()
    scales = 10.0 ** rng.uniform(-12, 8, (count, 1))
    x = (rng.standard_normal((count, 40)) * scales).astype(np.float32)
    x[rng.random(x.shape) < 0.05] = 0
    x[:3, 0] = np.inf, np.nan, 1e-45
    return x, jax.jit(jax.vmap(SPEC.measure))(x)


@pytest.mark.slow
def test_a_thousand_records_merge_to_that_of_all_at_once():
    x, records = measure_many()
    step = lambda merged, record: (merge(merged, record), None)
    merged, _ = jax.jit(lambda records: lax.scan(step, SPEC.empty(1), records))(records)
    whole = jax.jit(SPEC.measure)(x)
    times = np.zeros(whole.counts.shape[-1], object)
    times[0] = 999
    assert (read_counts(merged) == read_counts(whole) + times).all()
    np.testing.assert_array_equal(merged.extremes, whole.extremes)
    assert merged.exponents == whole.exponents
    # Casts without a scale are the same ones; the best scale is another for each record.
    same = [0, 1, 3]
    np.testing.assert_allclose(np.sqrt(read_sums(merged)[0, same] / read_sums(whole)[0, same]), 1, rtol=1e-6)
    squares = (x[np.isfinite(x)].astype(np.float64) ** 2).sum()
    assert abs(np.sqrt(read_sums(merged)[0, 0] / squares) - 1) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 1000])
def test_to_fold_is_to_merge_one_by_one(length):
    records = jax.tree.map(lambda leaf: leaf[:length], measure_many()[1])
    step = lambda merged, record: (merge(merged, record), None)
    merged, _ = jax.jit(lambda records: lax.scan(step, SPEC.empty(1), records))(records)
    assert_equal(jax.jit(fold)(records), merged)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_any_leading_axis_folds(axis):
    records = jax.tree.map(lambda leaf: leaf[:12].reshape(3, 4, *leaf.shape[1:]), measure_many()[1])
    folded = jax.jit(fold, static_argnums=1)(records, axis)
    for i in range((4, 3)[axis]):
        take = lambda leaf, i=i: leaf[i] if axis else leaf[:, i]
        assert_equal(jax.tree.map(lambda leaf, i=i: leaf[i], folded), fold(jax.tree.map(take, records)))


@pytest.mark.slow
def test_more_turns_than_16_bits_count_fold():
    record = jax.jit(SPEC.measure)(jnp.asarray([1.0, -3.0, 0.0, 2.0**-30]))
    turns = 70_001
    folded = jax.jit(fold)(jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (turns, *leaf.shape)), record))
    assert (read_counts(folded) == turns * read_counts(record)).all()
    np.testing.assert_allclose(read_sums(folded), turns * read_sums(record), rtol=1e-12)


@pytest.mark.slow
def test_no_turns_fold_to_what_was_never_measured():
    none = jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), SPEC.empty(2))
    jax.tree.map(np.testing.assert_array_equal, fold(none), SPEC.empty(2))


@pytest.mark.slow
def test_to_merge_commutes_and_associates():
    records = [jax.tree.map(lambda leaf, i=i: leaf[i], measure_many()[1]) for i in range(3)]
    a, b, c = records
    assert_equal(merge(a, b), merge(b, a))
    assert_equal(merge(merge(a, b), c), merge(a, merge(b, c)))


@pytest.mark.slow
def test_what_was_never_measured_changes_nothing():
    record = jax.jit(SPEC.measure)(jnp.asarray([1e-40, 3e38, 0.0]))
    for merged in (merge(record, SPEC.empty(1)), merge(SPEC.empty(1), record)):
        jax.tree.map(np.testing.assert_array_equal, merged, record)
    empty = SPEC.empty(1)
    assert read_counts(empty).sum() == 0
    assert empty.extremes.tolist() == [[0.0, float("inf")]]


@pytest.mark.slow
def test_subnormal_extremes_survive_a_merge():
    small, zero = (jax.jit(SPEC.measure)(jnp.asarray([value], jnp.float32)) for value in (1e-45, 0.0))
    merged = jax.jit(merge)(zero, small)
    assert np.asarray(merged.extremes).view(np.int32).tolist() == [[1, 1]]


@pytest.mark.slow
def test_a_billion_merges_of_a_billion_numbers_overflow_nothing():
    record = jax.jit(SPEC.measure)(jnp.asarray(np.random.default_rng().uniform(1, 2, 1000), jnp.float32))
    billion = jnp.asarray([10**9], jnp.uint32)
    record = record._replace(counts=jnp.stack([billion.repeat(record.counts.shape[-1])] * 2, 0)[None].at[:, 1].set(0))
    merged = jax.jit(lambda record: lax.fori_loop(0, 30, lambda _, merged: merge(merged, merged), record))(record)
    assert set(read_counts(merged).ravel()) == {2**30 * 10**9}
    np.testing.assert_allclose(read_sums(merged), 2.0**30 * read_sums(record), rtol=1e-12)


@pytest.mark.slow
def test_a_hundred_thousand_merges_in_turn_keep_twelve_digits_of_a_sum():
    record = jax.jit(SPEC.measure)(jnp.asarray(np.random.default_rng().uniform(1, 2, 1000), jnp.float32))
    count = 100_000
    merged = jax.jit(lambda a: lax.fori_loop(0, count, lambda _, merged: merge(merged, a), SPEC.empty(1)))(record)
    np.testing.assert_allclose(read_sums(merged), count * read_sums(record), rtol=1e-12 * count**0.5)


@pytest.mark.slow
def test_rows_join_below_each_other():
    first, second = SPEC.empty(2), jax.jit(SPEC.measure)(jnp.ones(3))
    joined = join_records([first, second])
    assert joined.counts.shape[0] == 3
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf: leaf[2:], joined), second)
    batched = join_records([jax.tree.map(lambda leaf: leaf[None], record) for record in (first, second)])
    jax.tree.map(np.testing.assert_array_equal, batched, jax.tree.map(lambda leaf: leaf[None], joined))


@pytest.mark.slow
def test_records_of_float64_fold_in_float64():
    spec = StatsSpec(("float16",), dtype=np.dtype("float64"))
    with jax.enable_x64(True):
        x = np.random.default_rng().standard_normal((50, 30)) * 1e200
        records = jax.jit(jax.vmap(spec.measure))(jnp.asarray(x))
        folded = jax.jit(fold)(records)
        assert folded.extremes.dtype == np.float64
        units = 2.0 ** int(folded.exponents[0])
        np.testing.assert_allclose(np.asarray(folded.sums)[0, 0].sum(), ((x / units) ** 2).sum(), rtol=1e-12)
