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
        r"loss scale is 2\.0 and is at its floor 2\.0, so the model or its data makes the infinities, or another "
        r"scale does\."
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


def _stuck(tx, params, **fields):
    """The state of a run that only skips, without running it."""
    return tx.init(params)._replace(consecutive_skips=jnp.int32(25), skipped_steps=jnp.int32(25), **fields)


def test_a_constant_scale_beside_the_scale_of_the_state_is_suspected():
    """Every step overflows at a constant 2**15 while the state's scale falls to 1, and the model was blamed."""
    state = _stuck(jmp.optim.loss_scaled(optax.sgd(1.0), jmp.DynamicLossScale(1.0)), jnp.ones(2))
    advice = (
        r"or another scale does\..*value_and_grad\(loss_fn, loss_scale=opt_state\), not by a constant such as policy"
    )
    with pytest.raises(FloatingPointError, match=advice):
        jmp.optim.raise_if_stuck(state)


def test_parameters_that_are_not_finite_are_named_with_their_counts():
    params = {
        "layers": [jnp.array([1.0, NAN, jnp.inf]), jnp.ones(2)],
        "head": jnp.bfloat16([NAN]),
        "ids": jnp.arange(3),
    }
    state = _stuck(jmp.optim.skip_nonfinite(optax.sgd(1.0)), params)
    named = (
        r"not finite themselves: head \(1 of 1\), layers/0 \(2 of 3\)\. No step repairs.*finite gradients can have mad"
    )
    with pytest.raises(FloatingPointError, match=named):
        jmp.optim.raise_if_stuck(state, params)
    with pytest.raises(FloatingPointError, match=r"policy\.loss_scale\(\)\.$"):
        jmp.optim.raise_if_stuck(state, jnp.ones(2))


@pytest.mark.parametrize(
    "make", [jmp.optim.skip_nonfinite, lambda tx: jmp.optim.loss_scaled(tx, jmp.DynamicLossScale(1.0))]
)
def test_each_model_of_a_vmapped_state_is_looked_at(make):
    """It ended in "Only scalar arrays can be converted to Python scalars"."""
    state = jax.vmap(make(optax.sgd(1.0)).init)(jnp.ones((3, 2)))
    jmp.optim.raise_if_stuck(state)
    state = state._replace(consecutive_skips=jnp.array([25, 0, 11]))
    with pytest.raises(
        FloatingPointError, match=r"^2 of 3 models are stuck: 0, 2\. Of the first: Training.* last 25 ste"
    ):
        jmp.optim.raise_if_stuck(state)


@pytest.mark.parametrize("patience", [0, -1])
def test_no_patience_does_not_make_a_fresh_state_stuck(patience):
    state = jmp.optim.skip_nonfinite(optax.sgd(1.0)).init(jnp.ones(2))
    with pytest.raises(ValueError, match=f"patience must be at least 1, got {patience}. For example: raise_if_stuck"):
        jmp.optim.raise_if_stuck(state, patience=patience)
    jmp.optim.raise_if_stuck(state, patience=1)
