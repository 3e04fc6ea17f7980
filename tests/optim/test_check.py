"""`optim.raise_if_stuck` speaks when a loop does nothing but skip, and only then."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from optimizer_registry import by_step, grads_of, params_of

import jmp_policy as jmp


def _after(tx, *bad):
    """The state after steps whose gradients hold these numbers; `None` is a good step."""
    step = jax.jit(functools.partial(by_step, tx))
    params, state = params_of(), tx.init(params_of())
    for seed, number in enumerate(bad):
        params, state = step(grads_of(seed, number), state, params)
    return state


NAN = float("nan")


@pytest.mark.slow
def test_a_dynamic_scale_at_its_floor_is_stuck():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(4.0, min_loss_scale=2.0))
    message = (
        r"Training is stuck: the last 3 steps were skipped \(3 in all\) because their gradients were not finite\. The "
        r"loss scale is 2\.0 and is at its floor 2\.0, so the model or its data makes the infinities\."
    )
    with pytest.raises(FloatingPointError, match=message):
        jmp.optim.raise_if_stuck(_after(tx, None, NAN, NAN, NAN))


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.37, 1 / 3])
def test_a_floor_that_float32_rounds_up_or_down_is_seen(floor):
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(floor, min_loss_scale=floor))
    with pytest.raises(FloatingPointError, match=f"is at its floor {floor}, so the model"):
        jmp.optim.raise_if_stuck(_after(tx, NAN, NAN))


@pytest.mark.slow
def test_a_dynamic_scale_on_its_way_down_is_not_stuck():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(2.0**20))
    jmp.optim.raise_if_stuck(_after(tx, *[NAN] * 15))


@pytest.mark.slow
def test_the_step_that_reaches_the_floor_gets_its_chance():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(2.0))
    jmp.optim.raise_if_stuck(_after(tx, NAN))
    jmp.optim.raise_if_stuck(_after(tx, NAN, None))


def test_a_good_step_ends_the_series():
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(2.0))
    jmp.optim.raise_if_stuck(_after(tx, NAN, NAN, NAN, None))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [jmp.NoOpLossScale(), jmp.StaticLossScale(8.0)])
def test_a_scale_that_does_not_change_is_stuck_after_some_patience(scale):
    tx = jmp.optim.loss_scaled(optax.sgd(1.0), scale)
    jmp.optim.raise_if_stuck(_after(tx, NAN, NAN))
    with pytest.raises(FloatingPointError, match=rf"The loss scale is {scale.loss_scale} and does not change, so"):
        jmp.optim.raise_if_stuck(_after(tx, NAN, NAN, NAN), patience=3)


@pytest.mark.slow
def test_the_message_says_what_to_do():
    state = _after(jmp.optim.skip_nonfinite(optax.sgd(1.0)), NAN)
    with pytest.raises(FloatingPointError, match=r"optim\.find_origin\(loss_fn, tx\).*bfloat16 has"):
        jmp.optim.raise_if_stuck(state, patience=1)


@pytest.mark.slow
def test_it_finds_the_state_in_what_holds_it():
    stuck = _after(jmp.optim.skip_nonfinite(optax.sgd(1.0)), NAN)
    with pytest.raises(FloatingPointError):
        jmp.optim.raise_if_stuck({"step": jnp.array(1), "opt_state": (stuck, None)}, patience=1)


@pytest.mark.parametrize("count", [0, 2])
def test_none_or_two_states_are_an_error(count):
    state = jmp.optim.skip_nonfinite(optax.sgd(1.0)).init(params_of())
    with pytest.raises(ValueError, match=f"exactly one LossScaledState, got list with {count}. For example:"):
        jmp.optim.raise_if_stuck([state] * count)
