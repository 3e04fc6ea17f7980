"""The smallest and the largest number of a value, as integers in the order of the numbers."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

# A search shows the keys of one operation of a program, and each search takes a second to compile.
from jmp_policy._jaxpr import evaluate, record_program
from jmp_policy.numerics import _extremes
from jmp_policy.numerics._extremes import INFINITY, NEVER, decode_key, encode_keys, find_extremes, find_telling_operand

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_keys_have_the_order_of_all_numbers_and_give_them_back(dtype):
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    numbers = numbers[~np.isnan(numbers.astype(np.float32))]
    keys = np.asarray(encode_keys(jnp.asarray(numbers)))
    order = np.argsort(keys)
    assert len(set(keys.tolist())) == len(keys)
    assert (np.diff(numbers[order].astype(np.float32)) >= 0).all()
    back = np.asarray(decode_key(jnp.asarray(keys), dtype == np.float16))
    np.testing.assert_array_equal(back, numbers.astype(np.float32))


@pytest.mark.parametrize("dtype", [*HALVES, np.float32])
def test_keys_of_nan_are_beyond_those_of_infinity(dtype):
    bits = np.uint16 if np.dtype(dtype).itemsize == 2 else np.uint32
    nan = np.array([np.nan], dtype)
    negative = (nan.view(bits) | bits(1 << (8 * nan.itemsize - 1))).view(dtype)
    both = encode_keys(jnp.asarray(np.concatenate([nan, negative])))
    assert both[0] > INFINITY
    assert both[1] < ~INFINITY
    assert encode_keys(jnp.array([np.inf, -np.inf], dtype)).tolist() == [INFINITY, ~INFINITY]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [*zip([*HALVES, np.float32, ml_dtypes.float8_e5m2, np.complex64], itertools.cycle([(7, 3), (64, 129), ()]))],
)
def test_extremes_are_those_of_numpy(dtype, shape):
    rng = np.random.default_rng()
    x = np.asarray(rng.normal(size=shape) * 100, np.float32).astype(dtype)
    low, high = jax.jit(find_extremes)(jnp.asarray(x))
    parts = np.concatenate([x.real.ravel(), x.imag.ravel()]) if np.iscomplexobj(x) else x.astype(np.float32).ravel()
    is_half = dtype == np.float16
    assert (float(decode_key(low, is_half)), float(decode_key(high, is_half))) == (parts.min(), parts.max())


@pytest.mark.parametrize(
    "bad", [np.nan, *[pytest.param(x, marks=pytest.mark.slow) for x in (-np.nan, np.inf, -np.inf)]]
)
def test_one_bad_number_of_many_is_seen(bad):
    rng = np.random.default_rng()
    x = rng.normal(size=(300, 70)).astype(np.float32)  # from some thousand numbers on, a maximum of floats loses a nan
    x[rng.integers(300), rng.integers(70)] = bad
    low, high = jax.jit(lambda x: find_extremes(jnp.maximum(x, -1e30) if np.isnan(bad) else x))(x)
    assert bool(high > INFINITY) | bool(low < ~INFINITY) if np.isnan(bad) else INFINITY in (int(high), ~int(low))


def test_no_numbers_have_crossed_extremes():
    low, high = find_extremes(jnp.zeros((0, 3)))
    assert low > high


def test_double_precision_keeps_what_float32_cannot_hold_finite():
    with jax.enable_x64(True):
        low, high = find_extremes(jnp.array([-1e300, 1e300]))
        assert ~INFINITY < int(low) < int(high) < INFINITY
        assert int(find_extremes(jnp.array([1e300, jnp.inf]))[1]) == INFINITY


def record(fun, *args):
    program = jax.make_jaxpr(fun)(*args)
    recorded = record_program(program, _extremes.ExtremesRecorder(), None)
    extremes = _extremes.Extremes(*evaluate(recorded.program, *args)[len(program.out_avals) :])
    return {line.step.name: (extremes, i) for i, line in enumerate(recorded.lines)}


@pytest.mark.parametrize("reverse", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_long_scan_has_the_first_turn_in_the_order_in_which_it_runs(reverse):
    fun = lambda x: lax.scan(
        lambda c, t: (c, jnp.log(t)), x, jnp.ones(80).at[jnp.array([30, 70])].set(0), reverse=reverse
    )[1]
    extremes, i = record(fun, 1.0)["log"]
    assert extremes.first[i].tolist() == [[NEVER] * 3, [9 if reverse else 30, 0, 0]]


NUMBERS = np.array([0, 1e-45, 1, 65504, 3.4028235e38, np.inf, np.nan], np.float32)


KEEP_KINDS = [
    lambda x: -x, lambda x: 0.5 * x, lambda x: x / 3.0, lambda x: x + 1e-5, lambda x: 1.0 - x,
    lambda x: x[None], lambda x: x * 1.0, lambda x: -1.0 * x,
]  # fmt: skip


@pytest.mark.parametrize(("fun", "dtype"), [*zip(KEEP_KINDS, itertools.cycle([*HALVES, np.float32]))])
def test_a_telling_operand_is_finite_exactly_where_the_result_is(fun, dtype):
    with np.errstate(over="ignore"):
        x = np.concatenate([NUMBERS, -NUMBERS, [jnp.finfo(dtype).max, jnp.finfo(dtype).min]]).astype(dtype)
    [eqn] = jax.make_jaxpr(fun)(jnp.asarray(x)).eqns
    assert not isinstance(eqn.invars[find_telling_operand(eqn, 0).operand], Literal)
    kinds = lambda x: (np.isnan(x), np.isinf(x))
    out = np.asarray(jax.jit(fun)(x)).astype(np.float32).ravel()
    np.testing.assert_array_equal(kinds(out), kinds(x.astype(np.float32)))


@pytest.mark.parametrize(
    "fun", [lambda x: 2.0 * x, lambda x: 0.0 * x, lambda x: x / 0.5, lambda x: 1.0 / x, lambda x: x + 1e38,
            lambda x: x * jnp.inf, abs, lambda x: x + x, lambda x: x * jnp.nan,
            lambda x: x.astype(jnp.float16), lambda x: x.astype(jnp.bfloat16)]
)  # fmt: skip
def test_what_may_begin_it_is_measured(fun):
    eqns = jax.make_jaxpr(fun)(jnp.ones(3)).eqns
    assert find_telling_operand(eqns[-1], 0) is None
    assert not _extremes.moves_only(eqns[-1])
