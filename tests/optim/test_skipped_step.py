"""Law 14: a step with a non-finite gradient changes nothing but the loss scale and the skip counters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizer_registry import OPTIMIZERS, WAYS, bits, grads_of, params_of, types

import jmp_policy as jmp

GOOD, NAN, INF = None, np.nan, -np.inf
WAY_SLOW = ["step", pytest.param("update", marks=pytest.mark.slow)]


def _jitted_step(tx, way):
    return jax.jit(functools.partial(WAYS[way], tx))


def _train(step, tx, params, badness):
    state = tx.init(params)
    for seed, bad in badness:
        params, state = step(grads_of(seed, bad), state, params)
    return params, state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [("adamw", "step"), ("clip_schedule", "update")])
def test_skipped_steps_leave_every_bit_where_training_without_them_does(name, way):
    tx = jmp.optim.loss_scaled(OPTIMIZERS[name](), jmp.DynamicLossScale())
    step = _jitted_step(tx, way)
    assert bits(_train(step, tx, params_of(), [(0, NAN)])[0]) == bits(params_of())  # -0.0 included
    params, state = _train(step, tx, params_of(), [(0, NAN), (1, GOOD), (2, INF), (3, NAN), (4, GOOD), (5, INF)])
    expected_params, expected_state = _train(step, tx, params_of(), [(1, GOOD), (4, GOOD)])
    assert bits(params) == bits(expected_params)
    assert bits(state.inner_state) == bits(expected_state.inner_state)
    assert types(state) == types(tx.init(params_of()))
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (4, 1)
    assert float(state.loss_scale.loss_scale) == 2.0 ** (15 - 4)


@pytest.mark.slow
def test_finite_steps_are_those_of_the_optimizer_alone():
    inner = OPTIMIZERS["adamw"]()
    tx = jmp.optim.skip_nonfinite(inner)
    params, state = _train(_jitted_step(tx, "step"), tx, params_of(), [(1, GOOD), (2, GOOD)])
    expected = _train(_jitted_step(inner, "step"), inner, params_of(), [(1, GOOD), (2, GOOD)])
    for got, wanted in zip(jax.tree.leaves((params, state.inner_state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)  # two programs, which XLA may round differently


def test_skipped_steps_are_skipped_at_all_times_and_the_scale_stops_at_its_floor():
    """optax.apply_if_finite lets nan through after some errors in a row, and from then on always."""
    tx = jmp.optim.loss_scaled(optax.adamw(1e-2), jmp.DynamicLossScale(2.0**8))
    params, state = _train(_jitted_step(tx, "step"), tx, params_of(), [(i, NAN) for i in range(30)])
    assert bits(params) == bits(params_of())
    assert float(state.loss_scale.loss_scale) == 1.0  # and no further: Keras goes on to 0, and divides by it
    assert int(state.consecutive_skips) == 30


def test_a_step_that_grows_the_scale_takes_true_gradients():
    """mixed-precision-for-jax divides by the scale of the next step, which halves the gradients when it grows."""
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(2.0**10, period=1))

    @jax.jit
    def train_step(w, state):
        grads = jmp.grad(lambda w: jnp.sum(w * jnp.array([1.0, 2.0])), loss_scale=state)(w)
        return jmp.optim.step(tx, grads, state, w)

    w, state = train_step(jnp.zeros(2), tx.init(jnp.zeros(2)))
    assert (w.tolist(), float(state.loss_scale.loss_scale)) == ([-1.0, -2.0], 2.0**11)


@pytest.mark.parametrize(
    ("name", "dtype", "grads_dtype", "way"),
    [
        ("adamw", "bfloat16", "float32", "step"),
        ("adamw", "float16", "float16", "update"),
        ("adafactor", "bfloat16", "bfloat16", "update"),
    ],
)
def test_state_keeps_its_dtypes_whatever_those_of_gradients(name, dtype, grads_dtype, way):
    """float32 gradients, which `value_and_grad` returns, would widen moments that were made like half parameters."""
    tx = jmp.optim.loss_scaled(OPTIMIZERS[name](), jmp.DynamicLossScale())
    params = params_of(dtype)
    before = jax.eval_shape(lambda: (params, tx.init(params)))
    after = jax.eval_shape(functools.partial(WAYS[way], tx), grads_of(0, dtype=grads_dtype), *before[::-1])
    assert jax.tree.leaves(after) == jax.tree.leaves(before)


@pytest.mark.parametrize("way", WAY_SLOW)
def test_complex_parameters_keep_both_parts(way):
    """flax's DynamicScale drops the imaginary part of complex gradients."""
    tx = jmp.optim.loss_scaled(optax.sgd(1.0, momentum=0.9), jmp.StaticLossScale(8.0))
    params = {"z": jnp.array([complex(-0.0, -0.0), complex(1.0, -0.0)])}
    step = _jitted_step(tx, way)
    skipped, _ = step({"z": jnp.array([1.0, complex(0, np.inf)])}, tx.init(params), params)
    assert bits(skipped) == bits(params)
    taken, state = step({"z": jnp.array([1 + 2j, 3j])}, tx.init(params), params)
    np.testing.assert_array_equal(taken["z"], [-1 - 2j, 1 - 3j])
    assert bool(state.grads_finite)


@pytest.mark.parametrize("way", WAY_SLOW)
def test_integer_leaves_pass_through(way):
    tx = jmp.optim.loss_scaled(optax.masked(optax.sgd(1.0), {"w": True, "i": False}), jmp.DynamicLossScale())
    params = {"w": jnp.ones(2), "i": jnp.arange(2)}
    grads = lambda w: {"w": jnp.array(w), "i": jnp.zeros(2, jnp.int32)}
    step = _jitted_step(tx, way)
    assert bits(step(grads([np.inf, 1.0]), tx.init(params), params)[0]) == bits(params)
    taken, _ = step(grads([1.0, 1.0]), tx.init(params), params)
    assert (taken["w"].tolist(), taken["i"].tolist()) == ([0.0, 0.0], [0, 1])
