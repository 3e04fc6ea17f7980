"""Keras's loss-scaling optimizer, and what TensorFlow saved of loss scales."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras


def _scale_of(*args, **kwargs):
    return jmp.get_loss_scale(keras.LossScaleOptimizer(optax.sgd(0.1), *args, **kwargs).init({"w": jnp.ones(2)}))


def test_the_optimizer_has_the_defaults_of_keras():
    scale = _scale_of()
    assert (float(scale.loss_scale), scale.period, scale.factor) == (2.0**15, 2000, 2)
    scale = _scale_of(8.0, 3)
    assert (float(scale.loss_scale), scale.period) == (8.0, 3)
    assert _scale_of(initial_scale=8, dynamic=False) == jmp.StaticLossScale(8.0)


@pytest.mark.parametrize("config", [
    {"initial_scale": 8.0, "dynamic": True, "dynamic_growth_steps": 3},
    {"initial_scale": 8.0, "dynamic": False, "dynamic_growth_steps": None},
])  # fmt: skip
def test_what_tf_keras_saves_of_its_optimizer_are_our_arguments(config):
    scale = _scale_of(**config)
    assert float(scale.loss_scale) == 8.0
    assert getattr(scale, "period", None) == config["dynamic_growth_steps"]


@pytest.mark.parametrize("number", [128, 2**15, np.int32(128), np.float32(128), 128.0, jnp.float32(128)], ids=repr)
def test_an_initial_scale_is_any_number_and_needs_no_warning_of_its_dtype(number):
    scale = _scale_of(number).loss_scale
    assert (float(scale), scale.dtype) == (float(number), jnp.float32)


@pytest.mark.parametrize("dynamic", [True, False, np.True_])
def test_the_second_argument_of_tf_keras_is_not_taken_for_a_scale_of_one(dynamic):
    text = rf"^`initial_scale` must be a positive finite number, got .*{dynamic}.* For example: .*, dynamic=True\)"
    with pytest.raises(TypeError, match=text):
        _scale_of(dynamic)


@pytest.mark.parametrize(("arguments", "error", "text"), [
    (("dynamic",), TypeError, r"^`initial_scale` must be a positive finite number, got 'dynamic'\. For example: Lo"),
    ((jmp.DynamicLossScale(8.0),), TypeError, r"got DynamicLossScale\(.* goes to jmp_policy\.optim\.loss_scaled\(in"),
    ((8.0, 2.5), TypeError, r"^`dynamic_growth_steps` must be a positive int, got 2\.5\. For example: LossScaleOp"),
    ((8.0, True), TypeError, r"^`dynamic_growth_steps` must be a positive int, got True\. For example: LossScaleO"),
    ((8.0, 0), ValueError, r"^`dynamic_growth_steps` must be a positive int, got 0\. For example: LossScaleOpti"),
    ((0.0,), ValueError, r"^`initial_scale` must be a positive finite number, got 0\.0\. For example: LossScal"),
    ((np.inf,), ValueError, r"^`initial_scale` must be a positive finite number, got inf\. For example: LossScale"),
])  # fmt: skip
def test_bad_arguments_of_the_optimizer_are_errors(arguments, error, text):
    with pytest.raises(error, match=text):
        _scale_of(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("initial", "after"), [(0.25, 0.25), (1.5, 1.0), (2.0**25, 2.0**24)])
def test_an_overflow_never_raises_a_scale_that_starts_beyond_our_bounds(initial, after):
    assert float(_scale_of(initial).adjust(jnp.array(False)).loss_scale) == after


@pytest.mark.slow
def test_an_overflow_halves_the_scale_and_changes_no_parameter():
    tx = keras.LossScaleOptimizer(optax.sgd(0.1, momentum=0.9), 8.0)
    params = {"w": jnp.ones(2)}
    after, state = jax.jit(lambda g, s, p: jmp.optim.step(tx, g, s, p))(
        {"w": jnp.array([jnp.inf, 1])}, tx.init(params), params
    )
    assert after["w"].tolist() == [1, 1]
    assert float(state.loss_scale.loss_scale) == 4.0


def test_the_scale_has_a_floor_where_that_of_keras_reaches_zero():
    scale = _scale_of()
    for _ in range(20):
        scale = scale.adjust(False)
    assert float(scale.loss_scale) == 1.0


@pytest.mark.parametrize("initial", [4096.0, 4096, 2.0**25])
def test_the_dynamic_loss_scale_that_tensorflow_saved_goes_on_here(initial):
    saved = {"initial_loss_scale": initial, "increment_period": 2, "multiplier": 4.0}
    policy = keras.Policy.from_config(
        {"name": "mixed_float16", "loss_scale": {"class_name": "DynamicLossScale", "config": saved}}
    )
    scale = policy.loss_scale
    assert (float(scale.loss_scale), scale.period) == (initial, 2)
    for finite, factor in [(False, 0.25), (True, 0.25), (True, 1.0)]:
        scale = scale.adjust(jnp.array(finite))
        assert float(scale.loss_scale) == initial * factor
    assert keras.Policy.from_config(policy.get_config()) == policy


def test_the_fixed_loss_scale_that_tensorflow_saved_is_a_static_one():
    saved = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 128.0}}
    assert keras.Policy("float16", loss_scale=saved).loss_scale == jmp.StaticLossScale(128.0)


@pytest.mark.parametrize("bad", [
    {"class_name": "FixedLossScale", "config": {"loss_scale": 128.0}},
    {"class_name": "DynamicLossScale", "config": {"initial_loss_scale": 8.0, "period": 3}},
    {"class_name": "DynamicLossScale", "config": {"increment": 8.0}},
    {"class_name": "DynamicLossScale"},
    {"class_name": ["DynamicLossScale"], "config": {}},
], ids=repr)  # fmt: skip
def test_the_config_of_no_loss_scale_is_an_error_that_quotes_it(bad):
    with pytest.raises(ValueError, match=r"^Could not interpret loss scale identifier: \{'class_name': .* example Pol"):
        keras.Policy("float16", bad)
