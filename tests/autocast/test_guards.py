"""An author's guards under autocast: bounds, epsilons and large values that half precision has not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from programs import trace

import jmp_policy as jmp

HALVES = ["bfloat16", "float16"]
EYE = np.eye(8, dtype=np.float32)


def under(half, function, rules=None):
    """A function of the result of a low operation."""
    return jmp.autocast(lambda x: function(x @ EYE), jmp.Policy("float32", half, None), rules=rules)


def filled(value):
    return np.full((8, 8), value, np.float32)


def with_gradient(fun, x):
    return jax.jit(jax.value_and_grad(lambda x: jnp.sum(fun(x))))(x)


def dtype_of(primitive, fun):
    """The dtypes that the equations of a primitive return."""

    def found(program):
        for eqn in program.eqns:
            if eqn.primitive.name == primitive:
                yield from (str(var.aval.dtype) for var in eqn.outvars)
            for inner in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from found(inner)

    return set(found(trace(fun)(EYE).jaxpr))


EPSILONS = {
    "maximum": lambda h: jnp.log(jnp.maximum(h, 1e-8)),
    "clip": lambda h: jnp.log(jnp.clip(h, 1e-8, 1)),
    "where": lambda h: jnp.log(jnp.where(h > 0, h, 1e-8)),
    "quotient": lambda h: 1 / jnp.maximum(h, 1e-8),
    "in a loop": lambda h: lax.fori_loop(0, 2, lambda _, x: jnp.log(jnp.maximum(h, 1e-8)) + x * 0, h),
}


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("guarded", EPSILONS.values(), ids=EPSILONS)
def test_a_guard_too_small_for_half_precision_is_that_of_the_program(guarded, half):
    value, gradient = with_gradient(under(half, guarded), filled(0))
    expected, exact_gradient = with_gradient(guarded, filled(0))
    np.testing.assert_allclose(value, expected, rtol=2e-3)  # in bfloat16, 1e-8 is a number like any other
    np.testing.assert_allclose(gradient, exact_gradient, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [
    lambda h: jnp.concatenate([h, jnp.full((1, 8), 1e-8)]),
    lambda h: jnp.pad(h, 1, constant_values=1e-8),
    lambda h: lax.dynamic_update_slice(h, jnp.full((1, 8), 1e-8), (0, 0)),
], ids=["concatenate", "pad", "dynamic_update_slice"])  # fmt: skip
def test_a_small_constant_among_others_stays_what_it_is(chosen):
    found = jax.jit(under("float16", chosen))(filled(1))
    np.testing.assert_array_equal(np.min(found), np.float32(1e-8))


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("bounded", [
    lambda h: jnp.minimum(h, 1 - 1e-7),
    lambda h: jnp.clip(h, -1 + 1e-7, 1 - 1e-7),
    lambda h: jnp.where(h >= 1, 1 - 1e-7, h),
    lambda h: jnp.clip(h, 0, 1023),
], ids=["minimum", "clip", "where", "an index"])  # fmt: skip
def test_a_result_is_within_its_bounds(bounded, half):
    found = jax.jit(under(half, bounded))(filled(2000))
    np.testing.assert_array_equal(found, bounded(filled(2000)))


@pytest.mark.slow
@pytest.mark.parametrize("half", HALVES)
def test_an_epsilon_beside_one_keeps_a_logarithm_finite(half):
    found = under(half, lambda h: jnp.log(1 + 1e-6 - h))(filled(1))
    np.testing.assert_allclose(found, np.log(np.float32(1 + 1e-6) - np.float32(1)), rtol=1e-6)


LARGE = {
    "maximum": lambda h: jnp.maximum(h, 1e6) / 1e6,
    "where": lambda h: jnp.where(h >= 0, 1e6, h) / 1e6,
    "pad": lambda h: jnp.pad(h, 1, constant_values=1e6)[:8, :8] / 1e6,
    "add": lambda h: (h + 1e6) / 1e6,
    "taken from": lambda h: (1e6 - h) / 1e6,
    "concatenate": lambda h: jnp.concatenate([jnp.full_like(h, 1e6), h]) / 1e6,
}


@pytest.mark.slow
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_a_large_number_that_is_no_mask_means_itself(large):
    value, gradient = with_gradient(under("float16", large), EYE)
    expected, exact_gradient = with_gradient(large, EYE)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, exact_gradient, rtol=2e-2)  # 1e-6 is a subnormal number of float16


MASKS = {
    "where": lambda h: jnp.where(h > 0, h, -1e9),
    "whole": lambda h: jnp.where(h > 0, h, -1_000_000_000),
    "infinity added": lambda h: h + jnp.where(np.tri(8, dtype=bool), 0.0, -jnp.inf),
    "lowest": lambda h: jnp.where(h > 0, h, jnp.finfo(jnp.float32).min),
    "nan_to_num": jnp.nan_to_num,
    "infinite": lambda h: jnp.where(h > 0, h, jnp.inf),
}


@pytest.mark.parametrize(("name", "half"), list(zip(MASKS, itertools.cycle(HALVES))))
def test_a_mask_stays_half(name, half):
    fun = under(half, lambda h: MASKS[name](h) * 1.0)
    with jax.numpy_dtype_promotion("standard"):
        assert dtype_of("mul", fun) - {"float32"} == {half}
        assert trace(fun)(EYE).eqns[-1].invars[0].aval.dtype == half  # before the cast to what was traced


ADDED_MASKS = {
    "constant": lambda h, m: h + jnp.where(np.tri(8, dtype=bool), 0.0, -1e9),
    "array": lambda h, m: h - 1e9 * ~np.tri(8, dtype=bool),
    "argument": lambda h, m: h + (1 - m) * -1e9,
    "argument of fewer axes": lambda h, m: h[None] + (1 - m) * -1e9,
    "multiplied": lambda h, m: h * m - 1e10 * (1 - m),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "half"), list(zip(ADDED_MASKS, itertools.cycle(reversed(HALVES)))))
def test_a_row_that_an_added_mask_covers_wholly_is_uniform(name, half):
    """In float16, -1e9 is infinite, and the largest number does not swallow the scores."""
    attend = lambda x, m: jax.nn.softmax(ADDED_MASKS[name](jnp.einsum("bij,bkj->bik", x, x)[0], m))
    mask = jnp.tril(jnp.ones((8, 8))).at[2].set(0)
    x = jax.random.normal(jax.random.key(0), (1, 8, 8))
    ours = jmp.autocast(attend, f"params=float32,compute={half},output=none")
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_allclose(ours(x, mask), attend(x, mask), atol=0.05)
        assert jnp.isfinite(jax.grad(lambda x: jnp.sum(ours(x, mask) ** 2))(x)).all()


@pytest.mark.parametrize("bounded", [
    lambda h: jnp.clip(h, -1, 1), jax.nn.relu6, jax.nn.hard_tanh, lambda h: jnp.clip(h, -20, 2),
    lambda h: jnp.where(h > 0, h, 0.5), lambda h: h * 0.1 + 0.3, lambda h: jnp.maximum(h, 0.1 * h),
], ids=["clip", "relu6", "hard_tanh", "log_std", "where", "affine", "leaky"])  # fmt: skip
def test_what_half_precision_can_hold_stays_half(bounded):
    for half in HALVES:
        assert trace(under(half, bounded))(EYE).eqns[-1].invars[0].aval.dtype == half


def test_an_epsilon_too_small_for_float16_stays_an_epsilon():
    x = np.zeros((8, 8), np.float32)
    assert np.isfinite(under("float16", lambda h: h / (h + 1e-8))(x)).all()


def test_a_factor_too_large_for_float16_means_itself():
    np.testing.assert_allclose(under("float16", lambda h: h * 1e6)(EYE), 1e6 * EYE, rtol=1e-6)


@pytest.mark.slow
def test_a_mask_leaves_room_for_what_it_is_added_to():
    # Operation by operation: XLA would keep the sum in float32 between two operations that it fuses.
    fun = under("float16", lambda h: h + jnp.where(h > 0, 0.0, -1e9))
    assert np.isfinite(np.asarray(fun(jnp.full((8, 8), -60.0)))).all()


def test_a_comparison_with_a_constant_is_exact():
    # 0.1 is 0.10009765625 in bfloat16, which a comparison in bfloat16 would take for equal.
    x = np.full((8, 8), 0.10009765625, np.float32)
    assert np.all(under("bfloat16", lambda h: h > 0.1)(x))


@pytest.mark.parametrize("operation", [lax.optimization_barrier, lambda arrays: lax.sort(arrays, num_keys=1)])
def test_each_of_several_arrays_keeps_its_own_dtype(operation):
    text = jax.jit(under("bfloat16", lambda h: operation((h * jnp.exp(h), h)))).lower(EYE).as_text()
    assert "tensor<8x8xf32>, tensor<8x8xbf16>" in text


def test_a_user_may_move_one_loss_out_of_the_package():
    loss = lambda h: optax.losses.squared_error(h, jnp.ones_like(h)) * 1.0
    moved = jmp.AutocastRules(functions={"optax.losses.squared_error": "infer"})
    for rules, is_half in ((None, False), (moved, True)):
        lines = jax.jit(under("bfloat16", loss, rules)).lower(EYE).as_text().splitlines()
        assert ("tensor<8x8xbf16>" in next(line for line in lines if "subtract" in line)) == is_half
