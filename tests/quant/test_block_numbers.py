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
from meshes import make_mesh
from programs import cost
from properties import examples

from jmp_policy.quant._block_numbers import Blocks, dequantize, draw_noise, pack, quantize_mx, quantize_nv, unpack

FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2, "e2m1": jnp.float4_e2m1fn}
ROUNDINGS = ["up", "floor"]
TINY = np.finfo(np.float32).tiny
HUGE = np.finfo(np.float32).max
F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)

compiled_mx = jax.jit(quantize_mx, static_argnums=(1, 2, 3), static_argnames="rounding")
compiled_nv = jax.jit(
    quantize_nv, static_argnums=(1, 2), static_argnames=("axis", "block_size", "square_axis", "tensor_axes")
)
compiled_dequantize = jax.jit(dequantize, static_argnums=(1, 2))


def normal(*shape, dtype=F32):
    return np.random.default_rng().normal(size=shape).astype(dtype)


def assert_same(ours, model):
    """Asserts that all bits are the same, of scales and of values, but for the sign of nan."""
    for part, by_hand in zip(ours, model, strict=True):
        assert (part is None) == (by_hand is None)
        if part is not None:
            part = np.asarray(part)
            assert part.dtype == by_hand.dtype
            assert part.shape == by_hand.shape
            both_nan = np.isnan(part.astype(np.float32)) & np.isnan(by_hand.astype(np.float32))
            bits = np.dtype(f"u{part.dtype.itemsize}")
            a, b = (np.ascontiguousarray(each).view(bits) for each in (part, by_hand))
            np.testing.assert_array_equal(np.where(both_nan, 0, a), np.where(both_nan, 0, b))


def patterns(dtype):
    """Blocks of 8, of which the largest number is each of the numbers of 16 bits; the rest is up to it, at random."""
    random, first = np.random.default_rng(), np.arange(2**16)[:, None]
    rest = (random.random((2**16, 7)) ** 2 * ((first & 0x7FFF) + 1)).astype(int) | random.choice(
        [0, 0x8000], (2**16, 7)
    )
    return np.concatenate([first, rest], 1).astype(np.uint16).view(dtype)


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


@pytest.mark.parametrize("name", FORMATS)
def test_the_model_rounds_as_ml_dtypes_does(name):
    dtype = np.dtype(FORMATS[name])
    largest = block_model.LARGEST[dtype]
    x = np.concatenate(
        [np.exp(normal(3000) * 6) * np.sign(normal(3000)), np.arange(-20, 20) / 8, [-0.0, 1e-30, -1e-30]]
    )
    x = np.clip(x, -largest, largest).astype(np.float32)
    np.testing.assert_array_equal(block_model.nearest(x.astype(np.float64), dtype), x.astype(dtype).view(np.uint8))
    assert largest == float(jnp.finfo(dtype).max)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_powers_of_two_and_values_are_right_in_every_bit(name, rounding):
    x = borders()
    assert x.size > 2**17  # compilers go about few numbers in another way
    assert_same(compiled_mx(x, FORMATS[name], 1, rounding=rounding), block_model.mx(x, FORMATS[name], 1, 32, rounding))


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_number_of_16_bits_may_be_the_largest_of_a_block(dtype, rounding):
    x = patterns(dtype)
    for format in FORMATS.values():
        assert_same(compiled_mx(x, format, 1, 8, rounding=rounding), block_model.mx(x, format, 1, 8, rounding))


CASES = [
    ((32,), 0, 32, F32),
    ((64, 3), 0, 16, BF16),
    ((3, 128), -1, 64, F32),
    ((2, 48, 5), 1, 8, F16),
    ((2, 3, 32), -1, 32, BF16),
    ((16, 2, 3), -3, 1, F32),
    ((0, 32), 1, 16, F32),
    ((32, 0), 0, 16, F32),
]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axis", "block_size", "dtype"), CASES, ids=str)
def test_blocks_may_lie_along_any_axis_and_have_any_size(shape, axis, block_size, dtype):
    x = normal(*shape, dtype=dtype)
    assert_same(
        compiled_mx(x, jnp.float8_e4m3fn, axis, block_size), block_model.mx(x, jnp.float8_e4m3fn, axis, block_size)
    )
    assert_same(compiled_nv(x, axis, block_size), block_model.nv(x, axis, block_size))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_rounded_up_clip_nothing_and_are_the_least_that_do(name):
    x, largest = np.exp(normal(512, 32) * 9), float(jnp.finfo(FORMATS[name]).max)
    scale = np.asarray(compiled_mx(x, FORMATS[name], 1).scale).astype(np.float64)
    amax = np.abs(x.astype(np.float64)).max(1, keepdims=True)
    assert (amax <= largest * scale).all()
    assert (amax > largest * scale / 2).all()


@pytest.mark.slow
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*FORMATS, "nv"])
def test_what_is_not_finite_makes_a_block_nan_and_no_other_one(name, bad):
    x, without = (np.ones((4, 64), np.float32) for _ in range(2))
    x[1, 40], without[1, 32:] = bad, 0
    quantized = compiled_nv if name == "nv" else lambda x, axis, size: compiled_mx(x, FORMATS[name], axis, size)
    blocks = quantized(x, 1, 32)
    by_hand = np.asarray(dequantize(quantized(without, 1, 32), 1)).copy()
    by_hand[1, 32:] = np.nan
    np.testing.assert_array_equal(dequantize(blocks, 1), by_hand)
    np.testing.assert_array_equal(np.isnan(blocks.scale.astype(jnp.float32)), np.isnan(by_hand[:, ::32]))


@pytest.mark.exhaustive
def test_eager_calls_and_vmap_return_the_bits_of_compiled_ones():
    x = normal(4, 8, 32)
    for format in FORMATS.values():
        whole = compiled_mx(x, format, 2)
        assert_same(quantize_mx(jnp.asarray(x), format, -1), whole)
        assert_same(jax.vmap(lambda x: quantize_mx(x, format, -1))(x), whole)
    assert_same(quantize_nv(jnp.asarray(x), 2), compiled_nv(x, 2))
    assert_same(quantize_nv(jnp.asarray(x), 2), jax.jit(lambda: quantize_nv(jnp.asarray(x), 2))())
    one_by_one = jax.vmap(lambda x: quantize_nv(x, 1, square_axis=0))(x)
    assert_same(one_by_one, compiled_nv(x, 2, square_axis=1, tensor_axes=(1, 2)))


@pytest.mark.slow
def test_float64_is_rounded_to_float32_first():
    x = normal(8, 32)
    with jax.enable_x64(True):
        wide = jnp.asarray(x.astype(np.float64) * (1 + 2.0**-40))
        assert wide.dtype == jnp.float64
        ours = [
            compiled_mx(wide, jnp.float8_e4m3fn, 1),
            compiled_nv(wide, 1),
            compiled_nv(wide, 1, key=jax.random.key(1)),
        ]
        back = compiled_dequantize(ours[1], 1, jnp.float64)
    noise = np.asarray(draw_noise(jax.random.key(1), x.shape, 1))
    by_hand = [block_model.mx(x, jnp.float8_e4m3fn, 1), block_model.nv(x, 1), block_model.nv(x, 1, noise=noise)]
    for a, b in zip(ours, by_hand, strict=True):
        assert_same(a, b)
    np.testing.assert_array_equal(back, block_model.numbers(ours[1], 1))


NV_CASES = {
    "one row": ((48,), {"axis": 0}),
    "columns": ((32, 5), {"axis": 0}),
    "squares": ((32, 48), {"axis": 1, "square_axis": 0}),
    "squares, ragged": ((32, 21), {"axis": 0, "square_axis": 1}),
    "squares of 32, ragged, few": ((3, 9, 64), {"axis": -1, "block_size": 32, "square_axis": -2}),
    "squares of stacks": ((3, 20, 32), {"axis": 2, "square_axis": 1, "tensor_axes": (1, 2)}),
    "stacks": ((3, 4, 32), {"axis": -1, "tensor_axes": (-2, -1)}),
    "rows of their own": ((6, 32), {"axis": 1, "tensor_axes": (1,)}),
    "stack in the middle": ((16, 4, 5), {"axis": 0, "tensor_axes": (0, 2)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", NV_CASES)
def test_two_levels_of_scales_are_right_in_every_bit(case):
    shape, options = NV_CASES[case]
    x = np.exp(normal(*shape) * 4) * normal(*shape)
    x.flat[[3, 17]] = 0, np.nan
    ours = compiled_nv(x, **options)
    assert_same(ours, block_model.nv(x, **options))
    np.testing.assert_array_equal(
        compiled_dequantize(ours, options["axis"]), block_model.numbers(ours, options["axis"])
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-44, 1e-40, 1e-38, 1e-36, 1e-34, 1e-30, 1.0, 1e30, HUGE])
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


@pytest.mark.slow
def test_blocks_of_any_bits_have_the_scales_of_the_rule():
    x = borders()
    assert_same(compiled_nv(x, 1), block_model.nv(x, 1))
    assert_same(compiled_nv(x, 1, 32, tensor_axes=(1,)), block_model.nv(x, 1, 32, tensor_axes=(1,)))


@pytest.mark.exhaustive
def test_numbers_at_ties_fall_as_the_rule_rounds_to_float32_on_the_way():
    random, shape = np.random.default_rng(), (1000, 64)

    def near(x):
        return x * (1 + random.integers(-2, 3, x.shape) * 2.0**-24)

    amax = random.uniform(1, 4, (1000, 1)).astype(np.float32)
    s, grid = block_model.round24(2688 / amax.astype(np.float64)), block_model.positive(block_model.E4M3)
    ties = random.choice((grid[1:] + grid[:-1])[60:] / 2, (1000, 3))
    x = np.zeros(shape)
    x[:, :1], x[:, 16::16] = amax, np.minimum(near(ties * 6 / s), amax)
    scale = np.repeat(block_model.nv(x, 1, tensor_axes=(1,)).scale.astype(np.float64), 16, 1)
    x = np.where(x == 0, near(random.choice([0.25, 0.75, 1.25, 1.75, 2.5, -3.5], shape) * scale / s), x)
    x = jnp.asarray(x, jnp.float32)
    by_hand = block_model.nv(x, 1, tensor_axes=(1,))
    assert_same(compiled_nv(x, 1, tensor_axes=(1,)), by_hand)
    assert_same(quantize_nv(x, 1, tensor_axes=(1,)), by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 64), (5, 48)])
def test_random_rounding_takes_the_noise_of_its_key(shape):
    x, key = normal(*shape) * 5, jax.random.key(7)
    for axis in (0, 1):
        size = 16 if shape[axis] % 16 == 0 else shape[axis]
        noise = np.asarray(draw_noise(key, shape, axis))
        assert_same(compiled_nv(x, axis, size, key=key), block_model.nv(x, axis, size, noise=noise))
    assert_same(compiled_nv(x, 1, 16, key=key)[1:], compiled_nv(x, 1, 16)[1:])
    assert (
        np.asarray(compiled_nv(x, 1, 16, key=jax.random.key(8)).values) != compiled_nv(x, 1, 16, key=key).values
    ).any()


@pytest.mark.slow
def test_noise_is_uniform_and_has_no_neighbours_alike():
    bits = np.asarray(draw_noise(jax.random.key(3), (64, 1024), 1)).ravel()
    counts = np.bincount(bits, minlength=256)
    expected = bits.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)  # chi squared, 5 sigma
    for distance in (1, 2, 3, 4):
        assert abs(np.corrcoef(bits[:-distance], bits[distance:])[0, 1]) < 5 / np.sqrt(bits.size)


def test_random_rounding_is_right_on_average_and_moves_no_further_than_a_neighbour():
    grid = block_model.positive(block_model.E2M1)
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


@pytest.mark.exhaustive
def test_bits_are_the_same_however_an_array_is_sharded():
    mesh, key = make_mesh((2, 2), ("a", "b")), jax.random.key(2)
    x = normal(64, 128)

    def all_of(x):
        squares = quantize_nv(x, 1, square_axis=0)
        return quantize_mx(x, jnp.float8_e4m3fn, 0), squares, quantize_nv(x, 1, key=key), dequantize(squares, 1)

    alone = jax.jit(all_of)(x)
    for spec in (("a", "b"), ("b", None), (None, ("a", "b"))):
        spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
        for ours, by_hand in zip(jax.tree.leaves(jax.jit(all_of)(spread)), jax.tree.leaves(alone), strict=True):
            assert_same([ours], [np.asarray(by_hand)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", FORMATS)
def test_products_with_a_scale_are_exact_where_they_are_normal(name):
    dtype = np.dtype(FORMATS[name])
    codes = np.arange(16 if name == "e2m1" else 256, dtype=np.uint8).view(dtype)
    scale = np.arange(256, dtype=np.uint8).view(block_model.E8M0)
    blocks = Blocks(jnp.asarray(np.tile(codes, (256, 1)).astype(dtype)), jnp.asarray(scale[:, None]))
    exact = block_model.numbers(blocks, 1)
    ours = np.asarray(compiled_dequantize(blocks, 1)).astype(np.float64)
    with np.errstate(over="ignore"):
        exact = exact.astype(np.float32).astype(np.float64)
    normal = ~(np.abs(exact) < TINY)
    np.testing.assert_array_equal(ours[normal], exact[normal])
    assert (np.abs(ours[~normal]) <= TINY).all()


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", FORMATS)
def test_rounded_numbers_are_not_rounded_again(name, rounding):
    x = borders()
    x = x[(np.abs(x) < 1e37).all(1) & (np.abs(x) > 1e-30).any(1)]
    blocks = compiled_mx(x, FORMATS[name], 1, rounding=rounding)
    numbers = np.asarray(compiled_dequantize(blocks, 1))
    again = compiled_mx(numbers, FORMATS[name], 1, rounding=rounding)
    # Where the largest number of a block was rounded down to a border, the next time half the scale is enough for it.
    np.testing.assert_array_equal(compiled_dequantize(again, 1), numbers)
    if rounding == "floor":
        np.testing.assert_array_equal(again.scale.astype(jnp.float32), blocks.scale.astype(jnp.float32))


@examples(12)
@given(strategies.data(), strategies.sampled_from([ml_dtypes.float4_e2m1fn, ml_dtypes.uint4]))
def test_two_numbers_go_into_a_byte_and_come_back(data, dtype):
    shape = data.draw(arrays.array_shapes(min_dims=1, max_dims=3, max_side=7))
    axis = data.draw(strategies.integers(-len(shape), len(shape) - 1))
    codes = data.draw(arrays.arrays(np.uint8, shape, elements=strategies.integers(0, 15)))
    packed = pack(jnp.asarray(codes.view(dtype)), axis)
    pad = [(0, shape[axis] % 2 if i == axis % len(shape) else 0) for i in range(len(shape))]
    even = np.pad(codes, pad)
    halves = np.split(even, 2, axis)
    pairs = [np.take(even, range(i, even.shape[axis], 2), axis) for i in (0, 1)]
    low, high = halves if dtype == ml_dtypes.uint4 else pairs
    np.testing.assert_array_equal(packed, low | (high << 4))
    back = unpack(packed, axis, dtype)
    assert back.dtype == (np.uint8 if dtype == ml_dtypes.uint4 else dtype)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8), even)


@pytest.mark.parametrize("axis", [0, 1])
def test_integers_are_unpacked_where_jax_refuses_to_promote_ranks(axis):
    values = jnp.arange(12, dtype=jnp.uint8).reshape(2, 6)
    with jax.numpy_rank_promotion("raise"):
        back = unpack(pack(values.astype(jnp.uint4), axis), axis, jnp.uint4)
    np.testing.assert_array_equal(back, values)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS, "nv"])
def test_scaled_dot_multiplies_these_numbers(name):
    x, w = normal(24, 128), normal(128, 16)

    def both(x, w):
        if name == "nv":
            return quantize_nv(x, 1), quantize_nv(w, 0, square_axis=1)
        return quantize_mx(x, FORMATS[name], 1), quantize_mx(w, FORMATS[name], 0)

    @jax.jit
    def product(x, w):
        left, right = both(x, w)
        out = jax.lax.scaled_dot(
            left.values,
            right.values,
            lhs_scale=left.scale,
            rhs_scale=right.scale,
            preferred_element_type=jnp.float32,
        )
        return out if left.tensor_scale is None else out * left.tensor_scale * right.tensor_scale

    left, right = (block_model.numbers(blocks, axis) for blocks, axis in zip(jax.jit(both)(x, w), (1, 0), strict=True))
    bound = (128 + 4) * 2.0**-24 * (np.abs(left) @ np.abs(right))  # of the sum, and of the scales of tensors
    assert (np.abs(product(x, w) - left @ right) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [(jnp.float32, 4), (jnp.bfloat16, 2)], ids=["float32", "bfloat16"])
def test_an_array_is_read_twice_and_never_written_wide(dtype, width):
    x = jnp.ones((1024, 1024), dtype)
    bounds = {
        "mx": (lambda x: quantize_mx(x, jnp.float8_e4m3fn, 1), 2 * width + 1 + 0.5, 0.13),
        "nv": (lambda x: quantize_nv(x, 1), 2 * width + 1 + 2, 0.51),
        "squares": (lambda x: quantize_nv(x, 1, square_axis=0), 2 * width + 1 + 1, 0.3),
    }
    for fun, bytes_moved, temporaries in bounds.values():
        found = cost(fun, x)
        assert found.bytes <= bytes_moved * x.size
        assert found.temporaries <= temporaries * x.size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float4_e2m1fn, jnp.uint4])
def test_bytes_that_are_constants_of_a_program_are_unpacked_as_others_are(dtype):
    """XLA of jax 0.10 took their halves for bytes."""
    packed = jnp.asarray(np.random.default_rng().integers(0, 256, (16, 6)), jnp.uint8)
    wide = lambda packed: unpack(packed, 0, dtype).astype(jnp.float32)
    np.testing.assert_array_equal(jax.jit(lambda: wide(packed))(), wide(packed))
