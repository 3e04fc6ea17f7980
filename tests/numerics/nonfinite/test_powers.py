"""A power overflows where its base is large, and has a pole at zero where its exponent is negative."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_policy as jmp


def describe(fun, x):
    _, origin = jax.jit(jmp.numerics.first_nonfinite(fun))(x)
    return origin.describe()


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 2.5])
def test_a_power_of_large_numbers_in_float16_is_to_be_kept_in_float32(power):
    with jax.numpy_dtype_promotion("standard"):
        text = describe(lambda x: x**power, jnp.float16([0.0, 300.0]))
    assert "Keep this in float32" in text
    assert "away from zero" not in text


@pytest.mark.sample(1)
@pytest.mark.parametrize("power", [2, 2.5])
def test_a_power_of_numbers_too_large_for_float32_says_so(power):
    text = describe(lambda x: x**power, jnp.float32([0.0, 1e30]))
    assert "too large for float32" in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("power", [-1, -0.5])
def test_a_negative_power_of_zero_is_to_be_kept_away_from_it(power, dtype):
    with jax.numpy_dtype_promotion("standard"):
        text = describe(lambda x: x**power, jnp.array([0.0, 3.0], dtype))
    assert "Keep the base away from zero" in text


@pytest.mark.slow
def test_the_square_of_a_scaled_gradient_is_part_of_the_search_for_a_scale():
    """The gradient of this function is a square of what comes in, times the loss scale."""

    @jax.custom_vjp
    def squared(x):
        return x

    squared.defvjp(lambda x: (x, None), lambda _, g: (g**2,))

    def loss_fn(params):
        return jnp.sum(jnp.arange(2.0) * squared(params.astype(jnp.float16)).astype(jnp.float32))

    tx = jmp.optim.loss_scaled(optax.sgd(0.0), jmp.DynamicLossScale(2.0**9))
    params = jnp.ones(2)
    skip = jmp.optim.find_origin(loss_fn, tx)(params, tx.init(params))
    assert skip is not None
    assert skip.is_search
