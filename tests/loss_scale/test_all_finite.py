"""`all_finite` sees every number that is not finite, wherever it stands and however XLA computes the array.

Small arrays prove nothing here: from some thousand float32 numbers on XLA:CPU reduces by vectors, and such a `max`
loses a nan, as does a `sum` into which it fuses a maximum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from meshes import find_devices

import jmp_policy as jmp

BAD = [np.nan, np.inf, -np.inf]

FUSED = {
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "minimum": lambda x: jnp.minimum(-x, 1.0),
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "exp": lambda x: jnp.exp(x - 1.0),
    "where": lambda x: jnp.where(x > 5.0, 0.0, x),
    "difference": lambda x: x - 0.5 * x,
    "cast": lambda x: x.astype(jnp.bfloat16),
    "transposed": lambda x: x[: x.size // 8 * 8].reshape(8, -1).T,
    "strided": lambda x: x[1::2],
}

all_finite = jax.jit(jmp.all_finite)


@functools.cache
def _draw(size, dtype):
    rng = np.random.default_rng(size)
    return np.asarray(rng.uniform(0.1, 1.0, size), dtype)


def _with(bad, position, array):
    spoilt = array.copy()
    spoilt.flat[position] = bad
    return spoilt


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        (1, "float32"),
        (4097, "float16"),
        pytest.param(4095, "bfloat16", marks=pytest.mark.slow),
        pytest.param(4096, "float32", marks=pytest.mark.slow),
        pytest.param(100_003, "float8_e5m2", marks=pytest.mark.slow),
        pytest.param(4097, "float8_e4m3", marks=pytest.mark.slow),
        pytest.param(100_003, "float32", marks=pytest.mark.slow),
        pytest.param(10**6, "complex64", marks=pytest.mark.slow),
        pytest.param(4097, "float64", marks=pytest.mark.slow),
    ],
)
def test_one_bad_number_is_seen_in_arrays_of_any_size(size, dtype):
    with jax.enable_x64(dtype == "float64"):
        array = _draw(size, dtype)
        assert all_finite(array)
        assert all_finite(np.full(size, jnp.finfo(array.dtype).max, array.dtype))
        assert jmp.all_finite(array)
        for bad in BAD:
            for position in {0, size // 2, size - 1}:
                assert not all_finite(_with(bad, position, array)), (bad, position)
        assert not jmp.all_finite(_with(np.nan, size // 2, array))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_bad_numbers_are_seen_through_what_xla_fuses_into_the_check(name):
    """The array is compared with itself as it is without the check beside it, which is what training would use."""
    check = jax.jit(lambda x: jmp.all_finite(FUSED[name](x)))
    alone = jax.jit(FUSED[name])
    array = _draw(5000, "float32")
    for bad in [None, *BAD]:
        for position in (0, 1, 4096, 4999):
            given = array if bad is None else _with(bad, position, array)
            assert bool(check(given)) == bool(np.isfinite(np.asarray(alone(given), np.float32)).all()), (bad, position)


@pytest.mark.slow
def test_an_overflow_in_what_is_checked_is_not_folded_away():
    """XLA multiplies constants with each other first, so that 0 * (2 * x) would never overflow."""
    large = np.full(10_000, 3e38, np.float32)
    assert not jax.jit(lambda x: jmp.all_finite(x * 2.0))(large)
    assert not jax.jit(lambda x: jmp.all_finite(x / 0.25))(large)
    assert jax.jit(jmp.all_finite)(large)


@pytest.mark.slow
def test_layouts_rows_under_vmap_and_rows_of_a_scan_are_seen_through():
    matrix = _with(np.nan, 64 * 65 + 3, _draw(100 * 65, "float32")).reshape(100, 65)
    for view in (matrix, matrix.T, matrix[1:, 1:], np.asfortranarray(matrix), matrix[::-1, ::2]):
        assert bool(jmp.all_finite(jnp.asarray(view))) == bool(np.isfinite(view).all())
    assert not jax.jit(lambda x: jmp.all_finite(x[:, 1:].T))(matrix)
    rows = np.stack([_draw(5000, "float32")] * 4)
    rows[1, 4999], rows[2, 0] = np.nan, -np.inf
    expected = [True, False, False, True]
    assert jax.jit(jax.vmap(jmp.all_finite))(rows).tolist() == expected
    assert jax.jit(jax.vmap(jmp.all_finite, in_axes=1))(rows.T).tolist() == expected
    _, scanned = jax.jit(lambda rows: jax.lax.scan(lambda carry, row: (carry, jmp.all_finite(row)), 0, rows))(rows)
    assert scanned.tolist() == expected


@pytest.mark.slow
def test_large_shards_are_seen():
    mesh = Mesh(np.array(find_devices(2)), ("d",))
    array = _with(np.nan, 9000, _draw(10_000, "float32"))
    local = jax.shard_map(lambda x: jmp.all_finite(x)[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    assert jax.jit(local)(array).tolist() == [True, False]
    sharded = jax.device_put(array, jax.sharding.NamedSharding(mesh, P("d")))
    assert not all_finite(sharded)


def test_one_bad_leaf_of_many_is_seen():
    tree = [_draw(4096, "float32"), _draw(3, "bfloat16"), _draw(70, "complex64")]
    assert all_finite(tree)
    for leaf in range(3):
        assert not all_finite([_with(np.nan, 2, x) if i == leaf else x for i, x in enumerate(tree)])


@pytest.mark.cpu("the figures are those of XLA:CPU")
def test_the_check_writes_a_byte_for_each_number_and_no_more():
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = jax.jit(jmp.all_finite).lower([w]).compile()
    assert compiled.cost_analysis()["bytes accessed"] <= 1.51 * w.size * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.01 * w.size
