"""Errors under Keras's names quote what they were given, and never a megabyte of it."""

import optax
import pytest

from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies

LONG = "x" * 1_000_000


def policy_map(key=LONG):
    return keras.DTypePolicyMap("float32", {key: "bfloat16"})


CALLS = {
    "a name": lambda: keras.DTypePolicy(LONG),
    "a name that is no string": lambda: keras.DTypePolicy([LONG]),
    "a quantized name": lambda: keras.DTypePolicy(f"int8_from_{LONG}"),
    "a legacy name": lambda: keras.Policy(LONG),
    "a loss scale": lambda: keras.Policy("mixed_float16", loss_scale=LONG),
    "a mode": lambda: keras.QuantizedDTypePolicy(LONG, "bfloat16"),
    "a mode that is no string": lambda: keras.QuantizedDTypePolicy([LONG], "bfloat16"),
    "a mode of int8 for float16": lambda: keras.QuantizedDTypePolicy("int8" + " " * 1_000_000, "float16"),
    "a mode of int4": lambda: keras.Int4DTypePolicy(LONG, "bfloat16"),
    "a length": lambda: keras.QuantizedFloat8DTypePolicy("float8", "bfloat16", amax_history_length=LONG),
    "a global policy": lambda: keras.set_dtype_policy([LONG]),
    "what stands for a policy": lambda: dtype_policies.get([LONG]),
    "a name to look up": lambda: dtype_policies.get("int8" + LONG),
    "what is serialized": lambda: dtype_policies.serialize(LONG),
    "what is deserialized": lambda: dtype_policies.deserialize({LONG: 1}),
    "a class": lambda: dtype_policies.deserialize({"class_name": LONG, "config": {}}),
    "a map": lambda: keras.DTypePolicyMap("float32", LONG),
    "a key of a map": lambda: keras.DTypePolicyMap("float32", {(LONG,): "float32"}),
    "a key that is there": lambda: policy_map().__setitem__(LONG, "float32"),
    "a path with two rules": lambda: keras.DTypePolicyMap("float32", {"x+": "float32", "x*": "float32"})[LONG],
    "a value of a map": lambda: keras.DTypePolicyMap("float32", {"head": [LONG]}),
    "a scale": lambda: keras.LossScaleOptimizer(optax.sgd(0.1), LONG),
    "steps": lambda: keras.LossScaleOptimizer(optax.sgd(0.1), dynamic_growth_steps=LONG),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_does_not_repeat_a_long_input(call):
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    assert " ... " in str(error.value)
    assert len(str(error.value)) < 3000
