"""`all_finite` sees every number that is not finite, wherever it stands and however XLA computes the array.

Small arrays prove nothing here: from some thousand float32 numbers on XLA:CPU reduces by vectors, and such a `max`
loses a nan, as does a `sum` into which it fuses a maximum.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P
from meshes import find_devices

import jmp_policy as jmp

SIZES = [1, 4095, 4096, 4097, 100_003, 10**6]
DTYPES = ["float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3", "complex64"]
BAD = [np.nan, np.inf, -np.inf]

FUSED = {
    "scaled": lambda x: x * 2.0,
    "maximum": lambda x: jnp.maximum(x, 0.0),
    "maximum of a constant": lambda x: jnp.maximum(0.0, x),
    "minimum": lambda x: jnp.minimum(-x, 1.0),
    "clip": lambda x: jnp.clip(x, -1.0, 1.0),
    "relu": jax.nn.relu,
    "exp": lambda x: jnp.exp(x - 1.0),
    "where": lambda x: jnp.where(x > 5.0, 0.0, x),
    "difference": lambda x: x - 0.5 * x,
    "cast": lambda x: x.astype(jnp.bfloat16),
    "transposed": lambda x: x[: x.size // 8 * 8].reshape(8, -1).T,
    "reversed": lambda x: x[::-1],
    "strided": lambda x: x[1::2],
}

all_finite = jax.jit(jmp.all_finite)


def _positions(size):
    return sorted({0, size // 2, size - 1})


@functools.cache
def _draw(size, dtype):
    rng = np.random.default_rng(size)
    return np.asarray(rng.uniform(0.1, 1.0, size), dtype)


def _with(bad, position, array):
    spoilt = array.copy()
    spoilt.flat[position] = bad
    return spoilt


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_number_is_seen_in_arrays_of_any_size(size, dtype):
    array = _draw(size, dtype)
    assert all_finite(array)
    assert jmp.all_finite(array)
    for bad in BAD:
        for position in _positions(size):
            assert not all_finite(_with(bad, position, array)), (bad, position)
    assert not jmp.all_finite(_with(np.nan, size // 2, array))


@pytest.mark.slow
def test_one_bad_number_is_seen_in_float64():
    with jax.enable_x64(True):
        for size in (7, 4097, 100_003):
            array = _draw(size, "float64")
            assert jmp.all_finite(array)
            assert not any(jmp.all_finite(_with(bad, place, array)) for bad in BAD for place in _positions(size))


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_many_large_numbers_are_finite(dtype):
    assert all_finite(np.full(100_003, jnp.finfo(dtype).max, dtype))


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
@pytest.mark.parametrize("bad", BAD)
def test_layouts_of_large_arrays_are_seen_through(bad):
    matrix = _with(bad, 64 * 65 + 3, _draw(100 * 65, "float32")).reshape(100, 65)
    for view in (matrix, matrix.T, matrix[1:, 1:], np.asfortranarray(matrix), matrix[::-1, ::2]):
        assert bool(jmp.all_finite(jnp.asarray(view))) == bool(np.isfinite(view).all())
    assert not jax.jit(lambda x: jmp.all_finite(x[:, 1:].T))(matrix)


@pytest.mark.slow
def test_large_rows_are_seen_one_by_one_under_vmap_and_scan():
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


@pytest.mark.slow
def test_a_layer_with_bad_gradients_of_realistic_size_is_skipped():
    params = {"kernel": jnp.ones((64, 64)), "bias": jnp.zeros(64)}
    bad = {"kernel": jnp.ones((64, 64)).at[:, 7].set(jnp.nan), "bias": jnp.ones(64)}
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), jmp.DynamicLossScale())
    step = functools.partial(jmp.optim.step, tx)
    for way in (step, jax.jit(step)):
        new, state = way(bad, tx.init(params), params)
        assert int(state.skipped_steps) == 1
        assert all((new[name] == params[name]).all() for name in params)


@pytest.mark.cpu("the figures are those of XLA:CPU")
def test_the_check_writes_a_byte_for_each_number_and_no_more():
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    compiled = jax.jit(jmp.all_finite).lower([w]).compile()
    assert compiled.cost_analysis()["bytes accessed"] <= 1.51 * w.size * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.01 * w.size
