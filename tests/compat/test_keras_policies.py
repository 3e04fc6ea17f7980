"""Keras's policies over ours: attributes, configs, copies, and what they stand for."""

import copy
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies
from jmp_policy.quant import CurrentScaling, DelayedScaling, Float8

DTYPE_POLICIES = {  # the name, the dtypes, and the policy of ours
    keras.DTypePolicy("float32"): ("float32", "float32", "float32", jmp.Policy("float32", "float32", "float32")),
    keras.DTypePolicy("float64"): ("float64", "float64", "float64", jmp.Policy("float64", "float64", "float64")),
    keras.FloatDTypePolicy("mixed_float16"): (
        "mixed_float16", "float16", "float32", jmp.Policy("float32", "float16", "float16")
    ),
    keras.DTypePolicy("mixed_bfloat16"): (
        "mixed_bfloat16", "bfloat16", "float32", jmp.Policy("float32", "bfloat16", "bfloat16")
    ),
    keras.Policy("infer"): ("infer", None, None, jmp.get_policy("infer")),
    keras.Policy("infer_float32_vars"): (
        "infer_with_float32_vars", None, "float32", jmp.get_policy("infer_float32_vars")
    ),
    keras.Policy("float16_with_float32_vars"): (
        "float16_with_float32_vars", "float16", "float32", jmp.get_policy("float16_with_float32_vars")
    ),
    keras.Policy("float32_with_float32_vars"): ("float32", "float32", "float32", jmp.get_policy("float32")),
}  # fmt: skip
KERAS_FLOAT8 = Float8(DelayedScaling(amax="max", delay=2), amax_history_length=16)
QUANTIZED_POLICIES = {  # the mode, the source, and the quantization of ours
    keras.QuantizedDTypePolicy("int8", "mixed_bfloat16"): ("int8", "mixed_bfloat16", jmp.quant.Int8()),
    keras.QuantizedDTypePolicy("int8(activations=false)", "bfloat16"): (
        "int8(activations=false)", "bfloat16", jmp.quant.Int8(activations=False)
    ),
    keras.QuantizedDTypePolicy("int4", "mixed_float16"): ("int4", "mixed_float16", jmp.quant.Int4(block_size=128)),
    keras.QuantizedDTypePolicy("mxfp8(gradients=e5m2)", "mixed_float16"): (
        "mxfp8(gradients=e5m2)", "mixed_float16",
        jmp.get_policy("mxfp8(gradients=e5m2)_from_float32").quantization,
    ),
    keras.QuantizedDTypePolicy("nvfp4", "float32"): (
        "nvfp4", "float32", jmp.get_policy("nvfp4_from_float32").quantization
    ),
    keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16", 16): ("float8", "mixed_bfloat16", KERAS_FLOAT8),
    keras.Int4DTypePolicy("INT4 / 64", "mixed_bfloat16"): ("int4/64", "mixed_bfloat16", jmp.quant.Int4(block_size=64)),
    keras.Int4DTypePolicy("int4/None", "bfloat16"): ("int4/-1", "bfloat16", jmp.quant.Int4(block_size=-1)),
    keras.GPTQDTypePolicy("gptq/4/64", "float32"): ("gptq/4/64", "float32", jmp.quant.Int4(block_size=64)),
    keras.GPTQDTypePolicy("GPTQ/8/-1", "float32"): ("gptq/8/-1", "float32", jmp.quant.Int8(activations=False)),
    keras.AWQDTypePolicy("awq/4/-1", "mixed_bfloat16"): ("awq/4/-1", "mixed_bfloat16", jmp.quant.Int4(block_size=-1)),
}  # fmt: skip
WITH_LOSS_SCALES = [
    keras.Policy("mixed_float16"),
    keras.Policy("mixed_float16", loss_scale=None),
    keras.Policy("mixed_float16", loss_scale=1024),
    keras.Policy("float16", loss_scale=jmp.DynamicLossScale(8.0, period=7, hysteresis=2)),
    keras.Policy("infer", loss_scale=jmp.NoOpLossScale()),
]
MAPS = [
    keras.DTypePolicyMap(),
    keras.DTypePolicyMap("mixed_bfloat16", {"head": "float32", "b.*": keras.Policy("float16", loss_scale=2.0)}),
    keras.DTypePolicyMap(policy_map={policy.name: policy for policy in QUANTIZED_POLICIES}),
]


@pytest.mark.parametrize("policy", DTYPE_POLICIES, ids=repr)
def test_names_stand_for_the_dtypes_of_keras(policy):
    name, compute, variable, ours = DTYPE_POLICIES[policy]
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == (name, compute, variable)
    assert (policy.quantization_mode, policy.get_config()) == (None, {"name": name})
    assert jmp.get_policy(policy) is ours
    if isinstance(policy, keras.Policy):
        assert policy.should_cast_variables == (compute != variable)
    else:
        assert repr(policy) == f'<DTypePolicy "{name}">'


@pytest.mark.parametrize("policy", QUANTIZED_POLICIES, ids=repr)
def test_attributes_of_quantized_policies_are_those_of_keras(policy):
    mode, source, quantization = QUANTIZED_POLICIES[policy]
    plain, config = keras.DTypePolicy(source), {"mode": mode, "source_name": source}
    own = {"amax_history_length": 16} if isinstance(policy, keras.QuantizedFloat8DTypePolicy) else {}
    assert isinstance(policy, keras.QuantizedDTypePolicy)
    assert (policy.name, policy.get_config()) == (f"{mode}_from_{source}", config | own)
    assert (policy.compute_dtype, policy.variable_dtype) == (plain.compute_dtype, plain.variable_dtype)
    assert repr(policy) == f'<{type(policy).__name__} "{policy.name}">'
    assert jmp.get_policy(policy) is jmp.get_policy(plain).replace(quantization=quantization)
    method, *numbers = mode.split("/")
    assert policy.quantization_mode == getattr(policy, "mode", mode) == method
    names = ["block_size"] if method == "int4" else ["weight_bits", "group_size"]
    assert [getattr(policy, name) for name in names if numbers] == [int(number) for number in numbers]


@pytest.mark.parametrize("policy", [*DTYPE_POLICIES, *QUANTIZED_POLICIES, *WITH_LOSS_SCALES, *MAPS], ids=repr)
def test_policies_survive_their_config_copies_files_and_maps(policy):
    copies = [
        type(policy).from_config(policy.get_config()),
        type(policy).from_config(json.loads(json.dumps(policy.get_config()))),
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        dtype_policies.deserialize(json.loads(json.dumps(dtype_policies.serialize(policy)))),
    ]
    if not isinstance(policy, keras.DTypePolicyMap):
        policies = keras.DTypePolicyMap("float32", {"a": policy})
        copies += [policies["a"], keras.DTypePolicyMap.from_config(policies.get_config())["a"]]
        assert all(hash(again) == hash(policy) for again in copies)
    if isinstance(policy, keras.QuantizedFloat8DTypePolicy):
        ours = jmp.get_policy(policy)
        copies += [keras.DTypePolicyMap(ours).default_policy, keras.DTypePolicyMap("float32", {"a": ours})["a"]]
    elif isinstance(policy, keras.QuantizedDTypePolicy):
        copies.append(dtype_policies.get(policy.name))
    for again in copies:
        assert (again, type(again), repr(again)) == (policy, type(policy), repr(policy))
        assert jmp.get_policy(again) == jmp.get_policy(policy)


def test_equality_is_by_class_and_config_and_equal_policies_hash_alike():
    a, b = keras.DTypePolicy("mixed_float16"), keras.FloatDTypePolicy("mixed_float16")
    assert len({a, b, keras.DTypePolicy("mixed_float16")}) == 1
    for others in (
        [a, keras.DTypePolicy("float16"), keras.Policy("mixed_float16"), "mixed_float16"],
        [keras.Policy("float16", 2.0), keras.Policy("float16", 4.0)],
        [keras.QuantizedDTypePolicy(*arguments) for arguments in [
            ("int8", "mixed_bfloat16"), ("int4", "mixed_bfloat16"), ("int8", "bfloat16"), ("float8", "bfloat16")
        ]],
        [keras.QuantizedFloat8DTypePolicy("float8", *arguments) for arguments in [
            ("bfloat16", 16), ("bfloat16", 32), ("float32", 16)
        ]],
    ):  # fmt: skip
        assert all((one == other) == (one is other) for one in others for other in others)


@pytest.mark.parametrize("mode", ["float8", " FLOAT8 "])
def test_a_quantized_policy_of_the_bare_mode_is_that_of_keras_too(mode):
    like_keras = keras.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16")
    assert like_keras.amax_history_length == like_keras.default_amax_history_length == 1024
    assert jmp.get_policy(keras.QuantizedDTypePolicy(mode, "mixed_bfloat16")) is jmp.get_policy(like_keras)
    ours = keras.QuantizedDTypePolicy("float8(recipe=current)", "mixed_bfloat16")
    assert jmp.get_policy(ours).quantization == Float8(CurrentScaling())
    assert jmp.get_policy("float8_from_mixed_bfloat16").quantization == Float8(DelayedScaling(delay=1))


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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_infer_takes_both_dtypes_from_the_first_input_and_keeps_the_loss_scale(dtype):
    x = (3, jnp.arange(2), jnp.ones(2, dtype), jnp.ones(2))
    policy = keras.Policy("infer", loss_scale=8).resolve(*x)
    assert (policy.name, policy.compute_dtype, policy.variable_dtype) == (dtype, dtype, dtype)
    assert policy.loss_scale == jmp.StaticLossScale(8.0)
    policy = keras.Policy("infer_float32_vars").resolve(*x)
    assert (policy.compute_dtype, policy.variable_dtype) == (dtype, "float32")
    assert policy.name == ("float32" if dtype == "float32" else f"{dtype}_with_float32_vars")
    assert policy.resolve(jnp.ones(2, jnp.float32)) is policy


@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("mixed_float16", {}, jmp.DynamicLossScale),
        ("mixed_bfloat16", {}, type(None)),
        ("float16", {}, type(None)),
        ("mixed_float16", {"loss_scale": None}, type(None)),
        ("float16", {"loss_scale": "dynamic"}, jmp.DynamicLossScale),
        ("float16", {"loss_scale": np.float32(128)}, jmp.StaticLossScale),
        ("float16", {"loss_scale": jmp.NoOpLossScale()}, jmp.NoOpLossScale),
    ],
)
def test_loss_scale_is_dynamic_by_default_for_mixed_float16_alone(name, arguments, kind):
    scale = keras.Policy(name, **arguments).loss_scale
    assert type(scale) is kind
    assert scale is None or isinstance(scale, keras.LossScale)
