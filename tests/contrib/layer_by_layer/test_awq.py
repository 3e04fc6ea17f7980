"""AWQ, against the search over powers in float64, and through models."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from calibrated_models import POLICY, ROWS, draw_inputs, linear
from flax import nnx, serialization

import jmp_policy as jmp
from jmp_policy import contrib, quant
from jmp_policy.quant import Layout


def round_in_float64(weight, scales, block):
    """Rounds `weight * scales` to 16 values per block, and returns the numbers divided by the scales."""
    blocks = (weight * scales[:, None]).reshape(-1, block, weight.shape[1])
    low, high = np.minimum(blocks.min(1, keepdims=True), 0), np.maximum(blocks.max(1, keepdims=True), 0)
    step = (high - low) / 15
    zero_point = np.rint(-low / step)
    values = np.clip(np.rint(blocks / step) + zero_point, 0, 15)
    return ((values - zero_point) * step).reshape(weight.shape) / scales[:, None]


def calibrate(rows, outputs, block, **options):
    """Returns the weight of a layer, and what it becomes."""
    model = nnx.Linear(rows.shape[1], outputs, rngs=nnx.Rngs(1))
    policied = jmp.with_policy(model, f"int4/{block}(min_size=0)_from_float32")
    return np.asarray(model.kernel[...]), contrib.awq(policied, [jnp.asarray(rows)], **options).kernel[...]


@pytest.mark.slow
def test_scales_are_those_of_the_search_over_powers_in_float64():
    """Lin et al., section 3.2: the power of the mean magnitude for which the outputs change least."""
    rows = draw_inputs(48)
    weight, made = calibrate(rows, 5, 16, search_clip=False)
    wide, magnitude = weight.astype(np.float64), np.abs(rows.astype(np.float64)).mean(0)
    attempts = []
    for power in np.linspace(0, 1, 20):
        scales = magnitude**power
        scales = scales / np.sqrt(scales.min() * scales.max())
        numbers = round_in_float64(wide, scales, 16)
        attempts.append((np.sum((rows.astype(np.float64) @ (numbers - wide)) ** 2), power, scales, numbers))
    error, power, scales, numbers = min(attempts, key=lambda attempt: attempt[0])
    assert 0 < power < 1
    assert error < 0.9 * attempts[0][0]
    np.testing.assert_allclose(made.input_scale.ravel(), 1 / scales, rtol=1e-5)
    np.testing.assert_allclose(made.dequantize(), numbers, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_outputs_change_less_with_smaller_ranges():
    rows = draw_inputs(64, 256)
    (weight, plain), (_, searched) = (calibrate(rows, 24, 32, search_clip=search) for search in (False, True))
    wide, whole = rows.astype(np.float64), np.asarray(weight, np.float64)
    errors = [np.linalg.norm(wide @ (made.dequantize() - whole)) for made in (plain, searched)]
    assert errors[1] < 0.95 * errors[0]


def scaled_weight(key=0):
    weight = quant.quantize_array(jax.random.normal(jax.random.key(key), (3, 16, 4)), "int4/8", Layout((16,), 1))
    return dataclasses.replace(weight, input_scale=jnp.linspace(0.5, 2, 48).reshape(3, 2, 8, 1))


@pytest.mark.slow
def test_an_input_scale_multiplies_the_weights_of_an_input_and_is_sliced_with_them():
    weight = scaled_weight()
    plain = dataclasses.replace(weight, input_scale=None)
    factors = jnp.linspace(0.5, 2, 48).reshape(3, 16, 1)
    assert (weight.dequantize() == plain.dequantize() * factors).all()
    assert (jax.jit(lambda weight: weight.dequantize())(weight) == weight.dequantize()).all()
    assert weight.nbytes == plain.nbytes + 4 * 48
    assert (weight.shape, repr(weight)) == (plain.shape, repr(plain))
    second = jax.tree.map(lambda leaf: leaf[1], weight)
    assert (second.dequantize() == weight.dequantize()[1]).all()
    x = jax.random.normal(jax.random.key(1), (2, 16))
    product = quant.dot_general(x, second, (((1,), (0,)), ((), ())))
    assert (product == x @ second.dequantize()).all()
    in_integers = dataclasses.replace(second, format=quant.Int4(8, activations=True))
    assert (quant.dot_general(x, in_integers, (((1,), (0,)), ((), ()))) == product).all()  # no integer has the scale
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = weight.shard(jax.NamedSharding(mesh, jax.P(None, "x", None)))
    spec = jax.NamedSharding(mesh, jax.P(None, "x", None, None))
    assert placed.input_scale is not None
    assert placed.input_scale.sharding == spec


@pytest.mark.slow
def test_an_input_scale_is_saved_and_belongs_to_the_saved_values(tmp_path):
    scaled = {"kernel": scaled_weight()}
    plain = {"kernel": dataclasses.replace(scaled_weight(1), input_scale=None)}
    quant.quantize({"kernel": jnp.ones((64, 64))}, "int8_from_float32")  # registers with Flax
    for saved, target in ((scaled, plain), (plain, scaled)):
        bytes_ = serialization.to_bytes(saved)
        for new in (serialization.from_bytes(target, bytes_)["kernel"], jmp.convert_state(saved, target)["kernel"]):
            assert jax.tree.structure(new) == jax.tree.structure(saved["kernel"])
            assert (new.dequantize() == saved["kernel"].dequantize()).all()
    floats = jmp.convert_state(scaled, {"kernel": jnp.ones((3, 16, 4))})["kernel"]
    assert (floats == scaled["kernel"].dequantize()).all()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", scaled)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "orbax", jax.eval_shape(lambda: scaled))["kernel"]
        raw = checkpointer.restore(tmp_path / "orbax")
    assert (restored.dequantize() == scaled["kernel"].dequantize()).all()
    assert (jmp.convert_state(raw, plain)["kernel"].dequantize() == scaled["kernel"].dequantize()).all()
    bad = {"kernel": dataclasses.replace(scaled_weight(), input_scale=-jnp.ones((3, 2, 8, 1)))}
    with pytest.raises(ValueError, match=r"was saved with an input_scale of -1\.0"):
        jmp.convert_state(bad, plain)


def test_weights_in_int8_and_inputs_that_are_always_zero_are_rounded_to_nearest():
    policy = "int8(min_size=0)_from_float32"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = contrib.awq(linear(policy), [ROWS]).kernel[...]
    jax.tree.map(np.testing.assert_array_equal, made, quant.quantize(linear(policy), policy).kernel[...])
    made = contrib.awq(linear(), [0 * ROWS]).kernel[...]
    assert (made.input_scale == 1).all()
    np.testing.assert_array_equal(made.values, quant.quantize(linear(), POLICY).kernel[...].values)
