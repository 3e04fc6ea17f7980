"""Every difference from Keras is a row of a table that a check holds; and its loss-scaling optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from differences import Checks, rows_of

import jmp_policy as jmp
from jmp_policy.compat import keras
from jmp_policy.compat.keras import dtype_policies


def scale_of(*args, **kwargs):
    return keras.LossScaleOptimizer(optax.sgd(0.1), *args, **kwargs).init({"w": jnp.ones(2)}).loss_scale


def _weight(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


FACTS = {  # by row, what is true
    '`"p=f32,c=bf16,o=f32"`': lambda: keras.DTypePolicy("p=f32,c=bf16,o=f32").compute_dtype == "bfloat16",
    "private names": lambda: not hasattr(dtype_policies, "_get_quantized_dtype_policy_by_str"),
    "TensorFlow's `Policy`": lambda: dtype_policies.deserialize(
        {"class_name": "PolicyV1", "config": {"name": "mixed_float16", "loss_scale": None}}
    ).loss_scale is None,
    "a map as the default": lambda: keras.DTypePolicyMap(keras.DTypePolicyMap("float16")).name == "map_float16",
    '`"int4"`': lambda: all(
        (jmp.get_policy(keras.Int4DTypePolicy(mode, "float32")) is jmp.get_policy("int4_from_float32")) == is_same
        for mode, is_same in [("int4/128", True), ("int4/-1", False)]
    ),
    '`"mxfp8"`, `"nvfp4"`': lambda: all(
        jmp.get_policy(keras.QuantizedDTypePolicy(mode, "float32")) is jmp.get_policy(f"{mode}_from_float32")
        for mode in ("mxfp8", "nvfp4", "mxfp4")
    ),
    "`dynamic=False`": lambda: scale_of(8.0, dynamic=False) == jmp.StaticLossScale(8.0),
    "the scaled loss": lambda: scale_of(2.0**15).scale(jnp.float16(2)).item() == 2.0**16,
}  # fmt: skip
ERRORS = {  # by row, calls that raise an error with this text
    '`"uint8"`, `"int32"`': (
        ValueError, r"Cannot convert 'u?int\d+' to a mixed precision DTypePolicy\.",
        lambda: keras.DTypePolicy("uint8"), lambda: keras.DTypePolicy("int32"),
    ),
    "a bad name as a value": (
        ValueError, r"Cannot convert 'flaot16' to a mixed precision DTypePolicy\.",
        lambda: keras.DTypePolicyMap().__setitem__("a", "flaot16"),
    ),
    "`amax_history_length`": (
        (TypeError, ValueError), "amax_history_length must be ",
        *(lambda bad=bad: keras.QuantizedFloat8DTypePolicy("float8", "float32", bad) for bad in (0, -1, True)),
    ),
    "`ternary`": (
        ValueError, r"Invalid quantization mode\. .* Received: mode=ternary Unknown|Unknown class of dtype policies",
        lambda: dtype_policies.get("ternary_from_float32"),
        lambda: dtype_policies.deserialize({"class_name": "TernaryDTypePolicy", "config": {"mode": "ternary"}}),
    ),
    "its other arguments": (
        TypeError, ".*unexpected keyword argument",
        *(lambda name=name: scale_of(**{name: None}) for name in ("name", "clipnorm", "gradient_accumulation_steps")),
    ),
    "the second argument": (
        TypeError, "`initial_scale` must be a positive finite number, got True", lambda: scale_of(True)
    ),
}  # fmt: skip
checks = Checks()
SLOW = ("layers", '`"int4/-1"`', "a skipped step", "overwriting by gradient")


def test_every_difference_has_a_check_and_every_check_its_difference():
    assert sorted(rows_of("Keras")) == sorted([*checks, *FACTS, *ERRORS])


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * (row in SLOW)) for row in rows_of("Keras")]
)
def test_it_is_as_the_table_says(row):
    if row in FACTS:
        assert FACTS[row]()
    elif row in ERRORS:
        error, message, *calls = ERRORS[row]
        for call in calls:
            with pytest.raises(error, match=f"^({message})"):
                call()
    else:
        checks[row]()


@checks.holds("the global policy")
def the_global_policy_reaches_what_with_policy_is_applied_to():
    keras.set_dtype_policy("mixed_bfloat16")
    assert jmp.with_policy(lambda x: x)(jnp.ones(2)).dtype == jnp.bfloat16


@checks.holds("the dictionary given")
def the_dictionary_is_copied():
    given = {"a": "float16"}
    keras.DTypePolicyMap("float32", given)["b"] = "float16"
    assert given == {"a": "float16"}


@checks.holds("layers")
def a_layer_of_flax_takes_a_policy():
    nn = pytest.importorskip("flax.linen")
    layer = jmp.with_policy(nn.Dense(2), keras.DTypePolicy("mixed_bfloat16"))
    x = jnp.ones((1, 3))
    assert jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), x)[0]).dtype == jnp.bfloat16


@checks.holds("changing a policy")
def policies_are_immutable_and_maps_are_not():
    policy = keras.DTypePolicy("float32")
    with pytest.raises(AttributeError):
        policy.name = "float16"
    assert hash(policy) == hash(keras.DTypePolicy("float32"))
    policies = keras.DTypePolicyMap()
    policies["a"] = "float16"
    with pytest.raises(TypeError):
        hash(policies)


@checks.holds("`convert_input`")
def numpy_stays_numpy():
    converted = keras.DTypePolicy("float16").convert_input(np.ones(2, np.float32), autocast=True, dtype="float16")
    assert isinstance(converted, np.ndarray)
    assert converted.dtype == np.float16


@checks.holds('a rule for `"block"`')
def a_frozen_rule_covers_what_is_inside():
    policies = keras.DTypePolicyMap("float32", {"block": "bfloat16"})
    assert policies["block/dense"].name == "float32"
    assert jmp.get_policy(policies)["block/dense"].name == "bfloat16"


@checks.holds("`get_config`, no default")
def a_map_without_a_default_keeps_the_names_of_its_policies():
    policies = keras.DTypePolicyMap()
    policies["a"] = "mixed_bfloat16"
    policies["b"] = "int8_from_mixed_bfloat16"
    config = policies.get_config()
    assert [policy.name for policy in policies.values()] == ["mixed_bfloat16", "int8_from_mixed_bfloat16"]
    keras.set_dtype_policy("float16")
    assert keras.DTypePolicyMap.from_config(config) == policies


@checks.holds('`"int4/-1"`')
def a_channel_has_a_zero_point():
    weight = jnp.linspace(1, 2, 512, dtype=jnp.float32).reshape(256, 2)
    array = jmp.quant.quantize_array(weight, "int4/-1")
    assert array.zero_point.tolist() == [[[0, 0]]]  # of numbers that are all positive
    np.testing.assert_allclose(array.dequantize(), weight, atol=2 / 15 / 2)  # a symmetric scale spends half on none


@checks.holds('`"int4"` embeddings', "small layers")
def tables_have_8_bits_and_small_layers_stay():
    shapes = {"embed": {"embedding": (64, 64)}, "small": {"kernel": (8, 8)}}
    params = jax.tree.map(_weight, shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    made = jmp.quant.quantize(params, keras.QuantizedDTypePolicy("int4", "float32"))
    assert made["embed"]["embedding"].values.dtype == jnp.int8
    assert made["small"]["kernel"] is params["small"]["kernel"]
    made = jmp.quant.quantize(params, keras.QuantizedDTypePolicy("int4/64(table_bits=4,min_size=0)", "float32"))
    assert made["embed"]["embedding"].values.dtype == jnp.uint8
    assert isinstance(made["small"]["kernel"], jmp.quant.QuantizedArray)


@checks.holds("`gptq`, `awq`")
def policies_of_calibrated_weights_name_their_storage():
    for mode in ("gptq/4/128", "awq/4/128"):
        assert jmp.get_policy(dtype_policies.get(f"{mode}_from_float32")) is jmp.get_policy("int4/128_from_float32")
    assert not {"GPTQConfig", "AWQConfig"} & set(dir(dtype_policies))
    assert callable(jmp.contrib.gptq)
    assert callable(jmp.contrib.awq)


@checks.holds('`"gptq/2/64"`')
def calibrated_weights_have_4_bits_or_8_per_channel():
    assert jmp.get_policy("gptq/8/-1_from_float32").name == "int8(activations=false)_from_float32"
    for mode in ("gptq/2/64", "gptq/8/64", "awq/8/-1"):
        with pytest.raises(ValueError, match=r"^Unknown quantization '(gptq|awq)/"):
            jmp.get_policy(f"{mode}_from_float32")
        with pytest.raises(ValueError, match=r"^Invalid (quantization mode|mode for)"):
            dtype_policies.get(f"{mode}_from_float32")


@checks.holds("`LossScaleOptimizer`")
def the_optimizer_is_an_optax_transformation():
    tx = keras.LossScaleOptimizer(optax.sgd(0.1))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert isinstance(tx.init({"w": jnp.ones(2)}).loss_scale, jmp.DynamicLossScale)


@checks.holds("bounds of the scale")
def the_scale_has_a_floor_and_a_ceiling():
    scale = scale_of(2.0)
    for _ in range(3):
        scale = scale.adjust(jnp.array(False))
    assert float(scale.loss_scale) == 1.0
    assert float(scale_of(2.0**24, 1).adjust(jnp.array(True)).loss_scale) == 2.0**24


@checks.holds("a skipped step")
def a_skipped_step_is_not_counted():
    tx = keras.LossScaleOptimizer(optax.sgd(lambda count: jnp.exp2(-count.astype(jnp.float32))))
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    for gradient in (1.0, jnp.inf, 1.0):
        params, state = jmp.optim.step(tx, {"w": jnp.full(2, gradient)}, state, params)
    assert optax.tree_utils.tree_get(state, "count") == 2
    assert params["w"].tolist() == [1 - 1 - 0.5] * 2


@checks.holds("overwriting by gradient")
def state_under_its_key_becomes_its_gradient():
    tx = keras.LossScaleOptimizer(optax.sgd(0.1))
    params = {"params": jnp.ones(2), "_overwrite_with_gradient": jnp.ones(2)}
    gradients = jax.tree.map(lambda x: 3 * x, params)
    after, _ = jmp.optim.step(tx, gradients, tx.init(params), params)
    assert after["_overwrite_with_gradient"].tolist() == [3, 3]
    np.testing.assert_allclose(after["params"], 0.7, rtol=1e-6)


def test_the_optimizer_has_the_defaults_of_keras_and_takes_what_tf_keras_saved():
    scale = scale_of()
    assert (float(scale.loss_scale), scale.period, scale.factor) == (2.0**15, 2000, 2)
    for arguments in [{"dynamic_growth_steps": 3}, {"dynamic": True, "dynamic_growth_steps": 3}]:
        scale = scale_of(8.0, **arguments)
        assert (float(scale.loss_scale), scale.period) == (8.0, 3)
    assert scale_of(initial_scale=8, dynamic=False, dynamic_growth_steps=None) == jmp.StaticLossScale(8.0)


@pytest.mark.parametrize("number", [128, np.int32(128), np.float32(128), 128.0, jnp.float32(128)], ids=repr)
def test_an_initial_scale_is_any_number_and_needs_no_warning_of_its_dtype(number):
    scale = scale_of(number).loss_scale
    assert (float(scale), scale.dtype) == (128.0, jnp.float32)


@pytest.mark.parametrize(("initial", "after"), [(0.25, 0.25), (1.5, 1.0), (2.0**25, 2.0**24)])
def test_an_overflow_never_raises_a_scale_that_starts_beyond_our_bounds(initial, after):
    assert float(scale_of(initial).adjust(jnp.array(False)).loss_scale) == after


@pytest.mark.parametrize("initial", [4096, 2.0**25])
def test_the_dynamic_loss_scale_that_tensorflow_saved_goes_on_here(initial):
    saved = {"initial_loss_scale": initial, "increment_period": 2, "multiplier": 4.0}
    config = {"name": "mixed_float16", "loss_scale": {"class_name": "DynamicLossScale", "config": saved}}
    policy = keras.Policy.from_config(config)
    scale = policy.loss_scale
    assert (float(scale.loss_scale), scale.period) == (initial, 2)
    for finite, factor in [(False, 0.25), (True, 0.25), (True, 1.0)]:
        scale = scale.adjust(jnp.array(finite))
        assert float(scale.loss_scale) == initial * factor
    assert keras.Policy.from_config(policy.get_config()) == policy
