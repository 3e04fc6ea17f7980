"""`optim.raise_if_stuck` speaks when a loop does nothing but skip, and only then."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_policy as jmp

NAN = float("nan")
SGD, SKIP = optax.sgd(1.0), jmp.optim.skip_nonfinite(optax.sgd(1.0))
AT_FLOOR = jmp.optim.loss_scaled(SGD, jmp.DynamicLossScale(1.0))


def _after(tx, skips, params=1.0):
    """The state of a run that only skipped, without running it."""
    params = jnp.ones(2) if isinstance(params, float) else params
    counts = {"consecutive_skips": jnp.int32(skips), "skipped_steps": jnp.int32(skips + 1)}
    return tx.init(params)._replace(**counts)


@pytest.mark.parametrize(
    ("scale", "skips", "text"),
    [
        (
            jmp.DynamicLossScale(2.0, min_loss_scale=2.0),
            3,
            r"^Training is stuck: the last 3 steps were skipped \(4 in all\) because their gradients were not finite\. "
            r"The loss scale is 2\.0 and is at its floor 2\.0, so the model or its data makes the infinities, or "
            r"another scale does\.",
        ),
        # float32 rounds the first of these floors up, and the second one down
        (jmp.DynamicLossScale(0.37, min_loss_scale=0.37), 2, "is at its floor 0.37, so the model"),
        (jmp.DynamicLossScale(1 / 3, min_loss_scale=1 / 3), 2, f"is at its floor {1 / 3}, so the model"),
        (
            jmp.NoOpLossScale(),
            3,
            r"The loss scale is 1(\.0)? and does not change, so(?s:.*)\(loss_fn, tx\).*bfloat16 has",
        ),
        (jmp.StaticLossScale(8.0), 3, r"The loss scale is 8.0 and does not change, so"),
        # every step overflowed at a constant 2**15 while the state's scale fell to 1, and the model was blamed
        (
            jmp.DynamicLossScale(1.0),
            25,
            r"or another scale does\..*value_and_grad\(loss_fn, loss_scale=opt_state\), not by a constant such as pol",
        ),
    ],
)
def test_a_scale_that_cannot_fall_is_stuck_after_some_patience(scale, skips, text):
    tx = jmp.optim.loss_scaled(SGD, scale)
    with pytest.raises(FloatingPointError, match=text):
        jmp.optim.raise_if_stuck(_after(tx, skips), patience=3)
    with pytest.raises(FloatingPointError):
        jmp.optim.raise_if_stuck({"step": jnp.array(1), "opt_state": (_after(tx, skips), None)}, patience=2)
    jmp.optim.raise_if_stuck(_after(tx, 0))


def test_a_scale_on_its_way_down_and_the_step_that_reaches_the_floor_are_not_stuck():
    jmp.optim.raise_if_stuck(_after(jmp.optim.loss_scaled(SGD, jmp.DynamicLossScale(2.0**5)), 15))
    jmp.optim.raise_if_stuck(_after(AT_FLOOR, 1))
    jmp.optim.raise_if_stuck(_after(SKIP, 2), patience=3)


@pytest.mark.parametrize("count", [0, 2])
def test_none_or_two_states_are_an_error(count):
    with pytest.raises(ValueError, match=f"exactly one LossScaledState, got list with {count}. For example:"):
        jmp.optim.raise_if_stuck([SKIP.init(jnp.ones(2))] * count)


@pytest.mark.slow
def test_parameters_that_are_not_finite_are_named_with_their_counts():
    params = {"layers": [jnp.array([1.0, NAN, jnp.inf]), jnp.ones(2)], "head": jnp.bfloat16([NAN]), "i": jnp.arange(3)}
    named = (
        r"not finite themselves: head \(1 of 1\), layers/0 \(2 of 3\)\. No step repairs.*finite gradients can have m"
    )
    with pytest.raises(FloatingPointError, match=named):
        jmp.optim.raise_if_stuck(_after(SKIP, 25, params), params)
    with pytest.raises(FloatingPointError, match=r"policy\.loss_scale\(\)\.$"):
        jmp.optim.raise_if_stuck(_after(SKIP, 25), jnp.ones(2))


@pytest.mark.parametrize("tx", [SKIP, AT_FLOOR], ids=["skip_nonfinite", "loss_scaled"])
def test_each_model_of_a_vmapped_state_is_looked_at(tx):
    """It ended in "Only scalar arrays can be converted to Python scalars"."""
    state = jax.vmap(tx.init)(jnp.ones((3, 2)))
    jmp.optim.raise_if_stuck(state)
    state = state._replace(consecutive_skips=jnp.array([25, 0, 11]))
    text = r"^2 of 3 models are stuck: 0, 2\. Of the first: Training.* last 25 ste"
    with pytest.raises(FloatingPointError, match=text):
        jmp.optim.raise_if_stuck(state)


@pytest.mark.parametrize("patience", [0, -1])
def test_no_patience_does_not_make_a_fresh_state_stuck(patience):
    state = SKIP.init(jnp.ones(2))
    with pytest.raises(ValueError, match=f"patience must be at least 1, got {patience}. For example: raise_if_stuck"):
        jmp.optim.raise_if_stuck(state, patience=patience)
    jmp.optim.raise_if_stuck(state, patience=1)
