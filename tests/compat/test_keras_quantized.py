"""Keras's quantized dtype policy: attributes, errors, and what reads its name."""

import copy
import json
import pickle

import jax
import jax.numpy as jnp
import pytest

import jmp_policy as jmp
from jmp_policy.compat import keras

POLICIES = {
    ("int8", "float32"): ("float32", "float32"),
    ("int8", "mixed_bfloat16"): ("bfloat16", "float32"),
    ("int8(activations=false)", "bfloat16"): ("bfloat16", "bfloat16"),
    ("int4", "mixed_float16"): ("float16", "float32"),
    ("int4/64", "mixed_bfloat16"): ("bfloat16", "float32"),
    ("mxfp8", "mixed_bfloat16"): ("bfloat16", "float32"),
    ("nvfp4", "float32"): ("float32", "float32"),
    ("mxfp4(scale_rounding=floor)", "bfloat16"): ("bfloat16", "bfloat16"),
    ("mxfp8(gradients=e5m2)", "mixed_float16"): ("float16", "float32"),
}


@pytest.fixture(autouse=True)
def restored_default():
    before = jmp.default_policy()
    yield
    jmp.set_default_policy(before)


@pytest.mark.parametrize(("arguments", "dtypes"), POLICIES.items())
def test_attributes_are_those_of_keras(arguments, dtypes):
    policy = keras.QuantizedDTypePolicy(*arguments)
    mode, source = arguments
    assert (policy.name, policy.quantization_mode) == (f"{mode}_from_{source}", mode)
    assert (policy.compute_dtype, policy.variable_dtype) == dtypes
    assert policy.get_config() == {"mode": mode, "source_name": source}
    assert repr(policy) == f'<QuantizedDTypePolicy "{mode}_from_{source}">'
    assert jmp.get_policy(policy) is jmp.get_policy(policy.name)


@pytest.mark.parametrize(
    "round_trip",
    [
        lambda p: type(p).from_config(json.loads(json.dumps(p.get_config()))),
        lambda p: pickle.loads(pickle.dumps(p)),
        copy.deepcopy,
        lambda p: keras.DTypePolicyMap(p.name).default_policy,
        lambda p: keras.DTypePolicyMap("float32", {"a": jmp.get_policy(p)})["a"],
        lambda p: keras.DTypePolicyMap.from_config(keras.DTypePolicyMap("float32", {"a": p}).get_config())["a"],
    ],
)
@pytest.mark.parametrize("arguments", [*POLICIES][1::3], ids=repr)
def test_policies_survive_their_config_copies_and_maps(arguments, round_trip):
    kind = keras.Int4DTypePolicy if arguments[0].startswith("int4/") else keras.QuantizedDTypePolicy
    policy = kind(*arguments)
    again = round_trip(policy)
    assert again == policy
    assert hash(again) == hash(policy)
    assert type(again) is type(policy)
    assert jmp.get_policy(again) == jmp.get_policy(policy)


def test_equality_is_by_mode_source_and_class():
    policy = keras.QuantizedDTypePolicy("int8", "mixed_bfloat16")
    assert policy != keras.QuantizedDTypePolicy("int4", "mixed_bfloat16")
    assert policy != keras.QuantizedDTypePolicy("int8", "bfloat16")
    assert policy != keras.DTypePolicy("mixed_bfloat16")
    assert policy != "int8_from_mixed_bfloat16"


def test_the_source_is_the_global_policy_where_none_is_given():
    keras.set_dtype_policy("mixed_bfloat16")
    policy = keras.QuantizedDTypePolicy("int8")
    keras.set_dtype_policy("float32")
    assert policy.get_config() == {"mode": "int8", "source_name": "mixed_bfloat16"}


def test_the_global_policy_may_be_quantized():
    keras.set_dtype_policy("int8_from_mixed_bfloat16")
    assert keras.dtype_policy() == keras.QuantizedDTypePolicy("int8", "mixed_bfloat16")
    assert keras.DTypePolicyMap().quantization_mode == "int8"
    assert jmp.default_policy().quantization == jmp.quant.Int8()
    with jmp.use_policy("int4/64_from_bfloat16"):
        assert keras.dtype_policy() == keras.Int4DTypePolicy("int4/64", "bfloat16")


def test_other_policies_have_no_mode():
    assert [kind("float32").quantization_mode for kind in (keras.DTypePolicy, keras.Policy)] == [None, None]
    assert keras.DTypePolicyMap("float32", {"a": "int8_from_float32"}).quantization_mode is None


@pytest.mark.parametrize("mode", [None, 8, "", "int2", "float32", "int4/x", jmp.quant.Int8()], ids=repr)
def test_a_bad_mode_is_the_value_error_of_keras(mode):
    with pytest.raises(ValueError, match=r"^Invalid quantization mode\. Expected one of \('int8', 'int4', .*Rec"):
        keras.QuantizedDTypePolicy(mode, "float32")


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: keras.QuantizedDTypePolicy("int8", 3), TypeError, r"^'name' must be a string, .* Received: name=3 "),
        (lambda: keras.QuantizedDTypePolicy("int8", "flaot32"), ValueError, r"^Cannot convert 'flaot32' to a mixed"),
        (lambda: keras.QuantizedDTypePolicy("int8", "int8_from_float32"), ValueError,
         r"^Cannot convert 'int8_from_float32' to a mixed precision .* It is quantized\. For example: QuantizedDTypeP"),
        (lambda: keras.QuantizedDTypePolicy("int8", "mixed_float16"), ValueError,
         r"^Quantization mode='int8' doesn't work well with compute_dtype='float16' in Keras\. For example: Quantized"),
        (lambda: keras.DTypePolicy("int8_from_float32"), ValueError, r"^Cannot convert 'int8_from_float32' .* It is "),
        (lambda: keras.Policy("int4_from_float32"), ValueError, r"^Cannot convert 'int4_from_float32' .* It is qua"),
        (lambda: keras.set_dtype_policy("int9_from_float32"), ValueError, r"^Invalid quantization mode\. .*mode=int9"),
    ],
)  # fmt: skip
def test_bad_arguments_are_errors(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_a_flax_module_takes_a_quantized_policy_of_keras():
    nn = pytest.importorskip("flax.linen")
    x = jnp.ones((1, 64))
    policy = keras.QuantizedDTypePolicy("int8", "mixed_bfloat16")
    model = jmp.with_policy(nn.Dense(64), policy)
    variables = jmp.quant.quantize(jax.eval_shape(model.init, jax.random.key(0), x), policy)
    assert isinstance(variables["params"]["kernel"], jmp.quant.QuantizedArray)
    assert jax.eval_shape(model.apply, variables, x).dtype == jnp.bfloat16
