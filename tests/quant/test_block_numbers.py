"""Numbers in blocks that share a scale, bit for bit, on their borders and where they are not finite."""

import functools

import block_model
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies
from hypothesis.extra import numpy as arrays
from properties import examples

from jmp_policy.quant import Layout, dequantize, pack, quantize_array, quantize_mx, quantize_nv

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}
PAIRS = [("e4m3", "up"), ("e5m2", "floor"), ("e2m1", "up")]
TINY = np.finfo(np.float32).tiny
HUGE = np.finfo(np.float32).max

compiled_mx = jax.jit(quantize_mx, static_argnums=(1, 2, 3), static_argnames="rounding")
compiled_nv = jax.jit(
    quantize_nv, static_argnums=(1, 2), static_argnames=("axis", "block_size", "square_axis", "tensor_axes")
)
compiled_dequantize = jax.jit(dequantize, static_argnums=(1, 2))


def normal(*shape):
    return np.random.default_rng().normal(size=shape).astype(np.float32)


def assert_same(ours, model):
    """Asserts that all bits are the same, of scales and of values, but for the sign of nan."""
    for part, by_hand in zip(ours, model, strict=True):
        assert (part is None) == (by_hand is None)
        if part is not None:
            part = np.asarray(part)
            assert (part.dtype, part.shape) == (by_hand.dtype, by_hand.shape)
            both_nan = np.isnan(part.astype(np.float32)) & np.isnan(by_hand.astype(np.float32))
            bits = np.dtype(f"u{part.dtype.itemsize}")
            a, b = (np.ascontiguousarray(each).view(bits) for each in (part, by_hand))
            np.testing.assert_array_equal(np.where(both_nan, 0, a), np.where(both_nan, 0, b))


@functools.cache
def borders():
    """Blocks of 32 in float32: the largest of every format times powers of two, its neighbours, and any bits."""
    powers = np.ldexp(1.0, np.arange(-166, 128))
    edges = np.concatenate([powers * top for top in (1, 1.5, 1.75)])
    edges = edges[edges <= HUGE].astype(np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(HUGE)), np.nextafter(edges, np.float32(0)), [HUGE]])
    random = np.random.default_rng()
    any_bits = random.integers(0, 0x7F800000, 3200, np.uint32).view(np.float32)
    first = np.concatenate([edges, np.arange(40, dtype=np.uint32).view(np.float32), any_bits])[:, None]
    rest = np.float64(first) * random.choice([1, -1], (len(first), 31)) * random.random((len(first), 31)) ** 4
    blocks = np.concatenate([first, rest], 1).astype(np.float32)
    special = np.zeros((8, 32), np.float32)
    special[1] = -0.0
    special[2:, 1:] = [1, -TINY, 448, HUGE, *[3] * 27]
    special[2:, 0] = np.nan, np.inf, -np.inf, -np.nan, 0, -HUGE
    special[5, 31] = np.inf
    return random.permuted(np.concatenate([blocks, special]), axis=1)


@pytest.mark.parametrize(("name", "rounding"), PAIRS)
def test_powers_of_two_and_values_are_right_in_every_bit_and_rounded_once(name, rounding):
    x = borders()
    assert x.size > 2**17  # compilers go about few numbers in another way
    blocks = compiled_mx(x, FORMATS[name], 1, rounding=rounding)
    assert_same(blocks, block_model.mx(x, FORMATS[name], 1, 32, rounding))
    # Where the largest number of a block was rounded down to a border, the next time half the scale is enough for it.
    usual = (np.abs(x) < 1e37).all(1) & (np.abs(x) > 1e-30).any(1)
    numbers = np.asarray(compiled_dequantize(blocks, 1))
    again = compiled_dequantize(compiled_mx(numbers, FORMATS[name], 1, rounding=rounding), 1)
    np.testing.assert_array_equal(np.asarray(again)[usual], numbers[usual])


@pytest.mark.slow
def test_vmap_and_float64_return_the_bits_of_compiled_float32():
    x = normal(4, 8, 32)
    one_by_one = jax.vmap(lambda x: quantize_nv(x, 1, square_axis=0))(x)
    assert_same(one_by_one, compiled_nv(x, 2, square_axis=1, tensor_axes=(1, 2)))
    with jax.enable_x64(True):
        wide = jnp.asarray(x.astype(np.float64) * (1 + 2.0**-40))
        ours = compiled_mx(wide, FORMATS["e4m3"], 2), compiled_nv(wide, 2)
        back = compiled_dequantize(ours[1], 2, jnp.float64)
    assert_same(ours[0], compiled_mx(x, FORMATS["e4m3"], 2))
    assert_same(ours[1], block_model.nv(x, 2))
    np.testing.assert_array_equal(back, block_model.numbers(ours[1], 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((32, 21), {"axis": 0, "square_axis": 1}),
        ((3, 4, 32), {"axis": -1, "tensor_axes": (-2, -1)}),
        ((16, 2, 3), {"axis": -3, "block_size": 8}),
        ((3, 9, 64), {"axis": -1, "block_size": 32, "square_axis": -2}),
        ((3, 20, 32), {"axis": 2, "square_axis": 1, "tensor_axes": (1, 2)}),
    ],
)
def test_two_levels_of_scales_are_right_in_every_bit(shape, options):
    x = np.exp(normal(*shape) * 4) * normal(*shape)
    x.flat[[3, 17, 40]] = 0, np.nan, np.inf
    ours = compiled_nv(x, **options)
    assert_same(ours, block_model.nv(x, **options))
    numbers = block_model.numbers(ours, options["axis"])
    np.testing.assert_array_equal(compiled_dequantize(ours, options["axis"]), numbers)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-40, 1e-34, 1.0, HUGE])
def test_tensors_of_any_size_keep_their_numbers_and_overflow_nowhere(size):
    x = np.random.default_rng().uniform(-1, 1, (64, 64))
    x[0, 0] = 1
    x = (x * np.float64(size)).astype(np.float32)
    ours = compiled_nv(x, 1)
    assert_same(ours, block_model.nv(x, 1))
    numbers = np.asarray(compiled_dequantize(ours, 1), np.float64)
    assert np.isfinite(numbers).all()
    assert np.asarray(ours.tensor_scale) >= TINY  # a subnormal scale would be zero on some backends
    if size > 1e-36:  # what is less comes back subnormal
        assert np.linalg.norm(numbers - x) < 0.11 * np.linalg.norm(np.float64(x))
        assert abs(numbers[0, 0] / size - 1) < 0.04


def test_random_rounding_is_right_on_average_and_moves_no_further_than_a_neighbour():
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exact, between = np.concatenate([grid, -grid]), np.random.default_rng().uniform(-6, 6, 240)
    x = np.concatenate([exact, between]).astype(np.float32).reshape(16, 16)
    keys = jax.random.split(jax.random.key(np.random.default_rng().integers(2**31)), 400)
    # With the amax 2688 S is 1 and, since 6 stands in each block, so is each scale: the values are rounded as they are.
    x[:, 15] = 6
    with_amax = np.concatenate([x, np.full((1, 16), 2688, np.float32)])
    blocks = jax.jit(jax.vmap(lambda key: quantize_nv(with_amax, 1, key=key)))(keys)
    assert (np.asarray(blocks.scale, np.float32)[:, :16] == 1).all()
    values = np.asarray(blocks.values)[:, :16].astype(np.float64)
    low = np.array([np.max(grid[grid <= abs(each)]) for each in x.ravel()]).reshape(x.shape)
    high = np.array([np.min(grid[grid >= abs(each)]) for each in x.ravel()]).reshape(x.shape)
    assert ((np.abs(values) == low) | (np.abs(values) == high)).all()
    assert (np.signbit(values) == np.signbit(x)).all()
    assert (values[:, low == high] == x[low == high]).all()
    share = (np.abs(x) - low) / np.where(high > low, high - low, 1)
    sigma = np.sqrt(share * (1 - share) / len(keys))
    # 8 bits of noise: a chance is off by up to 2**-9. Near 0 and 1 the mean of few draws is far from normal: 4 draws
    # more than 6 sigma are allowed, so that 2 runs of 10 million fail.
    assert (np.abs(np.abs(values).mean(0) - np.abs(x)) <= (high - low) * (6 * sigma + 2.0**-9 + 4 / len(keys))).all()
    moved = (np.abs(values) == high)[:, low < high].astype(float)
    moved -= moved.mean(0)
    for distance in (1, 2, 3, 4):  # numbers beside each other share no noise
        products = moved[:, :-distance] * moved[:, distance:]
        assert abs(products.mean()) < 5 * products.std() / np.sqrt(products.size)


@pytest.mark.slow
def test_products_with_a_scale_are_exact_where_they_are_normal():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = np.arange(256, dtype=np.uint8).view(block_model.E8M0)
    made = quantize_mx(jnp.ones((256, 256)), FORMATS["e4m3"], 1, 256)
    blocks = made._replace(values=jnp.asarray(np.tile(codes, (256, 1))), scale=jnp.asarray(scale[:, None]))
    with np.errstate(over="ignore"):
        exact = block_model.numbers(blocks, 1).astype(np.float32).astype(np.float64)
    ours = np.asarray(compiled_dequantize(blocks, 1)).astype(np.float64)
    is_normal = ~(np.abs(exact) < TINY)
    np.testing.assert_array_equal(ours[is_normal], exact[is_normal])
    assert (np.abs(ours[~is_normal]) <= TINY).all()


@pytest.mark.slow
@examples(12)
@given(strategies.data(), strategies.sampled_from([ml_dtypes.float4_e2m1fn, ml_dtypes.uint4]))
def test_two_numbers_go_into_a_byte(data, dtype):
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, max_side=7))
    axis = data.draw(strategies.integers(-len(shape), len(shape) - 1))
    codes = data.draw(arrays.arrays(np.uint8, shape, elements=strategies.integers(0, 15)))
    packed = pack(jnp.asarray(codes.view(dtype)), axis)
    even = np.pad(codes, [(0, shape[axis] % 2 if i == axis % len(shape) else 0) for i in range(len(shape))])
    pairs = [np.take(even, range(i, even.shape[axis], 2), axis) for i in (0, 1)]
    low, high = np.split(even, 2, axis) if dtype == ml_dtypes.uint4 else pairs
    np.testing.assert_array_equal(packed, low | (high << 4))


@pytest.mark.parametrize("format", ["int4/2", "mxfp4/2"])
def test_two_numbers_come_back_from_a_byte(format):
    """Also where JAX refuses to promote ranks, and where they are constants: XLA of jax 0.10 took halves for bytes."""
    bits = np.random.default_rng().integers(0, 2, (3, 6, 4)).astype(np.float32)  # which both formats have
    stored = jax.jit(quantize_array, static_argnums=(1, 2))(bits, format, Layout((6,), 1))
    read = jax.jit(lambda stored: stored.dequantize())
    with jax.numpy_rank_promotion("raise"):
        np.testing.assert_allclose(read(stored), bits, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda: stored.dequantize())(), bits, rtol=1e-6)
