"""Moments are stored in the dtype of their role, whatever the optimizer calls them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_registry import WAYS, grads_of, params_of

import jmp_policy as jmp
from jmp_policy import optim

BOTH = {"mu_dtype": "bfloat16", "nu_dtype": "float16"}  # two dtypes that no optimizer makes of float32 parameters
MOMENTS = {
    "adamw": (lambda: optax.adamw(1e-2), "mu", "nu"),
    "amsgrad": (lambda: optax.amsgrad(1e-2), "mu", "nu_max"),
    "rmsprop": (lambda: optax.rmsprop(1e-2, momentum=0.9), "trace", "nu"),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9), "ema", "v_row"),
    "adan": (lambda: optax.adan(1e-2), "m", "n"),
    "sm3": (lambda: optax.sm3(1e-2), "nu", "mu"),
    "chained": (lambda: optax.chain(optax.clip(1.0), optax.adam(1e-2), optax.ema(0.9)), "ema", "nu"),
    "MultiSteps": (lambda: optax.MultiSteps(optax.adam(1e-2), 2), "mu", "nu"),
}


def _dtypes(state, field):
    found = optax.tree_utils.tree_get_all_with_path(state, field)
    return {leaf.dtype.name for _, tree in found for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("name", MOMENTS)
def test_moments_are_stored_by_role_and_stay_so(name):
    make, mu, nu = MOMENTS[name]
    tx, params = optim.cast_state(make(), **BOTH), params_of()
    state = jax.eval_shape(tx.init, params)
    assert (_dtypes(state, mu), _dtypes(state, nu)) == ({"bfloat16"}, {"float16"})
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(make().init, params))
    for dtype in ("float16", "float32"):
        updates, new_state = jax.eval_shape(tx.update, grads_of(0, dtype=dtype), state, params)
        assert jax.tree.leaves(new_state) == jax.tree.leaves(state)
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["step", "update"])
def test_float32_moments_of_half_parameters_are_those_of_float32_gradients(way):
    """Adam under bfloat16 parameters squares bfloat16 gradients, and stores the result in bfloat16."""
    tx = optim.skip_nonfinite(optim.cast_state(optax.adam(1e-2), mu_dtype="float32", nu_dtype="float32"))
    params, grads = params_of("bfloat16"), grads_of(0, dtype="bfloat16")
    _, state = WAYS[way](tx, grads, tx.init(params), params)
    expected = 1e-3 * np.float64(grads["w"]) ** 2
    np.testing.assert_allclose(state.inner_state[0].nu["w"], expected, rtol=1e-6)


def test_it_goes_inside_the_others_and_makes_them_smaller():
    tx = optim.loss_scaled(optim.kahan(optim.cast_state(optax.adamw(1e-2), mu_dtype="bfloat16")), jmp.NoOpLossScale())
    state = jax.eval_shape(tx.init, params_of("bfloat16"))
    assert (_dtypes(state, "mu"), _dtypes(state, "nu")) == ({"bfloat16"}, {"float32"})
    with pytest.raises(ValueError, match=r"cast_state goes inside of loss_scaled, .* For example: loss_scaled\(kahan"):
        optim.cast_state(optim.kahan(optax.adam(1e-2)), mu_dtype="bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("rounding", ["nearest", "dither"])
def test_dithered_second_moments_follow_gradients_that_shrink_and_those_rounded_to_nearest_do_not(rounding):
    b2, steps = 0.999, (1000, 1500)
    sizes = np.repeat([1, 0.1], steps)[:, None]
    grads = (np.random.default_rng(0).normal(size=(sum(steps), 64)) * sizes).astype(np.float32)
    narrow = optim.cast_state(optax.adam(1e-3, b2=b2), nu_dtype="bfloat16", rounding=rounding)

    def train(tx):
        step = lambda state, grads: tx.update(grads, state)[::-1]
        state, updates = jax.lax.scan(step, tx.init(jnp.zeros(64)), grads)
        return updates[-1], state[0].nu

    wide, _ = jax.jit(lambda: train(optax.adam(1e-3, b2=b2)))()
    updates, nu = jax.jit(lambda: train(narrow))()
    assert nu.dtype == jnp.bfloat16
    ratios = np.asarray(updates, np.float64) / np.asarray(wide, np.float64)
    # Roundings of a moment that are independent of each other, each by at most 2**-7 with a deviation of half of that,
    # sum to this deviation. Updates have the root of the moment. A dither repeats itself less, and stays well within.
    deviation = 2**-8 / np.sqrt(1 - b2**2) / 2
    if rounding == "dither":
        assert np.abs(ratios - 1).max() < 3 * deviation < 0.14
        assert abs(np.median(ratios) - 1) < 0.02
    else:
        assert ratios.max() < 0.6


def test_dither_draws_no_random_numbers_and_rounds_the_moments_alone():
    tx = optim.cast_state(optax.adam(1e-2), mu_dtype="bfloat16", nu_dtype="float16", rounding="dither")
    params, plain = jax.eval_shape(params_of), optim.cast_state(optax.adam(1e-2), mu_dtype="bfloat16")
    state = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(plain.init, params))
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert new_state == state
    assert {u.dtype.name for u in jax.tree.leaves(updates)} == {"float32"}
    jaxpr = str(jax.make_jaxpr(tx.update)(params, state, params))
    assert "random" not in jaxpr
    assert "2654435769" in jaxpr


ADAM = optax.adam(1e-2)


RMSPROP, TRACE = optax.rmsprop(1e-2), optax.trace(0.9)
ERRORS = {
    r"^Unknown rounding 'dithr'\. Did you mean 'dither'\? For example: rounding='di": (ADAM, "bfloat16", "dithr"),
    r"^rounding='dither' changes by .* has no integer 'count'\. For example: cast": (RMSPROP, "bfloat16", "dither"),
    r"cast_state needs a dtype\. For example: cast_state\(optax.adamw": (ADAM, None, "nearest"),
    r"nu_dtype is for moments that this .* It has TraceState.trace \(mu_dtype\)": (TRACE, "float32", "nearest"),
    r"Unknown dtype 'bf61' for nu_dtype": (ADAM, "bf61", "nearest"),
    r"^nu_dtype must have 16 bits or more, got 'float8_e5m2': .* nu_dtype='bf": (ADAM, "float8_e5m2", "nearest"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_say_what_the_optimizer_has(text):
    inner, dtype, rounding = ERRORS[text]
    with pytest.raises(ValueError, match=text):
        optim.cast_state(inner, nu_dtype=dtype, rounding=rounding).init(params_of())
