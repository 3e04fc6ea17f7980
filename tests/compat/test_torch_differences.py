"""Every difference from torch's GradScaler is a row of a table in the reference, and a check here holds it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from differences import Checks, rows_of

import jmp_policy as jmp
from jmp_policy.compat.torch import grad_scaler_state_dict, loss_scale_from_state_dict

STATE_DICT = {
    "scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0
}  # fmt: skip

checks = Checks()


def test_every_difference_has_a_check_and_every_check_its_difference():
    assert rows_of("PyTorch") == list(checks)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows_of("PyTorch"))
def test_it_is_as_the_table_says(row):
    checks[row]()


def adjusted(changes, *finite):
    """The scale after some steps, from the numbers of torch with some changes."""
    scale = loss_scale_from_state_dict(STATE_DICT | changes)
    scale, _ = jax.lax.scan(lambda scale, finite: (scale.adjust(finite), None), scale, jnp.array(finite))
    return float(scale.loss_scale)


@checks.holds("bounds of the scale")
def the_scale_has_a_floor_and_a_ceiling_or_starts_beyond_them():
    assert adjusted({"scale": 2.0}, False, False, False) == 1.0
    assert adjusted({"scale": 0.25}, False) == 0.25
    assert adjusted({"scale": 2.0**23, "growth_interval": 1}, True, True, True) == 2.0**24
    assert adjusted({"scale": 2.0**30, "growth_interval": 1}, True) == 2.0**30


@checks.holds("factors such as 1.1")
def factors_are_float32():
    factors = {"growth_factor": 1.1, "backoff_factor": 0.7, "growth_interval": 1}
    finite = np.random.default_rng(0).random(100) > 0.25
    exact = np.float32(65536)  # as torch has it: the product is one in float64, rounded to float32
    for good in finite:
        exact = np.float32(np.float64(exact) * (1.1 if good else 0.7))
    assert 0 < abs(adjusted(factors, *finite) / exact - 1) < 100 * 1.2e-7


@checks.holds("a count past its end")
def a_count_that_is_past_its_interval_is_complete():
    assert adjusted({"growth_interval": 3, "_growth_tracker": 9}, True) == 2.0**17


@checks.holds("intervals over 2**31")
def an_interval_that_never_ends_is_the_longest_that_can_be_counted():
    scale = loss_scale_from_state_dict(STATE_DICT | {"growth_interval": 10**12, "_growth_tracker": 7})
    assert grad_scaler_state_dict(scale.adjust(jnp.array(True))) == STATE_DICT | {
        "growth_interval": 2**31 - 1,
        "_growth_tracker": 8,
    }


@checks.holds("zeros")
def what_would_stand_still_is_an_error():
    for key in ("scale", "backoff_factor", "growth_interval"):
        with pytest.raises(ValueError, match=rf"^'{key}' must be "):
            loss_scale_from_state_dict(STATE_DICT | {key: 0})


@checks.holds("a new scale")
def a_new_scale_is_half_of_that_of_torch():
    assert float(jmp.DynamicLossScale().loss_scale) == STATE_DICT["scale"] / 2


@checks.holds("unit of the counter")
def microbatches_are_counted_where_they_are_accumulated_inside():
    tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), loss_scale_from_state_dict(STATE_DICT))
    params = jnp.ones(2)
    state = tx.init(params)
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):  # which optax's own accumulation asks for
            params, state = jmp.optim.step(tx, jnp.ones(2), state, params)
    assert grad_scaler_state_dict(state)["_growth_tracker"] == 2
    np.testing.assert_allclose(params, 0.9)  # of one step


@checks.holds("several optimizers")
def each_optimizer_has_a_scale_of_its_own():
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), loss_scale_from_state_dict(STATE_DICT))
    states = [tx.init(jnp.ones(2)) for _ in range(2)]
    _, states[0] = jmp.optim.step(tx, jnp.full(2, jnp.inf), states[0], jnp.ones(2))
    assert [grad_scaler_state_dict(state)["scale"] for state in states] == [2.0**15, 2.0**16]


@checks.holds("a skipped step")
def a_schedule_does_not_count_a_skipped_step():
    tx = jmp.optim.loss_scaled(optax.sgd(lambda count: jnp.float32(0.1)), loss_scale_from_state_dict(STATE_DICT))
    params = jnp.ones(2)
    state = tx.init(params)
    for gradient in (1.0, jnp.inf, 1.0):
        params, state = jmp.optim.step(tx, jnp.full(2, gradient), state, params)
    assert optax.tree_utils.tree_get(state, "count") == 2


@checks.holds("`unscale_` to clip", "float16 gradients")
def gradients_are_true_and_of_float16_parameters_in_float32():
    params = jnp.ones(2, jnp.float16)
    loss = lambda params: jnp.sum(params.astype(jnp.float32) ** 2)
    value, gradients = jmp.value_and_grad(loss, loss_scale=loss_scale_from_state_dict(STATE_DICT | {"scale": 8.0}))(
        params
    )
    assert (value, gradients.dtype, gradients.tolist()) == (2, jnp.float32, [2, 2])
