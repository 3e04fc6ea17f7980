"""Keras's loss-scaling optimizer, and what TensorFlow saved of loss scales."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras


def scale_of(*args, **kwargs):
    return keras.LossScaleOptimizer(optax.sgd(0.1), *args, **kwargs).init({"w": jnp.ones(2)}).loss_scale


def test_the_optimizer_has_the_defaults_of_keras_and_takes_what_tf_keras_saved():
    scale = scale_of()
    assert (float(scale.loss_scale), scale.period, scale.factor) == (2.0**15, 2000, 2)
    for arguments in [{"dynamic_growth_steps": 3}, {"dynamic": True, "dynamic_growth_steps": 3}]:
        scale = scale_of(8.0, **arguments)
        assert (float(scale.loss_scale), scale.period) == (8.0, 3)
    assert scale_of(initial_scale=8, dynamic=False, dynamic_growth_steps=None) == jmp.StaticLossScale(8.0)


@pytest.mark.parametrize("number", [128, np.int32(128), np.float32(128), 128.0, jnp.float32(128)], ids=repr)
def test_an_initial_scale_is_any_number_and_needs_no_warning_of_its_dtype(number):
    scale = scale_of(number).loss_scale
    assert (float(scale), scale.dtype) == (128.0, jnp.float32)


@pytest.mark.parametrize(("initial", "after"), [(0.25, 0.25), (1.5, 1.0), (2.0**25, 2.0**24)])
def test_an_overflow_never_raises_a_scale_that_starts_beyond_our_bounds(initial, after):
    assert float(scale_of(initial).adjust(jnp.array(False)).loss_scale) == after


@pytest.mark.slow
def test_an_overflow_halves_the_scale_and_changes_no_parameter():
    tx = keras.LossScaleOptimizer(optax.sgd(0.1, momentum=0.9), 8.0)
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([jnp.inf, 1])}
    after, state = jax.jit(lambda g, s, p: jmp.optim.step(tx, g, s, p))(grads, tx.init(params), params)
    assert after["w"].tolist() == [1, 1]
    assert float(state.loss_scale.loss_scale) == 4.0


@pytest.mark.parametrize("initial", [4096, 2.0**25])
def test_the_dynamic_loss_scale_that_tensorflow_saved_goes_on_here(initial):
    saved = {"initial_loss_scale": initial, "increment_period": 2, "multiplier": 4.0}
    config = {"name": "mixed_float16", "loss_scale": {"class_name": "DynamicLossScale", "config": saved}}
    policy = keras.Policy.from_config(config)
    scale = policy.loss_scale
    assert (float(scale.loss_scale), scale.period) == (initial, 2)
    for finite, factor in [(False, 0.25), (True, 0.25), (True, 1.0)]:
        scale = scale.adjust(jnp.array(finite))
        assert float(scale.loss_scale) == initial * factor
    assert keras.Policy.from_config(policy.get_config()) == policy
