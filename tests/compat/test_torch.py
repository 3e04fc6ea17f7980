"""A loss scale moves between torch's GradScaler and ours, and goes on as it would have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp
from jmp_policy.compat.torch import grad_scaler_state_dict, loss_scale_from_state_dict

STATE_DICT = {
    "scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 7, "_growth_tracker": 3
}  # fmt: skip
# The factors are float32 numbers: torch multiplies in float64, and rounds others once less than JAX does.
TRAININGS = {
    "as torch begins": STATE_DICT | {"scale": 65536.0, "growth_interval": 2000, "_growth_tracker": 0},
    "on the way": STATE_DICT,
    "before growth": STATE_DICT | {"_growth_tracker": 6},
    "other factors": STATE_DICT | {"growth_factor": 1.5, "backoff_factor": 0.625},
    "at every step": STATE_DICT
    | {"growth_factor": 1.0625, "backoff_factor": 0.8125, "growth_interval": 1, "_growth_tracker": 0},
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


@pytest.mark.parametrize(("saved", "after"), [(0.25, 0.25), (1.5, 1.0), (2.0**25, 2.0**24)])
def test_an_overflow_never_raises_a_scale_that_torch_took_below_our_floor(saved, after):
    scale = loss_scale_from_state_dict(STATE_DICT | {"scale": saved})
    assert float(scale.adjust(jnp.array(False)).loss_scale) == after


def test_a_scale_above_our_ceiling_comes_back_to_where_it_was():
    scale = loss_scale_from_state_dict(STATE_DICT | {"scale": 2.0**25, "growth_interval": 1})
    for finite in (True, False, True):
        scale = scale.adjust(jnp.array(finite))
    assert float(scale.loss_scale) == 2.0**25


def test_a_count_that_has_passed_its_interval_is_complete():
    scale = loss_scale_from_state_dict(STATE_DICT | {"_growth_tracker": 9}).adjust(jnp.array(True))
    assert (float(scale.loss_scale), int(scale.counter)) == (8192.0, 0)


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


@pytest.mark.parametrize("scale", [jmp.StaticLossScale(8.0), jmp.DynamicLossScale(8.0, hysteresis=2)])
def test_what_torch_does_not_have_is_an_error(scale):
    text = r"GradScaler has neither a static scale nor hysteresis, got \w+LossScale\(.* For example: DynamicLossScale\("
    with pytest.raises(ValueError, match=text):
        grad_scaler_state_dict(scale)
