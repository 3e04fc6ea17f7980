"""Checkpoints of quantized weights in both APIs: bit for bit what was saved, onto the devices of the target."""

import flax
import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh
from quantized_apis import APIS, DENSE, X, filled, made

import jmp_policy as jmp
from jmp_policy import quant

INT8, INT4 = "int8(min_size=0)_from_float32", "int4/4(min_size=0)_from_float32"
NVFP4 = "nvfp4/4(min_size=0)_from_float32"
POLICIES = [INT8, INT4, NVFP4, *(f"{kind}/4(min_size=0)_from_float32" for kind in ("mxfp8", "mxfp4"))]
VARIABLES = filled(made("linen", "Dense")[1])


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), restored, saved)


@pytest.mark.slow
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("policy", POLICIES)
def test_shards_restore_onto_the_devices_of_a_target_made_of_shapes(api, policy, tmp_path):
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    model, shapes = made(api, "Dense")
    saved = jax.jit(lambda v: APIS[api].quantize(model, v, policy)[1])(filled(shapes))

    def placed(leaf):
        columns = PartitionSpec(*[None] * (leaf.ndim - 1), "devices") if leaf.ndim else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, columns))

    quantized = []  # of shapes
    abstract = jax.eval_shape(
        lambda v: quantized.append(APIS[api].quantize(model, v, policy)) or quantized[0][1], shapes
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "0", jax.tree.map(placed, abstract))
    assert_same(restored, saved)
    for array in jax.tree.leaves(restored):
        assert array.ndim == 0 or {shard.data.shape[-1] for shard in array.addressable_shards} == {4}
    outs = [APIS[api].call(quantized[0][0], variables, X) for variables in (restored, saved)]
    np.testing.assert_allclose(*outs, rtol=0, atol=2.0**-20)  # four devices may add up in another order


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_flax_serialization_restore_into_an_abstract_target(policy):
    saved = quant.quantize(VARIABLES, policy)
    target = jax.eval_shape(lambda: quant.quantize(VARIABLES, policy))
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved)), saved)


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, r"a weight that is not quantized: float32\[16, 16\]"),
        (INT4, r"{'scale': 'float32\[4, 1, 16\]', 'values': 'uint8\[4, 2, 16\]', 'zero_point': 'uint8\[4, 1, 16\]'}"),
    ],
)
def test_bytes_of_another_format_are_refused(policy, found):
    saved = flax.serialization.to_bytes(VARIABLES if policy is None else quant.quantize(VARIABLES, policy))
    message = (
        r"^The target at 'params/kernel' is QuantizedArray\(int8\(min_size=0\), shape=\(16, 16\), dtype=float32\)"
        r", of the arrays {'scale': 'float32\[1, 16\]', 'values': 'int8\[16, 16\]'}; the checkpoint has "
        + found
        + r"\. "
        r"Quantize the target with the policy of the checkpoint, or restore into an unquantized "
        r"target and quantize that\.$"
    )
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes(quant.quantize(VARIABLES, INT8), saved)


@pytest.mark.slow
def test_range_of_inputs_that_was_calibrated_is_saved():
    saved = quant.quantize(VARIABLES, INT8, input_clips={"": 0.5})
    restored = flax.serialization.from_bytes(saved, flax.serialization.to_bytes(saved))
    assert float(restored["params"]["kernel"].input_clip) == 0.5
    message = "^The target at 'params/kernel' is .*'values': 'int8.16, 16.'}; the checkpoint has {'input_clip': 'f"
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes(quant.quantize(VARIABLES, INT8), flax.serialization.to_bytes(saved))


@pytest.mark.slow
def test_boxed_and_frozen_variables_stay_so():
    model = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "devices")))
    variables = flax.core.freeze(model.init(jax.random.key(0), X))
    made = quant.quantize(variables, INT8)
    kernel = made["params"]["kernel"]
    assert isinstance(made, flax.core.FrozenDict)
    assert isinstance(kernel, nn.Partitioned)
    assert isinstance(kernel.unbox(), quant.QuantizedArray)
    assert nn.get_partition_spec(made)["params"]["kernel"] == PartitionSpec(None, "devices")
    assert_same(flax.serialization.from_bytes(made, flax.serialization.to_bytes(made)), made)
    policied = jmp.with_policy(model, INT8)
    np.testing.assert_array_equal(policied.apply(made, X), policied.apply(variables, X))


@pytest.mark.slow
def test_a_state_without_variables_is_restored_as_well(tmp_path):
    make = lambda: quant.quantize(DENSE.nnx(nnx.Rngs(0)), INT4)
    model = make()
    graphdef, target = nnx.split(nnx.eval_shape(make))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", nnx.to_pure_dict(nnx.state(model)))
        checkpointer.wait_until_finished()
        nnx.replace_by_pure_dict(target, checkpointer.restore(tmp_path / "0", nnx.to_pure_dict(target)))
    assert_same(target, nnx.state(model))
    assert nnx.graphdef(nnx.merge(graphdef, target)) == nnx.graphdef(model)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_quantized_state_in_a_float_model_of_nnx_says_where_it_goes(policy):
    layer = DENSE.nnx(nnx.Rngs(0))
    state = nnx.state(quant.quantize(layer, INT8))
    model = layer if policy is None else jmp.with_policy(layer, policy)
    merged = nnx.merge(nnx.graphdef(layer), state)
    example = r"nnx\.update\(quant\.quantize\(model, 'int8\(min_size=0\)_from_mixed_bfloat16'\), state\)"
    nnx.update(model, state)
    with pytest.raises(TypeError, match="A float model of nnx has no place for it; restore its state .*: " + example):
        model(X)
    with pytest.raises(TypeError, match=r"was read by a layer or code that computes with floats\. Give the model the"):
        merged(X)
