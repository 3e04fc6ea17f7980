"""The codes of moments: their entries against another construction, their rounding against a search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quantized_moments import DYNAMIC, UNSIGNED_FLOAT, DynamicCode, UnsignedFloatCode

CODES = {"dynamic": DYNAMIC, "unsigned_float": UNSIGNED_FLOAT}
every_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())

encode = jax.jit(lambda code, x, noise=None: code.encode(x, noise), static_argnums=0)
decode = jax.jit(lambda code, codes: code.decode(codes), static_argnums=0)


def linspace(count):
    """PyTorch's float32 linspace(.1, 1, count): from both ends to the middle, with one rounding for `a + b * c`."""
    first, last = np.float32(0.1), np.float32(1)
    step = (last - first) / np.float32(count - 1)
    # A product of 24 and 8 bits is exact in float64, and so is the sum.
    from_first = np.float64(first) + np.float64(step) * np.arange(count)
    from_last = np.float64(last) - np.float64(step) * np.arange(count)[::-1]
    return np.where(np.arange(count) < count // 2, from_first, from_last).astype(np.float32)


def construct_dynamic():
    """The entries as bitsandbytes constructs them."""
    entries = [0.0, 1.0]
    for i in range(7):
        ends = linspace(2**i + 1)
        decade = np.float32(10.0 ** (i - 6)) * ((ends[:-1] + ends[1:]) / np.float32(2))
        entries += [*decade, *-decade]
    return np.sort(np.array(entries, np.float32))


def construct_unsigned_float():
    entries = [(1 + mantissa / 8) * 2.0 ** (exponent - 32) for exponent in range(33) for mantissa in range(8)]
    entries = [0.0] + [entry for entry in entries if 2.0**-32 * 1.125 < entry <= 1]
    return np.array(entries, np.float32)


CONSTRUCTIONS = {"dynamic": construct_dynamic, "unsigned_float": construct_unsigned_float}


def find_borders(code):
    """The numbers above which the next entry is nearer, as float64."""
    values = code.values.astype(np.float64)
    borders = (values[:-1] + values[1:]) / 2
    if code == UNSIGNED_FLOAT:
        borders[0] = 0  # zero is the code of zero alone
    return borders


def numbers(code):
    """Entries and midpoints with their neighbours, edges, and random numbers in what the code is for."""
    rng = np.random.default_rng()
    edges = np.concatenate([code.values, find_borders(code).astype(np.float32)])
    around = [edges, -edges]
    for towards in (np.float32(-2), np.float32(2)):
        near = edges
        for _ in range(2):
            near = np.nextafter(near, towards)
            around.append(near)
    tiny = np.finfo(np.float32).tiny
    special = np.float32([0.0, -0.0, 1.0, -1.0, tiny, -tiny, tiny / 2, -tiny / 2, 1e-45, -1e-45])
    sign = rng.choice(np.float32([-1, 1]), 100_000)
    drawn = [rng.uniform(-1, 1, 100_000), sign * 10.0 ** rng.uniform(-12, 0, 100_000)]
    x = np.concatenate([*around, special, *drawn]).astype(np.float32)
    return x[np.abs(x) <= 1] if code == DYNAMIC else x[(x >= 0) & (x <= 1)]


@pytest.mark.parametrize("name", CODES)
def test_entries_equal_an_independent_construction_in_every_bit(name):
    code, by_hand = CODES[name], CONSTRUCTIONS[name]()
    assert code.values.dtype == np.float32
    assert code.values.shape == (256,)
    np.testing.assert_array_equal(code.values.view(np.int32), by_hand.view(np.int32))
    assert (np.diff(code.values) > 0).all()


def test_entries_that_pytorch_has_computed():
    # By `create_dynamic_map` with PyTorch 2.13 on a CPU with AVX2; without, the last bits of these are others.
    signed = {137: "0x1.8fc506p-12", 162: "0x1.451ebap-6", 236: "0x1.7accccp-1"}
    assert {at: float(DYNAMIC.values[at]) for at in signed} == {at: float.fromhex(each) for at, each in signed.items()}


@every_code
def test_codes_are_values_that_come_back_in_every_bit_clip_what_is_beyond_and_promote_nothing(code):
    codes = jnp.arange(256, dtype=jnp.uint8)
    decoded = decode(code, codes)
    assert decoded.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(decoded).view(np.int32), code.values.view(np.int32))
    beyond = np.float32([-np.inf, -3, -1.0001, 1.0001, 3, np.inf])
    x = jnp.concatenate([decoded, beyond])
    expected = np.array([*range(256), 0, 0, 0, 255, 255, 255], np.uint8)
    for noise in (None, np.uint16(0), np.uint16(2**16 - 1)):
        with jax.numpy_dtype_promotion("strict"):
            found = encode(code, x, noise if noise is None else jnp.full(x.shape, noise))
        assert found.dtype == jnp.uint8
        np.testing.assert_array_equal(found, expected)
    assert max(encode(code, jnp.float32([np.nan, -np.nan])).tolist()) < 256
    assert code in {DynamicCode(), UnsignedFloatCode()}


def test_an_entry_is_computed_as_it_is_looked_up():
    compute = jax.jit(DYNAMIC._compute_value)(jnp.arange(-127, 129))
    np.testing.assert_array_equal(np.asarray(compute).view(np.int32), DYNAMIC.values.view(np.int32))


@pytest.mark.slow
def test_a_second_moment_that_is_not_zero_is_never_rounded_to_zero():
    x = np.float32([1e-45, 1e-40, np.finfo(np.float32).tiny, 1e-30, 1e-10])
    for noise in (None, jnp.zeros(x.shape, jnp.uint16)):
        assert (encode(UNSIGNED_FLOAT, x, noise) == 1).all()
    assert encode(UNSIGNED_FLOAT, jnp.float32([0.0, -0.0])).tolist() == [0, 0]
    assert (encode(DYNAMIC, x) == 127).all()


@pytest.mark.slow
@every_code
def test_encoding_is_a_search_among_borders(code):
    x = numbers(code)
    codes = encode(code, x)
    borders, x = find_borders(code), x.astype(np.float64)
    # The dynamic code scales a number by up to three powers of ten, adds to it, and multiplies it: a rounding each.
    near = np.abs(x) * (2.0**-19 if code == DYNAMIC else 0)
    assert (codes >= np.searchsorted(borders, x - near)).all()
    assert (codes <= np.searchsorted(borders, x + near)).all()


@pytest.mark.slow
def test_rounding_at_random_is_right_on_average():
    values, every_noise = DYNAMIC.values.astype(np.float64), jnp.arange(2**16, dtype=jnp.uint16)
    lower, upper = values[:-1:16], values[1::16]
    x = (lower + np.random.default_rng().random(len(lower)) * (upper - lower)).astype(np.float32)
    for number, a, b in zip(x, lower, upper, strict=True):
        rounded = values[encode(DYNAMIC, jnp.full(every_noise.shape, number), every_noise)]
        assert set(rounded) <= {a, b}
        # The noise has 12 bits.
        assert abs(np.mean(rounded == b) - (number - a) / (b - a)) <= 2.0**-12


@pytest.mark.slow
def test_an_octave_of_second_moments_takes_as_long_as_its_logarithm():
    """Linear chances of a step took 4.4 % less time to decay by an octave, and 4.6 % more to grow."""
    step, every_noise = 1e-3, jnp.arange(2**16, dtype=jnp.uint16)
    octave = UNSIGNED_FLOAT.values[-17:-8]  # 0.25 to 0.5
    for numbers, sign in ((octave[1:], -1), (octave[:-1], 1)):
        relative = jnp.float32(numbers * (1 + sign * step))
        codes = encode(UNSIGNED_FLOAT, jnp.broadcast_to(relative[:, None], (8, 2**16)), every_noise)
        chances = np.mean(np.asarray(codes) != encode(UNSIGNED_FLOAT, numbers)[:, None], axis=1)
        assert abs(np.sum(step / chances) / np.log(2) - 1) < 0.005
