"""Keras's global policy is the object that was set, in whichever way it was, and nothing compiled mistakes it."""

import threading

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


def test_the_global_policy_inside_use_policy_keeps_its_name_and_its_loss_scale():
    outer, inner = keras.Policy("mixed_float16", loss_scale=64), keras.Policy("infer_float32_vars", loss_scale=8)
    with jmp.use_policy(outer):
        assert keras.global_policy() is outer
        with jmp.use_policy(inner):
            assert keras.global_policy() is inner
        with jmp.use_policy("mixed_float16"):
            assert keras.global_policy() == keras.DTypePolicy("mixed_float16")
        assert keras.global_policy() is outer
    assert keras.global_policy() == keras.DTypePolicy("float32")


def test_the_global_policy_is_what_our_own_setter_was_given_until_another_is_set():
    policy = keras.Policy("mixed_float16", loss_scale=64)
    jmp.set_default_policy(policy)
    assert keras.global_policy() is policy
    jmp.set_default_policy("mixed_float16")
    assert keras.global_policy() == keras.DTypePolicy("mixed_float16")


def test_a_policy_in_use_is_that_of_its_thread_and_one_that_is_set_that_of_all():
    keras.set_policy("mixed_float16")
    seen = []
    with jmp.use_policy(keras.Policy("mixed_float16", loss_scale=64)):
        thread = threading.Thread(target=lambda: seen.append(keras.global_policy()))
        thread.start()
        thread.join()
    assert seen == [keras.Policy("mixed_float16")]


@pytest.mark.slow
def test_what_is_compiled_under_one_loss_scale_is_not_run_under_another():
    traced = []

    @jax.jit
    def scaled(x):
        traced.append(x)
        return keras.global_policy().loss_scale.scale(x)

    for loss_scale in (64, 128, 64, 128):  # fresh policies: equal ones compile nothing again
        with jmp.use_policy(keras.Policy("mixed_float16", loss_scale=loss_scale)):
            assert scaled(jnp.float32(1)) == loss_scale
    assert len(traced) == 2


def test_a_map_that_was_changed_is_no_longer_the_global_policy():
    policies = keras.DTypePolicyMap("mixed_bfloat16", {"head": "float32"})
    with jmp.use_policy(policies):
        assert keras.dtype_policy() is policies
        policies["body"] = "float16"
        assert keras.dtype_policy() == keras.DTypePolicyMap("mixed_bfloat16", {"head": "float32"})
        del policies["body"]
        assert keras.dtype_policy() is policies
