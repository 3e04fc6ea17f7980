"""An input order, as GPTQ checkpoints with `desc_act` have: the stored values of a weight are in another order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from meshes import find_devices
from quant_reference import fresh

import jmp_policy as jmp
from jmp_policy.quant import Layout, quantize_array

ORDER = jnp.asarray(np.stack([np.random.default_rng(seed).permutation(16) for seed in range(3)]), jnp.int32)


def ordered_weight(scale=False):
    weight = quantize_array(jnp.asarray(fresh(3, 16, 4)), "int4/8", Layout((16,), 1))
    weight = dataclasses.replace(weight, input_order=ORDER)
    return dataclasses.replace(weight, input_scale=jnp.linspace(0.5, 2, 48).reshape(3, 2, 8, 1)) if scale else weight


@pytest.mark.parametrize("scale", [False, True])
def test_it_gives_the_place_of_each_input_and_is_sliced_with_the_values(scale):
    weight = ordered_weight(scale)
    stored = np.asarray(dataclasses.replace(weight, input_order=None).dequantize())
    expected = np.stack([one[order] for one, order in zip(stored, np.asarray(ORDER), strict=True)])
    np.testing.assert_array_equal(weight.dequantize(), expected)
    np.testing.assert_array_equal(jax.jit(lambda weight: weight.dequantize())(weight), expected)
    np.testing.assert_array_equal(jax.vmap(lambda weight: weight.dequantize())(weight), expected)
    second = jax.tree.map(lambda leaf: leaf[1], weight)
    np.testing.assert_array_equal(second.dequantize(), expected[1])


@pytest.mark.parametrize("scale", [False, True])
def test_trees_keep_it_and_are_as_before_without_it(scale):
    weight = ordered_weight(scale)
    leaves, structure = jax.tree.flatten(weight)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(weight)]
    assert names == [".values", ".scale", ".zero_point", *[".input_scale"] * scale, ".input_order"]
    for leaf in (None, object()):
        again = jax.tree.unflatten(structure, [leaf] * len(leaves))
        assert jax.tree.structure(again, is_leaf=lambda leaf: leaf is None) == jax.tree.structure(
            jax.tree.unflatten(structure, leaves), is_leaf=lambda leaf: leaf is None
        )
    without = dataclasses.replace(weight, input_order=None)
    assert jax.tree.structure(without) != structure
    assert len(jax.tree.leaves(without)) == 3 + scale


def test_it_is_saved_and_belongs_to_the_saved_values(tmp_path):
    ordered, plain = {"kernel": ordered_weight()}, {"kernel": dataclasses.replace(ordered_weight(), input_order=None)}
    jmp.quant.quantize({"kernel": jnp.ones((64, 64))}, "int8_from_float32")  # registers with Flax
    for saved, target in ((ordered, plain), (plain, ordered)):
        bytes_ = serialization.to_bytes(saved)
        for new in (serialization.from_bytes(target, bytes_)["kernel"], jmp.convert_state(saved, target)["kernel"]):
            assert jax.tree.structure(new) == jax.tree.structure(saved["kernel"])
            np.testing.assert_array_equal(new.dequantize(), saved["kernel"].dequantize())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", ordered)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "orbax", jax.eval_shape(lambda: ordered))["kernel"]
    np.testing.assert_array_equal(restored.dequantize(), ordered["kernel"].dequantize())


def test_shard_map_may_split_its_outputs_and_not_its_inputs():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=find_devices(2))
    weight = jax.tree.map(lambda leaf: leaf[0], ordered_weight())

    def dequantize_on(spec):
        specs = dataclasses.replace(weight, values=spec, scale=spec, zero_point=spec, input_order=jax.P())
        run = lambda weight: weight.dequantize()
        return jax.shard_map(run, mesh=mesh, in_specs=(specs,), out_specs=jax.P(spec[0], spec[2]))(weight)

    np.testing.assert_array_equal(dequantize_on(jax.P(None, None, "x")), weight.dequantize())
    with pytest.raises(
        ValueError, match=r"^QuantizedArray\(int4/8, .*\) has an input_order of all 16 inputs, and `sha"
    ):
        dequantize_on(jax.P("x", None, None))
