"""Casts to 8-bit floating point, the scales before them, and numbers that are not finite."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from float8_reference import FORMATS, LARGEST, TWO_AXES, computed, fresh_state, rolled, scale_from

from jmp_policy.quant import Float8
from jmp_policy.quant._numbers import compute_scale, measure_amax, saturate

TINY = np.finfo(np.float32).tiny
Float8 = functools.partial(Float8, amax_history_length=3, min_size=0)
RECIPES = [Float8("current"), Float8("current/row"), Float8("current/row", weight_grad=False), Float8()]


def bits(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("name", ["input", "output_grad"])
def test_casts_saturate_and_else_round_to_the_nearest_even(name):
    dtype, limit = FORMATS[name], LARGEST[name]
    least = np.float32(ml_dtypes.finfo(dtype).smallest_subnormal)
    edges = np.array([limit, limit * 1.01, limit * 1.04, limit * 2, 3e38, np.inf, 0, 1e-30, np.nan], np.float32)
    subnormals = least * np.array([0.5, 0.51, 1, 1.5, 2.5, 3], np.float32)
    ties = np.arange(16, 33, dtype=np.float32)
    random = np.exp(np.random.default_rng().normal(size=200) * 6).astype(np.float32)
    x = np.concatenate([edges, subnormals, ties, random])
    x = np.concatenate([x, -x])
    ours = jax.jit(saturate, static_argnums=2)(x, jnp.float32(1), np.dtype(dtype))
    numbers = ~np.isnan(x)  # the sign of a nan is no matter
    np.testing.assert_array_equal(bits(ours)[numbers], bits(np.clip(x, -limit, limit).astype(dtype))[numbers])
    assert np.isnan(np.asarray(ours, np.float32)[~numbers]).all()
    assert np.isfinite(np.asarray(ours, np.float32)[np.isfinite(x)]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["input", "output_grad"])
@pytest.mark.parametrize("margin", [0, 3])
def test_scales_are_those_of_transformer_engine(name, margin):
    random = np.exp(np.random.default_rng().normal(size=100) * 10)
    amax = np.concatenate([random, [0, np.inf, np.nan, 3.4e38, 1e-37]]).astype(np.float32)
    ours = jax.jit(compute_scale, static_argnums=(2, 3))(amax, jnp.float32(0.3), np.dtype(FORMATS[name]), margin)
    by_hand = np.maximum(scale_from(amax, name, 0.3, margin), TINY)
    np.testing.assert_allclose(ours, by_hand, rtol=2.0**-23, atol=0)  # where XLA divides by a quotient
    np.testing.assert_array_equal(ours[-5:-2], ours[-5])


@pytest.mark.slow
def test_the_amax_of_nothing_is_zero_and_of_zeros_is_no_scale():
    assert measure_amax(jnp.zeros((0, 4), jnp.bfloat16)) == 0
    zeros = jnp.zeros((16, 16))
    for format in RECIPES[:2]:
        assert not any(jnp.any(array) for array in computed(TWO_AXES, format, zeros, zeros, zeros, None)[:3])


@pytest.mark.slow
@pytest.mark.parametrize("format", RECIPES, ids=str)
@pytest.mark.parametrize("size", [1e-40, 1e-30, 1e15])
def test_numbers_of_any_size_give_finite_products(format, size):
    state = fresh_state(3) if format == Float8() else None
    x, w = (jnp.asarray(np.random.default_rng().normal(size=(16, 16)), jnp.float32) for _ in range(2))
    results = computed(TWO_AXES, format, x * size, w, w * size, state)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(results))
    if size > 1e-38 and state is None:
        np.testing.assert_allclose(results[0] / size, x @ w, atol=3)


@pytest.mark.slow
@pytest.mark.parametrize("format", RECIPES, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_finite_is_seen_in_the_results_and_not_in_the_state(name, bad, format):
    operands = {each: np.random.default_rng().normal(size=(16, 16)).astype(np.float32) for each in FORMATS}
    operands[name][3, 5] = bad
    state = fresh_state(3) if format == Float8() else None
    out, *grads, after = computed(TWO_AXES, format, *operands.values(), state)
    finite = [bool(jnp.isfinite(array).all()) for array in (out, *grads)]
    seen = {"input": (0, 2), "kernel": (0, 1), "output_grad": (1, 2)}[name]
    assert finite == [i not in seen for i in range(3)]
    if state is not None:
        amax = {each: 0.0 if each == name else np.abs(array).max() for each, array in operands.items()}
        for each in FORMATS:
            before = np.asarray(state[f"{each}_amax_history"])
            np.testing.assert_array_equal(after[f"{each}_amax_history"], rolled(before, amax[each]))
            np.testing.assert_array_equal(after[f"{each}_scale"], scale_from(before.max(), each))


@pytest.mark.slow
@pytest.mark.parametrize("format", [Float8("current"), Float8()], ids=str)
def test_a_product_is_the_same_where_nothing_is_differentiated_and_shows_what_is_not_finite(format):
    x, w = (np.random.default_rng().normal(size=(16, 16)).astype(np.float32) for _ in range(2))
    state = fresh_state(3) if format == Float8() else None
    product = lambda x, w, state: TWO_AXES(x, w, quantization=format, state=state)
    both = jax.jit(lambda x, w: (product(x, w, state), jax.vjp(product, x, w, state)[0]))
    np.testing.assert_array_equal(*both(x, w))
    x[:3, 5] = np.nan, np.inf, -np.inf
    assert not any(jnp.isfinite(out[:3]).any() for out in both(x, w))


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, -np.inf])
@pytest.mark.parametrize("recipe", ["delayed", "delayed/2"])
def test_a_state_of_zeros_or_of_least_numbers_is_as_good_as_a_new_one(recipe, value):
    x = np.random.default_rng().normal(size=(16, 16)).astype(np.float32)
    new = {k: jnp.full_like(v, float(k.endswith("scale"))) for k, v in fresh_state(3).items()}
    damaged = jax.tree.map(lambda leaf: jnp.full_like(leaf, value), new)
    ours, by_hand = (computed(TWO_AXES, Float8(recipe), x, x, x, state) for state in (damaged, new))
    jax.tree.map(np.testing.assert_array_equal, ours, by_hand)
