"""Errors under Keras's names are those of Keras, quote what they were given, and never all of a long input."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies

NAME = "float8_from_mixed_bfloat16"
CONVERT = r"Cannot convert '{}' to a mixed precision DTypePolicy\. Valid policies"
INTERPRET = r"Cannot interpret the assigned value as a dtype policy\. Received: "
MODE = r"Invalid quantization mode\. Expected one of \('int8', 'int4', .* Received: mode={}"
FLOAT8 = r"Invalid quantization mode\. Expected one of \('float8',\)\. Received: mode="
LENGTH = r"amax_history_length must be {}\. For example: Float8\(amax_history_length=1"
INT4 = r"Invalid mode for Int4DTypePolicy: .*\. For example: 'int4/128', or 'int4"
STRING = r"'name' must be a string, such as 'mixed_float16'\. Received: name="
GLOBAL = r"Invalid `policy` argument\. Expected the string name of a policy .*Received: "
SCALE = r"`initial_scale` must be a positive finite number, got {}"
STEPS = r"`dynamic_growth_steps` must be a positive int, got {}\. For example: LossScaleOpti"
LOSS_SCALE = r"Could not interpret loss scale identifier: .* for example Policy\('mixed_float16'"
SERIALIZED = r"Expected a serialized dtype policy, got {}\. For example: \{{'class_name': "


def legacy(loss_scale):
    return lambda: keras.Policy("float16", loss_scale)


def saved(class_name, **config):
    return legacy({"class_name": class_name, "config": config})


def quantized(mode, source="float32"):
    return lambda: keras.QuantizedDTypePolicy(mode, source)


def float8(*arguments):
    return lambda: keras.QuantizedFloat8DTypePolicy(*arguments)


def optimizer(*arguments):
    return lambda: keras.LossScaleOptimizer(optax.sgd(0.1), *arguments)


def policy_map(*arguments):
    return lambda: keras.DTypePolicyMap(*arguments)


ERRORS = {
    TypeError: [
        *[(lambda name=name: keras.DTypePolicy(name), STRING) for name in (3, jnp.float32, ["float32"])],
        (lambda: keras.Policy(None), STRING + "None$"),
        (quantized("int8", 3), STRING + "3 "),
        (float8("float8", 3), STRING + "3 "),
        *[(float8("float8", "float32", bad), LENGTH.format(f"an int, got {bad!r}")) for bad in (True, 2.0, "16", None)],
        (lambda: dtype_policies.serialize("float32"),
         r"Expected a dtype policy, got 'float32'\. For example: DTypePolicy\('mixed_bfloat16'\)\.$"),
        (policy_map(None, [("a", "float32")]),
         r"If specified, `policy_map` must be a dict\. Received: policy_map=\[\('a', 'float32'\)\] of type <class 'l"),
        (policy_map("float32", {3: "float32"}),
         r"A key of a DTypePolicyMap is a path or a pattern, got 3\. For example: 'head'\.$"),
        (optimizer("dynamic"), SCALE.format(r"'dynamic'\. For example: Lo")),
        (optimizer(np.True_), SCALE.format(r".*True.* For example: .*, dynamic=True\)")),
        (optimizer(jmp.DynamicLossScale(8.0)), ".* got DynamicLossScale.* goes to jmp_policy.optim.loss_scaled.in"),
        *[(optimizer(8.0, bad), STEPS.format(bad)) for bad in (2.5, True)],
    ],
    ValueError: [
        *[(lambda name=name: kind(name), CONVERT.format(name)) for kind, name in [
            (keras.DTypePolicy, "mixed_float8"), (keras.FloatDTypePolicy, "flaot16"), (keras.Policy, "int8"),
            (keras.DTypePolicy, ""),
        ]],
        (lambda: keras.DTypePolicy(NAME), CONVERT.format(NAME) + ".* It is quanti"),
        (lambda: keras.Policy("int4_from_float32"), CONVERT.format("int4_from_float32") + ".* It is qua"),
        *[(legacy(bad), LOSS_SCALE) for bad in ("static", True, [], {"class_name": "DynamicLossScale"})],
        (saved("Other"), LOSS_SCALE),
        (saved("FixedLossScale", loss_scale=128.0), LOSS_SCALE),
        (saved("DynamicLossScale", initial_loss_scale=8.0, period=3), LOSS_SCALE),
        (saved(["DynamicLossScale"]), LOSS_SCALE),
        *[(lambda bad=bad: keras.set_dtype_policy(bad), GLOBAL) for bad in (3, None, jmp.get_policy("float32"))],
        (lambda: keras.set_dtype_policy("int9_from_float32"), MODE.format("int9")),
        (lambda: keras.set_dtype_policy("float8_form_bfloat16"), "Cannot convert .*mean .float8_from_"),
        *[(quantized(mode), MODE.format("")) for mode in (None, 8, "", "int2", "int4/x", jmp.quant.Int8())],
        (quantized("float8(recipe=now)"), MODE.format(r".* In 'float8\(recipe=now\)': Unknown recipe 'now'\. ")),
        *[(quantized("int8", name), CONVERT.format(name)) for name in ("flaot32", "int8_from_float32")],
        (quantized("int8", "mixed_float16"), r"Quantization mode='int8' doesn't work well with compute_dtype='float16' "
         r"in Keras\. For example: QuantizedDTypePolicy\('int8', 'mixed_bfloat16'\)"),
        *[(float8(mode, "float32"), FLOAT8) for mode in (None, 8, "int8", "FLOAT8", "float8/16")],
        *[(float8("float8", "float32", bad), LENGTH.format(f"at least 1, got {bad}")) for bad in (0, -1)],
        *[(lambda mode=mode: keras.Int4DTypePolicy(mode, "float32"), INT4)
          for mode in ("int4", "int4/", "int4/0", "int4/-2", "int4/abc", "int8", "int4/64(min_size=0)", None)],
        *[(lambda mode=mode: keras.GPTQDTypePolicy(mode, "float32"),
           rf"Invalid mode for GPTQDTypePolicy: {mode!r}\. Bits are among \(4, 8\)\. For example: 'gptq/4/128', or ")
          for mode in ("gptq/3/128", "gptq/4/0", "gptq/4/-2", "awq/4/64", None)],
        (lambda: keras.AWQDTypePolicy("awq/4", "float32"), r"Invalid mode for AWQDTypePolicy: 'awq/4'\."),
        (lambda: dtype_policies.get(123),
         r"Cannot interpret `dtype` argument as a dtype policy\. Received: 123 of .*For example: 'mixed_bfloat16'"),
        *[(lambda name=name: dtype_policies.get(name), rf"Cannot convert '{read}' to a mixed .*{said}")
          for name, read, said in [("mixed_bfloat15", "mixed_bfloat15", ""), ("int8_from_", "", ""),
                                   ("int8", "int8", "does not say which dtypes .* For example: .int8_from_mixed")]],
        (lambda: dtype_policies.get("ternary_from_float32"), MODE.format("ternary Unknown quantization ")),
        *[(lambda bad=bad: dtype_policies.deserialize(bad), SERIALIZED.format(re.escape(repr(bad))))
          for bad in ({"class_name": "DTypePolicy"}, "float32")],
        (lambda: dtype_policies.get({"class_name": "OtherDTypePolicy", "config": {}}),
         r"Unknown class of dtype policies in \{'class_name': 'OtherDTypePolicy', .*For example: \{'class_name': 'DTy"),
        (lambda: dtype_policies.get({"class_name": "DTypePolicy", "config": {"nam": 1}}),
         r"Cannot read the serialized dtype policy \{'class_name': 'DTypePolicy', .* For example: \{'class_name': "),
        (policy_map("float32", {"(": "float32"}), r"The key '\(', .*is not a valid p"),
        (policy_map("float32", {"a": "flaot16"}), CONVERT.format("flaot16")),
        (policy_map("float32", {"a": 3}), INTERPRET + "3 of type <class 'int'>. For example: "),
        (policy_map("float32", {"a": keras.DTypePolicyMap()}), INTERPRET),
        (policy_map(3), INTERPRET),
        *[(optimizer(bad), SCALE.format(rf"{bad}\. For example: LossScal")) for bad in (0.0, np.inf)],
        (optimizer(8.0, 0), STEPS.format(0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "call", "text"), [(error, call, text) for error, cases in ERRORS.items() for call, text in cases]
)
def test_what_keras_does_not_take_is_an_error(error, call, text):
    with pytest.raises(error, match=f"^{text}"):
        call()


LONG = "x" * 100_000
CALLS = [
    lambda: keras.DTypePolicy(LONG),
    lambda: keras.Policy("mixed_float16", loss_scale=LONG),
    quantized(LONG, "bfloat16"),
    lambda: keras.Int4DTypePolicy(LONG, "bfloat16"),
    float8("float8", "bfloat16", LONG),
    lambda: keras.set_dtype_policy([LONG]),
    lambda: dtype_policies.get("int8" + LONG),
    lambda: dtype_policies.serialize(LONG),
    lambda: dtype_policies.deserialize({LONG: 1}),
    lambda: dtype_policies.deserialize({"class_name": LONG, "config": {}}),
    lambda: keras.DTypePolicyMap("float32", {LONG: "bfloat16"}).__setitem__(LONG, "float32"),
    lambda: keras.DTypePolicyMap("float32", {"x+": "float32", "x*": "float32"})[LONG],
    policy_map("float32", {"head": [LONG]}),
    optimizer(LONG),
]


@pytest.mark.slow
def test_an_error_does_not_repeat_a_long_input():
    for call in CALLS:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert " ... " in str(error.value)
        assert len(str(error.value)) < 3000
