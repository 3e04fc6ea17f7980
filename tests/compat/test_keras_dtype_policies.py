"""`keras.dtype_policies`: how a policy is found, and that what Keras and TensorFlow wrote is read, and the reverse."""

import copy
import json
import pickle

import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies

# What Keras 3.16 writes for the policies of the same names.
IN_KERAS = [
    ("mixed_float16", {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "mixed_float16"}}),
    ("int8_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedDTypePolicy",
                           "config": {"mode": "int8", "source_name": "float32"}}),
    ("int4_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedDTypePolicy",
                           "config": {"mode": "int4", "source_name": "float32"}}),
    ("int4/64_from_float32", {"module": "keras.dtype_policies", "class_name": "Int4DTypePolicy",
                              "config": {"mode": "int4/64", "source_name": "float32"}}),
    ("int4/-1_from_bfloat16", {"module": "keras.dtype_policies", "class_name": "Int4DTypePolicy",
                               "config": {"mode": "int4/-1", "source_name": "bfloat16"}}),
    ("float8_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedFloat8DTypePolicy",
                             "config": {"mode": "float8", "source_name": "float32", "amax_history_length": 1024}}),
]  # fmt: skip
SERIALIZED = {name: config | {"registered_name": None} for name, config in IN_KERAS}


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


@pytest.mark.parametrize("name", SERIALIZED)
def test_a_policy_is_written_as_keras_writes_it_and_read_again(name):
    policy = dtype_policies.get(name)
    assert dtype_policies.serialize(policy) == SERIALIZED[name]
    assert dtype_policies.deserialize(json.loads(json.dumps(SERIALIZED[name]))) == policy
    assert dtype_policies.get(SERIALIZED[name]) == policy
    assert (policy.name, type(policy).__name__) == (name, SERIALIZED[name]["class_name"])


def test_a_map_is_written_as_keras_writes_it_and_read_again():
    policies = keras.DTypePolicyMap(policy_map={name: name for name in SERIALIZED})
    config = {"default_policy": None, "policy_map": SERIALIZED}
    expected = {"module": "keras.dtype_policies", "class_name": "DTypePolicyMap", "registered_name": None}
    assert dtype_policies.serialize(policies) == expected | {"config": config}
    again = dtype_policies.deserialize(json.loads(json.dumps(expected | {"config": config})))
    assert again == policies
    assert {path: type(policy) for path, policy in again.items()} == {
        path: type(policy) for path, policy in policies.items()
    }


def test_a_map_that_keras_wrote_takes_what_it_left_open_from_the_global_policy():
    """A map without a default forgets the names of its policies when Keras writes it."""
    config = {
        "default_policy": None,
        "policy_map": {
            "a": {"module": "keras", "class_name": "DTypePolicy", "config": {"name": None}},
            "b": {"class_name": "Int4DTypePolicy", "config": {"mode": "int4/-1", "source_name": None}},
        },
    }
    keras.set_dtype_policy("mixed_bfloat16")
    policies = keras.DTypePolicyMap.from_config(config)
    assert [policies[path].name for path in "ab"] == ["mixed_bfloat16", "int4/-1_from_mixed_bfloat16"]
    named = keras.DTypePolicyMap.from_config({"default_policy": "float16", "policy_map": {}})
    assert named.default_policy == keras.DTypePolicy("float16")


@pytest.mark.parametrize("class_name", ["Policy", "PolicyV1"])
def test_the_policies_of_tensorflow_keep_the_loss_scale_that_they_were_written_with(class_name):
    scale = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 128.0}}
    policy = dtype_policies.get({"class_name": class_name, "config": {"name": "mixed_float16", "loss_scale": scale}})
    assert policy == keras.Policy("mixed_float16", loss_scale=128)
    assert dtype_policies.deserialize(dtype_policies.serialize(policy)) == policy
    assert dtype_policies.serialize(policy)["module"] is None  # Keras 3 has no such class, and says so


def test_get_finds_whatever_stands_for_a_policy():
    policy, policies = keras.FloatDTypePolicy("bfloat16"), keras.DTypePolicyMap("float16")
    assert dtype_policies.get(policy) is policy
    assert dtype_policies.get(policies) is policies
    assert dtype_policies.get(jnp.bfloat16) == dtype_policies.get(jmp.get_policy("bfloat16")) == policy
    assert dtype_policies.get(None) == keras.DTypePolicy("float32")
    keras.set_dtype_policy(policies)
    assert dtype_policies.get(None) is policies


def test_a_dtype_whose_name_begins_like_a_quantization_is_a_dtype():
    assert dtype_policies.get("float8_e4m3fn") == keras.DTypePolicy("float8_e4m3fn")


def test_a_class_of_the_user_is_read_under_its_name():
    class Named(keras.DTypePolicy):
        pass

    written = dtype_policies.serialize(keras.DTypePolicyMap("float32", {"a": Named("bfloat16")}))
    again = dtype_policies.deserialize(written, custom_objects={"Named": Named})
    assert type(again["a"]) is Named
    assert type(dtype_policies.deserialize(written["config"]["policy_map"]["a"], {"Named": Named})) is Named


@pytest.mark.parametrize(("make", "error", "text"), [
    (lambda: dtype_policies.get(123), ValueError,
     r"^Cannot interpret `dtype` argument as a dtype policy\. Received: 123 of type .*For example: 'mixed_bfloat16'"),
    (lambda: dtype_policies.get("mixed_bfloat15"), ValueError, r"^Cannot convert 'mixed_bfloat15' to a mixed prec"),
    (lambda: dtype_policies.get("int8_from_"), ValueError, r"^Cannot convert '' to a mixed precision DTypePolicy\."),
    (lambda: dtype_policies.get("int8"), ValueError,
     r"^Cannot convert 'int8' to a mixed .* .int8. does not say which dtypes .* For example: .int8_from_mixed"),
    (lambda: keras.set_dtype_policy("float8_form_bfloat16"), ValueError, r"^Cannot convert .*mean .float8_from_"),
    (lambda: dtype_policies.get("ternary_from_float32"), ValueError,
     r"^Invalid quantization mode\. Expected one of \('int8', .* Received: mode=ternary Unknown quantization "),
    (lambda: keras.GPTQDTypePolicy("gptq/3/128", "float32"), ValueError,
     r"^Invalid mode for GPTQDTypePolicy: 'gptq/3/128'\. Bits are among \(4, 8\)\. For example: 'gptq/4/128', or "),
    (lambda: keras.AWQDTypePolicy("awq/4", "float32"), ValueError, r"^Invalid mode for AWQDTypePolicy: 'awq/4'\."),
    (lambda: dtype_policies.serialize("float32"), TypeError,
     r"^Expected a dtype policy, got 'float32'\. For example: DTypePolicy\('mixed_bfloat16'\)\.$"),
    (lambda: dtype_policies.deserialize({"class_name": "DTypePolicy"}), ValueError,
     r"^Expected a serialized dtype policy, got \{'class_name': 'DTypePolicy'\}\. For example: \{'class_name': "),
    (lambda: dtype_policies.deserialize("float32"), ValueError, r"^Expected a serialized dtype policy, got 'float32'"),
    (lambda: dtype_policies.get({"class_name": "OtherDTypePolicy", "config": {}}), ValueError,
     r"^Unknown class of dtype policies in \{'class_name': 'OtherDTypePolicy', .*For example: \{'class_name': 'DTypeP"),
])  # fmt: skip
def test_what_is_no_policy_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(("mode", "block_size"), [("int4/64", 64), ("INT4 / 64", 64), ("int4/-1", -1),
                                                  ("int4/None", -1)])  # fmt: skip
def test_attributes_of_int4_are_those_of_keras(mode, block_size):
    policy = keras.Int4DTypePolicy(mode, "mixed_bfloat16")
    assert isinstance(policy, keras.QuantizedDTypePolicy)
    assert policy.name == f"int4/{block_size}_from_mixed_bfloat16"
    assert (policy.mode, policy.quantization_mode, policy.block_size) == ("int4", "int4", block_size)
    assert (policy.compute_dtype, policy.variable_dtype) == ("bfloat16", "float32")
    assert policy.get_config() == {"mode": f"int4/{block_size}", "source_name": "mixed_bfloat16"}
    assert repr(policy) == f'<Int4DTypePolicy "{policy.name}">'
    assert jmp.get_policy(policy).quantization == jmp.quant.Int4(block_size=block_size)
    for again in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dtype_policies.get(policy.name)):
        assert again == policy
        assert type(again) is keras.Int4DTypePolicy
        assert hash(again) == hash(policy)


@pytest.mark.parametrize(("kind", "mode", "stored"), [
    (keras.GPTQDTypePolicy, "gptq/4/64", "int4/64"), (keras.GPTQDTypePolicy, "GPTQ/8/-1", "int8(activations=false)"),
    (keras.AWQDTypePolicy, "awq/4/-1", "int4/-1"),
])  # fmt: skip
def test_attributes_of_calibrated_policies_are_those_of_keras(kind, mode, stored):
    policy = kind(mode, "mixed_bfloat16")
    method, bits, size = mode.lower().split("/")
    assert policy.name == f"{mode.lower()}_from_mixed_bfloat16"
    assert (policy.mode, policy.quantization_mode) == (method, method)
    assert (policy.weight_bits, policy.group_size) == (int(bits), int(size))
    assert policy.get_config() == {"mode": mode.lower(), "source_name": "mixed_bfloat16"}
    assert jmp.get_policy(policy) is jmp.get_policy(f"{stored}_from_mixed_bfloat16")
    saved = dtype_policies.deserialize(dtype_policies.serialize(policy))
    for again in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), dtype_policies.get(policy.name), saved):
        assert again == policy
        assert type(again) is kind


def test_the_default_policy_in_blocks_is_that_class_and_with_further_options_the_general_one():
    for name, kind in [("int4/64", keras.Int4DTypePolicy), ("int4/64(min_size=0)", keras.QuantizedDTypePolicy)]:
        with jmp.use_policy(f"{name}_from_bfloat16"):
            assert type(keras.dtype_policy()) is kind
            assert jmp.get_policy(keras.dtype_policy()) is jmp.default_policy()


@pytest.mark.parametrize(
    "mode", ["int4", "int4/", "int4/0", "int4/-2", "int4/abc", "int8", "int4/64(min_size=0)", None]
)
def test_a_mode_without_a_block_size_is_an_error_of_int4(mode):
    with pytest.raises(ValueError, match=r"^Invalid mode for Int4DTypePolicy: .*\. For example: 'int4/128', or 'int4"):
        keras.Int4DTypePolicy(mode, "float32")
