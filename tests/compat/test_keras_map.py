"""Keras's maps and lookup, the global policy, and that what Keras and TensorFlow wrote is read, and the reverse."""

import json
import threading

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies

MIXED = "mixed_bfloat16"


def test_lookup_is_exact_then_the_one_pattern_then_the_default():
    policies = keras.DTypePolicyMap("float32")
    policies["layer/dense_0"] = "bfloat16"
    policies["layer/dense_.*"] = keras.DTypePolicy("mixed_float16")
    assert policies["layer/dense_0"].name == "bfloat16"
    assert policies["layer/dense_1"].name == "mixed_float16"
    assert policies["layer"].name == "float32"
    assert policies["my/layer/dense_1"].name == "float32"  # fullmatch
    assert policies["layer/dense_0/kernel"].name == "mixed_float16"


def test_two_patterns_are_an_error_and_an_exact_key_settles_it():
    policies = keras.DTypePolicyMap("float32", {"a.*": "bfloat16", ".*b": "float16"})
    text = r"^Path 'a_b' matches multiple dtype policy specification keys: \['a\.\*', '\.\*b'\]"
    with pytest.raises(ValueError, match=text):
        policies["a_b"]
    policies["a_b"] = "float64"
    assert policies["a_b"].name == "float64"


def test_a_key_is_set_once_until_it_is_deleted():
    policies = keras.DTypePolicyMap("float32", {"a": "bfloat16"})
    text = r'^a already exist in the DTypePolicyMap with value <DTypePolicy "bfloat16">\. '
    with pytest.raises(ValueError, match=text):
        policies["a"] = "float16"
    del policies["a"]
    policies["a"] = "float16"
    assert (policies["a"].name, len(policies), list(policies)) == ("float16", 1, ["a"])
    assert "a" in policies
    assert "b" not in policies
    with pytest.raises(KeyError):
        del policies["b"]


def test_values_in_any_spelling():
    policy = keras.DTypePolicy(MIXED)
    serialized = {"class_name": "DTypePolicy", "config": {"name": MIXED}}
    policies = keras.DTypePolicyMap("float32", dict(enumerate_names(MIXED, policy, jmp.get_policy(MIXED), serialized)))
    assert all(found == policy for found in policies.values())
    assert policies["1"] is policy
    others = keras.DTypePolicyMap("float32", {"a": jnp.float16, "b": None})
    assert [others[key].name for key in "ab"] == ["float16", "float32"]


def enumerate_names(*values):
    return ((str(i), value) for i, value in enumerate(values))


def test_a_config_is_a_copy():
    policies = keras.DTypePolicyMap(None, {"a": "float16"})
    policies.get_config()["policy_map"].clear()
    assert list(policies) == ["a"]


def test_an_open_default_follows_the_global_policy():
    policies = keras.DTypePolicyMap()
    keras.set_dtype_policy(MIXED)
    assert policies["anything"].name == MIXED
    assert (policies.name, policies.compute_dtype, policies.variable_dtype) == (f"map_{MIXED}", "bfloat16", "float32")
    assert repr(keras.DTypePolicyMap("float16", {"a": "float32"})) == (
        "<DTypePolicyMap default_policy=float16, mapping=[('a', 'float32')]>"
    )
    assert keras.DTypePolicyMap("float32", {"a": "int8_from_float32"}).quantization_mode is None
    assert keras.DTypePolicyMap("int8_from_float32").quantization_mode == "int8"


def test_the_frozen_map_says_what_keras_says_of_every_key():
    policies = keras.DTypePolicyMap("float32")
    for key, name in [("a", "bfloat16"), ("a/.*", "float16"), ("a/b", "float64"), ("a/b/c", "mixed_float16")]:
        policies[key] = name
    frozen = jmp.get_policy(policies)
    assert isinstance(frozen, jmp.PolicyMap)
    for path in ("a", "a/b", "a/b/c", "a/x", "z"):
        assert frozen[path] is jmp.get_policy(policies[path])
    policies["z"] = "float16"
    assert frozen["z"].name == "float32"


# What Keras 3.16 writes for the policies of the same names.
IN_KERAS = [
    ("mixed_float16", {"module": "keras", "class_name": "DTypePolicy", "config": {"name": "mixed_float16"}}),
    ("int8_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedDTypePolicy",
                           "config": {"mode": "int8", "source_name": "float32"}}),
    ("int4_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedDTypePolicy",
                           "config": {"mode": "int4", "source_name": "float32"}}),
    ("int4/-1_from_bfloat16", {"module": "keras.dtype_policies", "class_name": "Int4DTypePolicy",
                               "config": {"mode": "int4/-1", "source_name": "bfloat16"}}),
    ("float8_from_float32", {"module": "keras.dtype_policies", "class_name": "QuantizedFloat8DTypePolicy",
                             "config": {"mode": "float8", "source_name": "float32", "amax_history_length": 1024}}),
]  # fmt: skip
SERIALIZED = {name: config | {"registered_name": None} for name, config in IN_KERAS}


@pytest.mark.parametrize("name", SERIALIZED)
def test_a_policy_is_written_as_keras_writes_it_and_read_again(name):
    policy = dtype_policies.get(name)
    assert dtype_policies.serialize(policy) == SERIALIZED[name]
    assert dtype_policies.get(json.loads(json.dumps(SERIALIZED[name]))) == policy
    assert (policy.name, type(policy).__name__) == (name, SERIALIZED[name]["class_name"])


def test_a_map_is_written_as_keras_writes_it_and_read_again():
    policies = keras.DTypePolicyMap(policy_map={name: name for name in SERIALIZED})
    expected = {"module": "keras.dtype_policies", "class_name": "DTypePolicyMap", "registered_name": None}
    expected["config"] = {"default_policy": None, "policy_map": SERIALIZED}
    assert dtype_policies.serialize(policies) == expected
    again = dtype_policies.get(json.loads(json.dumps(expected)))
    assert again == policies
    assert list(map(type, again.values())) == list(map(type, policies.values()))


def test_a_map_that_keras_wrote_takes_what_it_left_open_from_the_global_policy():
    """A map without a default forgets the names of its policies when Keras writes it."""
    config = {
        "default_policy": None,
        "policy_map": {
            "a": {"module": "keras", "class_name": "DTypePolicy", "config": {"name": None}},
            "b": {"class_name": "Int4DTypePolicy", "config": {"mode": "int4/-1", "source_name": None}},
        },
    }
    keras.set_dtype_policy(MIXED)
    policies = keras.DTypePolicyMap.from_config(config)
    assert [policies[path].name for path in "ab"] == [MIXED, f"int4/-1_from_{MIXED}"]
    named = keras.DTypePolicyMap.from_config({"default_policy": "float16", "policy_map": {}})
    assert named.default_policy == keras.DTypePolicy("float16")


@pytest.mark.parametrize("class_name", ["Policy", "PolicyV1"])
def test_the_policies_of_tensorflow_keep_the_loss_scale_that_they_were_written_with(class_name):
    scale = {"class_name": "FixedLossScale", "config": {"loss_scale_value": 128.0}}
    policy = dtype_policies.get({"class_name": class_name, "config": {"name": "mixed_float16", "loss_scale": scale}})
    assert policy == keras.Policy("mixed_float16", loss_scale=128)
    assert dtype_policies.serialize(policy)["module"] is None  # Keras 3 has no such class, and says so


def test_get_finds_whatever_stands_for_a_policy():
    policy, policies = keras.FloatDTypePolicy("bfloat16"), keras.DTypePolicyMap("float16")
    assert dtype_policies.get(policy) is policy
    assert dtype_policies.get(policies) is policies
    assert dtype_policies.get(jnp.bfloat16) == dtype_policies.get(jmp.get_policy("bfloat16")) == policy
    assert dtype_policies.get(None) == keras.DTypePolicy("float32")
    assert dtype_policies.get("float8_e4m3fn") == keras.DTypePolicy("float8_e4m3fn")  # no quantization
    keras.set_dtype_policy(policies)
    assert dtype_policies.get(None) is policies


def test_a_class_of_the_user_is_read_under_its_name():
    class Named(keras.DTypePolicy):
        pass

    written = dtype_policies.serialize(keras.DTypePolicyMap("float32", {"a": Named("bfloat16")}))
    again = dtype_policies.deserialize(written, custom_objects={"Named": Named})
    assert type(again["a"]) is Named
    assert type(dtype_policies.deserialize(written["config"]["policy_map"]["a"], {"Named": Named})) is Named


def test_the_global_policy_is_our_default_policy():
    for setter, getter in [
        (keras.set_dtype_policy, keras.dtype_policy),
        (keras.set_global_policy, keras.global_policy),
    ]:
        setter(MIXED)
        assert getter() == keras.DTypePolicy() == keras.DTypePolicy(MIXED)
        assert jmp.default_policy().name == MIXED
        jmp.set_default_policy("float32")
        assert getter() == keras.DTypePolicy("float32")
    with jmp.use_policy("p=f32,c=bf16,o=f32"):
        assert keras.dtype_policy().compute_dtype == "bfloat16"
        assert jmp.get_policy(keras.dtype_policy()) is jmp.default_policy()


def test_a_quantized_policy_takes_its_source_from_the_global_policy():
    keras.set_dtype_policy(MIXED)
    policy = keras.QuantizedDTypePolicy("int8")
    keras.set_dtype_policy("float32")
    assert policy.get_config() == {"mode": "int8", "source_name": MIXED}


FLOAT8 = keras.QuantizedFloat8DTypePolicy("float8", MIXED)


@pytest.mark.parametrize(
    ("name", "kind", "mode"),
    [
        (f"int8_from_{MIXED}", keras.QuantizedDTypePolicy, "int8"),
        ("int4/64(min_size=0)_from_bfloat16", keras.QuantizedDTypePolicy, "int4/64(min_size=0)"),
        ("int4/64_from_bfloat16", keras.Int4DTypePolicy, "int4"),
        (f"float8_from_{MIXED}", keras.QuantizedDTypePolicy, "float8(recipe=delayed)"),
        ("float8(recipe=delayed/2)_from_bfloat16", keras.QuantizedFloat8DTypePolicy, "float8"),
        ("float8/16(recipe=current/row)_from_bfloat16", keras.QuantizedDTypePolicy, "float8/16(recipe=current/row)"),
        ("float8(recipe=delayed/2,margin=1)_from_f32", keras.QuantizedDTypePolicy, "float8(recipe=delayed/2,margin=1)"),
    ],
)
def test_the_default_policy_of_any_quantization_has_a_policy_of_keras_that_means_no_other(name, kind, mode):
    with jmp.use_policy(name):
        policy = keras.dtype_policy()
        assert type(policy) is kind
        assert policy.quantization_mode == keras.DTypePolicyMap().quantization_mode == mode
        assert jmp.get_policy(policy) is jmp.get_policy(keras.DTypePolicyMap().default_policy) is jmp.get_policy(name)
    with jmp.use_policy(jmp.PolicyMap({"head": name}, "float32")):
        assert keras.dtype_policy()["head"] == policy


def test_the_name_of_float8_is_its_class_wherever_keras_reads_names_and_its_history_is_kept():
    assert keras.DTypePolicyMap(FLOAT8.name).default_policy == FLOAT8
    assert keras.DTypePolicyMap("float32", {"a": FLOAT8.name.upper()})["a"].quantization_mode == "float8"
    keras.set_dtype_policy(FLOAT8.name)
    assert keras.dtype_policy() == keras.DTypePolicyMap().default_policy == FLOAT8
    assert jmp.default_policy() is jmp.get_policy(FLOAT8)
    policy = keras.QuantizedFloat8DTypePolicy("float8", MIXED, 16)
    keras.set_dtype_policy(policy)
    assert keras.dtype_policy() == keras.DTypePolicyMap().default_policy == policy
    jmp.set_default_policy(jmp.get_policy(policy))
    assert keras.dtype_policy() == policy


def test_the_legacy_setter_keeps_the_loss_scale():
    keras.set_policy("mixed_float16")
    assert isinstance(keras.global_policy().loss_scale, jmp.DynamicLossScale)
    keras.set_policy(keras.Policy("float16", loss_scale=64))
    assert keras.global_policy() == keras.Policy("float16", loss_scale=64)
    keras.set_policy(None)
    assert keras.global_policy() == keras.DTypePolicy("float32")


def test_the_global_policy_is_the_object_that_was_set_until_another_is():
    outer, inner = keras.Policy("mixed_float16", loss_scale=64), keras.Policy("infer_float32_vars", loss_scale=8)
    with jmp.use_policy(outer):
        assert keras.global_policy() is outer
        with jmp.use_policy(inner):
            assert keras.global_policy() is inner
        with jmp.use_policy("mixed_float16"):
            assert keras.global_policy() == keras.DTypePolicy("mixed_float16")
        assert keras.global_policy() is outer
    assert keras.global_policy() == keras.DTypePolicy("float32")
    jmp.set_default_policy(outer)
    assert keras.global_policy() is outer
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


def test_a_global_map_is_frozen_when_it_is_set():
    policies = keras.DTypePolicyMap(MIXED, {"head": "float32"})
    for set_policy in (keras.set_dtype_policy, jmp.set_default_policy):
        set_policy(policies)
        assert keras.dtype_policy() is policies
        assert keras.DTypePolicy().name == MIXED
        policies["body"] = "float16"
        assert keras.dtype_policy() == keras.DTypePolicyMap(MIXED, {"head": "float32"})
        assert keras.dtype_policy()["body"].name == jmp.default_policy()["body"].name == MIXED
        del policies["body"]
        assert keras.dtype_policy() is policies


def test_a_global_map_with_types_as_keys_has_no_name_in_keras():
    text = r"^The default policy has the module type dict as a key: PolicyMap\("
    with jmp.use_policy(jmp.PolicyMap({dict: "float16"}, "float32")), pytest.raises(ValueError, match=text):
        keras.dtype_policy()
    with jmp.use_policy(jmp.PolicyMap({"head": "float16"}, "float32")):
        assert keras.dtype_policy() == keras.DTypePolicyMap("float32", {"head": "float16"})
