"""Keras's float8 dtype policy: attributes, errors, and that no policy is lost on the way through Keras's names."""

import copy
import json
import pickle

import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.quant import CurrentScaling, DelayedScaling, Float8

NAME = "float8_from_mixed_bfloat16"


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "mixed_bfloat16", "mixed_float16"])
def test_attributes_of_float8_are_those_of_keras(source):
    policy = keras.QuantizedFloat8DTypePolicy("float8", source, amax_history_length=16)
    plain = keras.DTypePolicy(source)
    assert isinstance(policy, keras.QuantizedDTypePolicy)
    assert (policy.name, policy.quantization_mode) == (f"float8_from_{source}", "float8")
    assert (policy.compute_dtype, policy.variable_dtype) == (plain.compute_dtype, plain.variable_dtype)
    assert (policy.amax_history_length, policy.default_amax_history_length) == (16, 1024)
    assert policy.get_config() == {"mode": "float8", "source_name": source, "amax_history_length": 16}
    assert repr(policy) == f'<QuantizedFloat8DTypePolicy "float8_from_{source}">'


def test_the_history_has_the_length_of_keras_where_none_is_given():
    policy = keras.QuantizedFloat8DTypePolicy("float8", "float32")
    assert policy.amax_history_length == keras.QuantizedFloat8DTypePolicy.default_amax_history_length == 1024


def test_scales_are_those_that_the_step_before_stored_as_in_keras():
    policy = jmp.get_policy(keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", 16))
    assert policy.quantization == Float8(DelayedScaling(amax="max", delay=2), amax_history_length=16)
    assert policy.replace(quantization=None) is jmp.get_policy("mixed_bfloat16")
    assert jmp.get_policy(NAME).quantization == Float8(DelayedScaling(delay=1))


@pytest.mark.parametrize("mode", ["float8", " FLOAT8 "])
def test_a_quantized_policy_of_the_bare_mode_is_that_of_keras_too(mode):
    policy = keras.QuantizedDTypePolicy(mode, "mixed_bfloat16")
    assert jmp.get_policy(policy) is jmp.get_policy(keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16"))
    assert policy != keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16")
    ours = keras.QuantizedDTypePolicy("float8(recipe=current)", "mixed_bfloat16")
    assert jmp.get_policy(ours).quantization == Float8(CurrentScaling())


@pytest.mark.parametrize(
    "round_trip",
    [
        lambda p: keras.QuantizedFloat8DTypePolicy.from_config(json.loads(json.dumps(p.get_config()))),
        lambda p: pickle.loads(pickle.dumps(p)),
        copy.deepcopy,
        lambda p: keras.DTypePolicyMap(jmp.get_policy(p)).default_policy,
        lambda p: keras.DTypePolicyMap("float32", {"a": p})["a"],
        lambda p: keras.DTypePolicyMap("float32", {"a": jmp.get_policy(p)})["a"],
        lambda p: keras.DTypePolicyMap.from_config(keras.DTypePolicyMap("float32", {"a": p}).get_config())["a"],
    ],
)
@pytest.mark.parametrize("length", [16, 1024])
def test_float8_survives_its_config_copies_and_maps(length, round_trip):
    policy = keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", length)
    again = round_trip(policy)
    assert again == policy
    assert hash(again) == hash(policy)
    assert type(again) is keras.QuantizedFloat8DTypePolicy
    assert jmp.get_policy(again) == jmp.get_policy(policy)


def test_equality_of_float8_is_by_its_history_too():
    policy = keras.QuantizedFloat8DTypePolicy("float8", "bfloat16", 16)
    assert policy != keras.QuantizedFloat8DTypePolicy("float8", "bfloat16", 32)
    assert policy != keras.QuantizedFloat8DTypePolicy("float8", "float32", 16)


def test_the_name_of_float8_is_its_class_wherever_keras_reads_names():
    expected = keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16")
    assert keras.DTypePolicyMap(NAME).default_policy == expected
    assert keras.DTypePolicyMap("float32", {"a": NAME.upper()})["a"].quantization_mode == "float8"
    keras.set_dtype_policy(NAME)
    assert keras.dtype_policy() == keras.DTypePolicyMap().default_policy == expected
    assert jmp.default_policy() is jmp.get_policy(expected)


def test_a_global_history_is_kept():
    policy = keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", 16)
    keras.set_dtype_policy(policy)
    assert keras.dtype_policy() == keras.DTypePolicyMap().default_policy == policy
    jmp.set_default_policy(jmp.get_policy(policy))
    assert keras.dtype_policy() == policy


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        (NAME, keras.QuantizedDTypePolicy, "float8(recipe=delayed)"),
        ("float8(recipe=delayed/2)_from_bfloat16", keras.QuantizedFloat8DTypePolicy, "float8"),
        ("float8/16(recipe=current/row)_from_bfloat16", keras.QuantizedDTypePolicy, "float8/16(recipe=current/row)"),
        ("float8(recipe=delayed/2,margin=1)_from_f32", keras.QuantizedDTypePolicy, "float8(recipe=delayed/2,margin=1)"),
    ],
)
def test_the_default_policy_of_any_recipe_has_a_policy_of_keras_that_means_no_other(name, kind, mode):
    with jmp.use_policy(name):
        policy = keras.dtype_policy()
        assert type(policy) is kind
        assert policy.quantization_mode == mode
        assert jmp.get_policy(policy) is jmp.get_policy(keras.DTypePolicyMap().default_policy) is jmp.get_policy(name)
    with jmp.use_policy(jmp.PolicyMap({"head": name}, "float32")):
        assert keras.dtype_policy()["head"] == policy


@pytest.mark.parametrize("mode", [None, 8, "", "int8", "FLOAT8", "float8/16", "float8(recipe=current)"], ids=repr)
def test_a_mode_other_than_float8_is_a_value_error(mode):
    with pytest.raises(ValueError, match=r"^Invalid quantization mode\. Expected one of \('float8',\)\. Received: mod"):
        keras.QuantizedFloat8DTypePolicy(mode, "float32")


@pytest.mark.parametrize(("length", "error", "text"), [
    (True, TypeError, "must be an int, got True"),
    (2.0, TypeError, "must be an int, got 2.0"),
    ("16", TypeError, "must be an int, got '16'"),
    (None, TypeError, "must be an int, got None"),
    (0, ValueError, "must be at least 1, got 0"),
    (-1, ValueError, "must be at least 1, got -1"),
])  # fmt: skip
def test_a_history_of_no_positive_length_is_an_error(length, error, text):
    with pytest.raises(error, match=rf"^amax_history_length {text}\. For example: Float8\(amax_history_length=1"):
        keras.QuantizedFloat8DTypePolicy("float8", "float32", amax_history_length=length)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: keras.QuantizedFloat8DTypePolicy("float8", 3), TypeError, r"^'name' must be a string, .*: name=3 "),
        (lambda: keras.QuantizedFloat8DTypePolicy("float8", "flaot32"), ValueError, r"^Cannot convert 'flaot32' to a "),
        (lambda: keras.QuantizedFloat8DTypePolicy("float8", NAME), ValueError, r"^Cannot convert 'float8_.* It is qua"),
        (lambda: keras.DTypePolicy(NAME), ValueError, r"^Cannot convert 'float8_from_mixed_bfloat16' .* It is quanti"),
        (lambda: keras.QuantizedDTypePolicy("float8(recipe=now)", "float32"), ValueError,
         r"^Invalid quantization mode\. Expected .* In 'float8\(recipe=now\)': Unknown recipe 'now'\. "),
    ],
)  # fmt: skip
def test_bad_arguments_of_float8_are_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()
