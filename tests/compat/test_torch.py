"""A loss scale moves between torch's GradScaler and ours, and goes on as it would have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from differences import Checks, rows_of

import jmp_policy as jmp
from jmp_policy.compat.torch import grad_scaler_state_dict, loss_scale_from_state_dict

STATE_DICT = {
    "scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3
}  # fmt: skip
# The factors are float32 numbers: torch multiplies in float64, and rounds others once less than JAX does.
TRAININGS = {
    "as torch begins": STATE_DICT | {"scale": 65536.0, "growth_interval": 2000, "_growth_tracker": 0},
    "before growth": STATE_DICT | {"_growth_tracker": 6},
    "other factors": STATE_DICT | {"growth_factor": 1.5, "backoff_factor": 0.625},
}


class GradScaler:
    """The documented rule of torch: it backs off on a bad step, and grows on the interval's last good one in a row."""

    def __init__(self, state_dict):
        self.state_dict = dict(state_dict, scale=np.float32(state_dict["scale"]))

    def update(self, found_inf):
        state = self.state_dict
        if found_inf:
            state["scale"] *= np.float32(state["backoff_factor"])
            state["_growth_tracker"] = 0
            return
        state["_growth_tracker"] += 1
        if state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= np.float32(state["growth_factor"])
            state["_growth_tracker"] = 0


@jax.jit
def _adjusted(scale, finite):
    return jax.lax.scan(lambda scale, finite: (scale.adjust(finite),) * 2, scale, finite)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_every_step_after_the_move_is_that_of_torch(name):
    start = TRAININGS[name]
    rng = np.random.default_rng(0)
    finite = rng.random(200) > 1 / (start["growth_interval"] + 4)
    last, history = _adjusted(loss_scale_from_state_dict(start), finite)
    theirs = GradScaler(start)
    for step, good in enumerate(finite):
        theirs.update(found_inf=not good)
        assert 1 <= theirs.state_dict["scale"] <= 2.0**24  # our floor and ceiling, which torch does not have
        ours = (float(history.loss_scale[step]), int(history.counter[step]))
        assert ours == (theirs.state_dict["scale"], theirs.state_dict["_growth_tracker"]), step
    assert grad_scaler_state_dict(last) == theirs.state_dict


@pytest.mark.parametrize("name", TRAININGS)
def test_there_and_back_again_is_the_same_dict_of_python_numbers(name):
    back = grad_scaler_state_dict(loss_scale_from_state_dict(TRAININGS[name]))
    assert back == TRAININGS[name]
    assert {key: type(value) for key, value in back.items()} == {key: type(STATE_DICT[key]) for key in back}


def test_a_disabled_scaler_scales_nothing():
    assert loss_scale_from_state_dict({}) == jmp.NoOpLossScale()
    assert grad_scaler_state_dict(jmp.NoOpLossScale()) == {}


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray, np.float32])
def test_tensors_of_one_number_are_numbers(array):
    scale = loss_scale_from_state_dict({key: array(value) for key, value in STATE_DICT.items()})
    assert grad_scaler_state_dict(scale) == STATE_DICT


def test_the_scale_is_found_in_the_state_of_an_optimizer():
    state = jmp.optim.loss_scaled(optax.sgd(0.1), loss_scale_from_state_dict(STATE_DICT)).init(jnp.ones(2))
    assert grad_scaler_state_dict(state) == STATE_DICT


@pytest.mark.parametrize(
    ("state_dict", "error", "text"),
    [
        ([1.0], TypeError, r"Expected the state dict of a GradScaler, got \[1\.0\]\. For example: \{'scale': 65536"),
        ({"scale": 8.0}, ValueError, r"lacks 'growth_factor', .*: it has \['scale'\]\. For example: \{'scale': 655"),
        ({"model": 1, "scaler": STATE_DICT}, ValueError, r"Unknown key 'model' .* For example: checkpoint\['scaler'\]"),
        (STATE_DICT | {"growth_factr": 2.0}, ValueError, r"Unknown key 'growth_factr' .* Did you mean 'growth_factor'"),
        (STATE_DICT | {"scale": "8.0"}, TypeError, r"'scale' must be a positive number, got '8\.0'\. For example: 655"),
        (STATE_DICT | {"scale": np.ones(1)}, TypeError, r"'scale' must be a positive number, got array\(\[1\.\]\)\. F"),
        (STATE_DICT | {"scale": None}, TypeError, r"'scale' must be a positive number, got None\. For example: 65536"),
        (STATE_DICT | {"scale": 0.0}, ValueError, r"'scale' must be a positive number, got 0\.0\. For example: 65536"),
        (STATE_DICT | {"scale": np.inf}, ValueError, r"'scale' must be a positive number, got inf\. For example: 655"),
        (STATE_DICT | {"growth_factor": 1}, ValueError, r"'growth_factor' must be a number above one, got 1\. For ex"),
        (STATE_DICT | {"backoff_factor": 1.0}, ValueError, r"must be a number between zero and one, got 1\.0\. For e"),
        (STATE_DICT | {"growth_interval": 0}, ValueError, r"must be a whole number of at least one, got 0\. For exam"),
        (STATE_DICT | {"growth_interval": True}, TypeError, r"must be a whole number of at least one, got True\. For"),
        (STATE_DICT | {"_growth_tracker": 1.5}, ValueError, r"must be a whole number of at least zero, got 1\.5\. Fo"),
        (STATE_DICT | {"_growth_tracker": np.nan}, ValueError, r"must be a whole number of at least zero, got nan"),
    ],
)  # fmt: skip
def test_bad_dicts_are_errors_that_show_a_good_one(state_dict, error, text):
    with pytest.raises(error, match=text):
        loss_scale_from_state_dict(state_dict)


def test_what_torch_does_not_have_is_an_error():
    text = r"GradScaler has neither a static scale nor hysteresis, got \w+LossScale\(.* For example: DynamicLossScale\("
    for scale in (jmp.StaticLossScale(8.0), jmp.DynamicLossScale(8.0, hysteresis=2)):
        with pytest.raises(ValueError, match=text):
            grad_scaler_state_dict(scale)


# Every difference from GradScaler is a row of a table in the reference, and a check holds it.

checks = Checks()
AT_START = TRAININGS["as torch begins"]


def test_every_difference_has_a_check_and_every_check_its_difference():
    assert rows_of("PyTorch") == list(checks)


SLOW = ("unit of the counter", "`unscale_` to clip", "float16 gradients")


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW)) for row in rows_of("PyTorch")]
)
def test_it_is_as_the_table_says(row):
    checks[row]()


def adjusted(changes, *finite):
    """The scale after some steps, from the numbers of torch with some changes."""
    scale, _ = _adjusted(loss_scale_from_state_dict(AT_START | changes), jnp.array(finite))
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
    scale = loss_scale_from_state_dict(AT_START | {"growth_interval": 10**12, "_growth_tracker": 7})
    after = AT_START | {"growth_interval": 2**31 - 1, "_growth_tracker": 8}
    assert grad_scaler_state_dict(scale.adjust(jnp.array(True))) == after


@checks.holds("zeros")
def what_would_stand_still_is_an_error():
    for key in ("scale", "backoff_factor", "growth_interval"):
        with pytest.raises(ValueError, match=rf"^'{key}' must be "):
            loss_scale_from_state_dict(AT_START | {key: 0})


@checks.holds("a new scale")
def a_new_scale_is_half_of_that_of_torch():
    assert float(jmp.DynamicLossScale().loss_scale) == AT_START["scale"] / 2


@checks.holds("unit of the counter")
def microbatches_are_counted_where_they_are_accumulated_inside():
    tx = jmp.optim.loss_scaled(optax.MultiSteps(optax.sgd(0.1), 2), loss_scale_from_state_dict(AT_START))
    params = jnp.ones(2)
    state = tx.init(params)
    for _ in range(2):
        with jax.numpy_dtype_promotion("standard"):  # which optax's own accumulation asks for
            params, state = jmp.optim.step(tx, jnp.ones(2), state, params)
    assert grad_scaler_state_dict(state)["_growth_tracker"] == 2
    np.testing.assert_allclose(params, 0.9)  # of one step


@checks.holds("several optimizers")
def each_optimizer_has_a_scale_of_its_own():
    tx = jmp.optim.loss_scaled(optax.sgd(0.1), loss_scale_from_state_dict(AT_START))
    states = [tx.init(jnp.ones(2)) for _ in range(2)]
    _, states[0] = jmp.optim.step(tx, jnp.full(2, jnp.inf), states[0], jnp.ones(2))
    assert [grad_scaler_state_dict(state)["scale"] for state in states] == [2.0**15, 2.0**16]


@checks.holds("a skipped step")
def a_schedule_does_not_count_a_skipped_step():
    tx = jmp.optim.loss_scaled(optax.sgd(lambda count: jnp.float32(0.1)), loss_scale_from_state_dict(AT_START))
    params = jnp.ones(2)
    state = tx.init(params)
    for gradient in (1.0, jnp.inf, 1.0):
        params, state = jmp.optim.step(tx, jnp.full(2, gradient), state, params)
    assert optax.tree_utils.tree_get(state, "count") == 2


@checks.holds("`unscale_` to clip", "float16 gradients")
def gradients_are_true_and_of_float16_parameters_in_float32():
    params = jnp.ones(2, jnp.float16)
    loss = lambda params: jnp.sum(params.astype(jnp.float32) ** 2)
    scale = loss_scale_from_state_dict(AT_START | {"scale": 8.0})
    value, gradients = jmp.value_and_grad(loss, loss_scale=scale)(params)
    assert (value, gradients.dtype, gradients.tolist()) == (2, jnp.float32, [2, 2])
