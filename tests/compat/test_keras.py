"""Keras's names over ours: attributes, errors, configs, lookup, and what they stand for."""

import copy
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras

DTYPES = {
    "float32": ("float32", "float32"),
    "float16": ("float16", "float16"),
    "bfloat16": ("bfloat16", "bfloat16"),
    "float64": ("float64", "float64"),
    "mixed_float16": ("float16", "float32"),
    "mixed_bfloat16": ("bfloat16", "float32"),
}
INFERRED = {
    "infer": (None, None),
    "infer_float32_vars": (None, "float32"),
    "infer_with_float32_vars": (None, "float32"),
    "float16_with_float32_vars": ("float16", "float32"),
    "bfloat16_with_float32_vars": ("bfloat16", "float32"),
    "float32_with_float32_vars": ("float32", "float32"),
}


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


@pytest.mark.parametrize("kind", [keras.DTypePolicy, keras.FloatDTypePolicy, keras.Policy])
@pytest.mark.parametrize(("name", "dtypes"), DTYPES.items())
def test_names_stand_for_the_dtypes_of_keras(kind, name, dtypes):
    policy = kind(name)
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == (name, *dtypes)
    compute, variable = dtypes
    assert jmp.get_policy(policy) is jmp.Policy(variable, compute, compute)


@pytest.mark.parametrize("kind", [keras.DTypePolicy, keras.FloatDTypePolicy])
def test_repr_is_that_of_keras(kind):
    assert repr(kind("mixed_float16")) == '<DTypePolicy "mixed_float16">'


@pytest.mark.parametrize(
    "round_trip",
    [
        lambda p: type(p).from_config(p.get_config()),
        lambda p: type(p).from_config(json.loads(json.dumps(p.get_config()))),
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
    ],
)
@pytest.mark.parametrize(
    "policy",
    [
        keras.DTypePolicy("mixed_float16"),
        keras.FloatDTypePolicy("float32"),
        keras.Policy("mixed_float16"),
        keras.Policy("mixed_float16", loss_scale=None),
        keras.Policy("mixed_float16", loss_scale=1024),
        keras.Policy("float16", loss_scale="dynamic"),
        keras.Policy("float16", loss_scale=jmp.DynamicLossScale(8.0, period=7, hysteresis=2)),
        keras.Policy("infer", loss_scale=jmp.NoOpLossScale()),
        keras.DTypePolicyMap(),
        keras.DTypePolicyMap("mixed_bfloat16", {"head": "float32", "b.*": keras.Policy("float16", loss_scale=2.0)}),
    ],
    ids=repr,
)
def test_policies_survive_their_config_and_copies(policy, round_trip):
    again = round_trip(policy)
    assert again == policy
    assert repr(again) == repr(policy)
    assert jmp.get_policy(again) == jmp.get_policy(policy)


def test_a_config_is_the_name():
    assert keras.DTypePolicy("mixed_float16").get_config() == {"name": "mixed_float16"}
    assert keras.Policy("mixed_float16").get_config() == {"name": "mixed_float16"}
    assert keras.Policy("float16", None).get_config() == {"name": "float16", "loss_scale": None}


def test_equality_is_by_name_and_class_and_equal_policies_hash_alike():
    a, b = keras.DTypePolicy("mixed_float16"), keras.FloatDTypePolicy("mixed_float16")
    assert a == b
    assert len({a, b, keras.DTypePolicy("mixed_float16")}) == 1
    assert a != keras.DTypePolicy("float16")
    assert a != keras.Policy("mixed_float16")
    assert a != "mixed_float16"
    assert keras.Policy("float16", 2.0) != keras.Policy("float16", 4.0)


@pytest.mark.parametrize("kind", [keras.DTypePolicy, keras.FloatDTypePolicy, keras.Policy])
@pytest.mark.parametrize("name", ["mixed_float8", "flaot16", "int8", "", "string", "mixed_int8"])
def test_a_bad_name_is_the_value_error_of_keras(kind, name):
    with pytest.raises(
        ValueError, match=rf"^Cannot convert '{name}' to a mixed precision DTypePolicy\. Valid policies"
    ):
        kind(name)


@pytest.mark.parametrize("name", [3, jnp.float32, np.dtype("float32"), ["float32"]], ids=repr)
def test_a_name_that_is_no_string_is_the_type_error_of_keras(name):
    with pytest.raises(TypeError, match=r"^'name' must be a string, such as 'mixed_float16'\. Received: name="):
        keras.DTypePolicy(name)


def test_the_legacy_policy_has_no_default_name():
    with pytest.raises(TypeError, match=r"^'name' must be a string, such as 'mixed_float16'\. Received: name=None$"):
        keras.Policy(None)


def test_policies_are_read_wherever_a_policy_stands():
    policy = keras.DTypePolicy("mixed_bfloat16")
    assert jmp.with_policy(lambda x: x, policy)(jnp.ones(2)).dtype == jnp.bfloat16
    assert jmp.with_policy(policy)(lambda x: x)(jnp.ones(2)).dtype == jnp.bfloat16
    assert jmp.PolicyMap({"head": policy})["head"].name == "mixed_bfloat16"
    with jmp.use_policy(policy):
        assert jmp.default_policy().name == "mixed_bfloat16"


def test_convert_input_casts_floating_arrays_if_asked_to():
    policy, tree = keras.DTypePolicy("mixed_float16"), [jnp.ones(2), jnp.arange(2)]
    cast = policy.convert_input(tree, autocast=True, dtype=policy.compute_dtype)
    assert [str(x.dtype) for x in cast] == ["float16", "int32"]
    assert policy.convert_input(tree, autocast=False, dtype="float16") is tree


@pytest.mark.parametrize(("name", "dtypes"), INFERRED.items())
def test_the_inferred_names_resolve_as_keras_documented(name, dtypes):
    policy = keras.Policy(name)
    assert (policy.compute_dtype, policy.variable_dtype) == dtypes
    assert policy.should_cast_variables == (dtypes[0] != dtypes[1])
    assert jmp.get_policy(policy) is jmp.get_policy(name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_infer_takes_both_dtypes_from_the_first_input(dtype):
    x = (3, jnp.arange(2), jnp.ones(2, dtype), jnp.ones(2))
    policy = keras.Policy("infer").resolve(*x)
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == (dtype, dtype, dtype)
    policy = keras.Policy("infer_float32_vars").resolve(*x)
    assert (policy.compute_dtype, policy.variable_dtype) == (dtype, "float32")
    assert policy.name == ("float32" if dtype == "float32" else f"{dtype}_with_float32_vars")
    assert policy.resolve(jnp.ones(2, jnp.float32)) is policy


def test_an_inferred_policy_keeps_its_loss_scale():
    policy = keras.Policy("infer", loss_scale=8).resolve(jnp.float16(1))
    assert policy.loss_scale == jmp.StaticLossScale(8.0)


def test_legacy_aliases_are_their_canonical_names():
    assert keras.Policy("infer_float32_vars").name == "infer_with_float32_vars"
    assert keras.Policy("float32_with_float32_vars").name == "float32"


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("mixed_float16", {}, jmp.DynamicLossScale),
        ("mixed_bfloat16", {}, type(None)),
        ("float16", {}, type(None)),
        ("infer", {}, type(None)),
        ("mixed_float16", {"loss_scale": None}, type(None)),
        ("float16", {"loss_scale": "dynamic"}, jmp.DynamicLossScale),
        ("float16", {"loss_scale": 128}, jmp.StaticLossScale),
        ("float16", {"loss_scale": np.float32(128)}, jmp.StaticLossScale),
        ("float16", {"loss_scale": jmp.NoOpLossScale()}, jmp.NoOpLossScale),
    ],
)
def test_loss_scale_is_dynamic_by_default_for_mixed_float16_alone(name, arguments, kind):
    scale = keras.Policy(name, **arguments).loss_scale
    assert type(scale) is kind
    assert scale is None or isinstance(scale, keras.LossScale)


@pytest.mark.parametrize("bad", ["static", True, [], {"class_name": "Other", "config": {}}], ids=repr)
def test_a_bad_loss_scale_is_an_error(bad):
    with pytest.raises(
        ValueError, match=r"^Could not interpret loss scale identifier: .*for example Policy\('mixed_float16'"
    ):
        keras.Policy("float16", bad)


def test_the_global_policy_is_our_default_policy():
    for setter, getter in [
        (keras.set_dtype_policy, keras.dtype_policy),
        (keras.set_global_policy, keras.global_policy),
    ]:
        setter("mixed_bfloat16")
        assert getter() == keras.DTypePolicy("mixed_bfloat16")
        assert jmp.default_policy().name == "mixed_bfloat16"
        assert keras.DTypePolicy() == getter()
        jmp.set_default_policy("float32")
        assert getter() == keras.DTypePolicy("float32")
    with jmp.use_policy("p=f32,c=bf16,o=f32"):
        assert keras.dtype_policy().compute_dtype == "bfloat16"
        assert jmp.get_policy(keras.dtype_policy()) is jmp.default_policy()


def test_the_legacy_setter_keeps_the_loss_scale():
    keras.set_policy("mixed_float16")
    assert isinstance(keras.global_policy().loss_scale, jmp.DynamicLossScale)
    keras.set_policy(keras.Policy("float16", loss_scale=64))
    assert keras.global_policy() == keras.Policy("float16", loss_scale=64)
    keras.set_policy(None)
    assert keras.global_policy() == keras.DTypePolicy("float32")


@pytest.mark.parametrize("bad", [3, None, jnp.float32, jmp.get_policy("float32")], ids=repr)
def test_a_global_policy_is_a_name_or_a_dtype_policy(bad):
    with pytest.raises(
        ValueError, match=r"^Invalid `policy` argument\. Expected the string name of a policy .*Received: "
    ):
        keras.set_dtype_policy(bad)


def test_a_global_map_is_frozen_when_it_is_set():
    policies = keras.DTypePolicyMap("mixed_bfloat16", {"head": "float32"})
    keras.set_dtype_policy(policies)
    assert keras.dtype_policy() is policies
    assert keras.DTypePolicy().name == "mixed_bfloat16"
    policies["body"] = "float16"
    assert keras.dtype_policy()["body"].name == "mixed_bfloat16"
    assert jmp.default_policy()["body"].name == "mixed_bfloat16"


def test_a_global_map_with_types_as_keys_has_no_name_in_keras():
    with (
        jmp.use_policy(jmp.PolicyMap({dict: "float16"}, "float32")),
        pytest.raises(ValueError, match=r"^The default policy has the module type dict as a key: PolicyMap\("),
    ):
        keras.dtype_policy()
    with jmp.use_policy(jmp.PolicyMap({"head": "float16"}, "float32")):
        assert keras.dtype_policy() == keras.DTypePolicyMap("float32", {"head": "float16"})
