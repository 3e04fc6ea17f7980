"""What is wrong with the others, as tests of ours: each is named after the library and its bug."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp

adjust = jax.jit(lambda scale, finite: scale.adjust(finite))


def test_jmp_hashes_equal_policies_differently():
    a = jmp.Policy(jnp.float32, jnp.bfloat16, np.dtype("float32"))
    b = jmp.Policy(np.float32, np.dtype("bfloat16"), "float32")
    assert a == b
    assert hash(a) == hash(b)


def test_jmp_cannot_print_a_policy_of_numpy_dtypes():
    policy = jmp.Policy(np.dtype("float32"), np.dtype("float16"), np.dtype("float32"))
    assert jmp.get_policy(str(policy)) is policy


@pytest.mark.parametrize("text", ["bflaot16", "f", "hlaf", "flot32", "mixd_float16", "fl32", "brain16"])
def test_jmp_recommends_a_name_that_it_rejects(text):
    with pytest.raises(ValueError, match="For example") as error:
        jmp.get_policy(text)
    quoted = str(error.value).split("'")[3::2]  # after the bad text itself
    assert quoted
    for name in quoted:
        assert isinstance(jmp.get_policy(name), jmp.Policy)


@pytest.mark.slow
def test_flax_scale_moves_as_ours_does_with_the_settings_that_are_documented():
    """Those of `DynamicLossScale`'s docstring, with a shorter interval."""
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale")
    interval = 2
    theirs = dynamic_scale.DynamicScale(growth_interval=interval)
    ours = jmp.DynamicLossScale(2.0**16, period=interval + 1, min_loss_scale=2.0**-126, max_loss_scale=math.inf)

    @jax.jit
    def step(theirs, ours, number):
        theirs, finite, *_ = theirs.value_and_grad(lambda w: w * number)(1.0)
        return theirs, ours.adjust(finite)

    for number in np.random.default_rng(0).choice([1.0, 1.0, 1.0, np.inf], 40).astype(np.float32):
        theirs, ours = step(theirs, ours, number)
        assert (float(theirs.scale), int(theirs.fin_steps)) == (float(ours.loss_scale), int(ours.counter))


@pytest.mark.slow
def test_flax_does_not_forward_keyword_arguments():
    grads = jmp.grad(lambda w, *, x: (w * x).sum(), loss_scale=jmp.DynamicLossScale())(jnp.ones(2), x=3.0)
    assert grads.tolist() == [3, 3]


def test_mpx_ignores_a_dtype_given_as_a_string():
    assert jmp.cast_floating({"w": jnp.ones(2)}, "float16")["w"].dtype == jnp.float16
    with pytest.raises(ValueError, match=r"^Unknown dtype 'flaot16'"):
        jmp.cast_floating({"w": jnp.ones(2)}, "flaot16")


def test_keras_keys_scaling_off_the_name_of_the_policy():
    for spec in ("float16", "mixed_float16", "p=f32,c=f16,o=f32", jmp.Policy("float32", "float16", None)):
        assert isinstance(jmp.get_policy(spec).loss_scale(), jmp.DynamicLossScale)
    rules = jmp.PolicyMap({"head": "float32"}, "float16")
    assert isinstance(rules.loss_scale(), jmp.DynamicLossScale)


def test_keras_policies_cannot_be_hashed_and_its_maps_change_what_they_store():
    policy = jmp.get_policy("mixed_float16")
    rules = jmp.PolicyMap({"head": policy})
    rules.get_config()["rules"].clear()
    assert {policy: 1, rules: 2}[rules] == 2
    assert rules["head"] is policy
    assert policy.name == "mixed_float16"


def test_keras_does_not_hand_a_composites_policy_to_its_children():
    assert jmp.PolicyMap({"block": "bfloat16"}, "float32")["block/dense"].name == "bfloat16"


@pytest.mark.slow
def test_transformer_engine_reads_a_global_while_tracing():
    f = jax.jit(lambda x: jmp.get_policy(None).cast_to_compute(x))
    dtypes = []
    for name in ("bfloat16", "float16", "bfloat16"):
        with jmp.use_policy(name):
            dtypes.append(str(f(jnp.ones(2)).dtype))
    assert dtypes == ["bfloat16", "float16", "bfloat16"]
