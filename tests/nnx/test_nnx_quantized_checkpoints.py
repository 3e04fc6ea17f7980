"""Checkpoints of quantized nnx models restore into models that run."""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy.quant import quantize

X = jnp.linspace(-1.0, 1.0, 2 * 8).reshape(2, 8)
POLICIES = ["int8(min_size=0)_from_float32", "int4/2(min_size=0)_from_float32"]
POLICIES += [f"{kind}/4(min_size=0)_from_float32" for kind in ("mxfp8", "mxfp4", "nvfp4")]


class Net(nnx.Module):
    def __init__(self):
        waves = lambda key, shape, dtype: jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), dtype)
        self.body = nnx.Linear(8, 8, kernel_init=waves, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return nnx.relu(self.body(x))


def made(policy):
    return quantize(Net(), policy)


@pytest.fixture(scope="module", params=POLICIES)
def saved(request, tmp_path_factory):
    """A policy, the quantized model, what it computes, and the folder that its state and its numbers lie in."""
    model = nnx.jit(lambda: made(request.param))()
    folder = tmp_path_factory.mktemp("quantized")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", nnx.state(model))
        checkpointer.save(folder / "numbers", nnx.to_pure_dict(nnx.state(model)))
    return request.param, model, nnx.jit(lambda model: model(X))(model), folder


def restore(path, target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def assert_same(restored, model, out, atol=0.0):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))
    assert nnx.graphdef(restored) == nnx.graphdef(model)
    np.testing.assert_allclose(nnx.jit(lambda model: model(X))(restored), out, rtol=0, atol=atol, strict=True)


@pytest.mark.slow
def test_a_state_is_restored_into_a_model_made_of_shapes(saved):
    policy, model, out, folder = saved
    graphdef, target = nnx.split(nnx.eval_shape(lambda: made(policy)))
    assert_same(nnx.merge(graphdef, restore(folder / "state", target)), model, out)


@pytest.mark.slow
def test_a_state_without_variables_is_restored_as_well(saved):
    policy, model, out, folder = saved
    graphdef, target = nnx.split(nnx.eval_shape(lambda: made(policy)))
    nnx.replace_by_pure_dict(target, restore(folder / "numbers", nnx.to_pure_dict(target)))
    assert_same(nnx.merge(graphdef, target), model, out)


@pytest.mark.slow
def test_a_state_is_restored_onto_the_devices_of_the_target(saved):
    policy, model, out, folder = saved
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    graphdef, target = nnx.split(nnx.eval_shape(lambda: made(policy)))

    def placed(leaf):
        columns = PartitionSpec(*[None] * (leaf.ndim - 1), "devices") if leaf.ndim else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, columns))

    state = restore(folder / "state", jax.tree.map(placed, target))
    shards = state["body"]["kernel"][...].values.addressable_shards
    assert {shard.data.shape[-1] for shard in shards} == {2}
    # The numbers are the same; a program for four devices may add up products in another order.
    assert_same(nnx.merge(graphdef, state), model, out, atol=2.0**-22)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_quantized_state_in_a_float_model_says_where_it_goes(policy):
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    state = nnx.state(quantize(layer, "int8(min_size=0)_from_float32"))
    model = layer if policy is None else jmp.with_policy(layer, policy)
    example = r"nnx\.update\(quant\.quantize\(model, 'int8\(min_size=0\)_from_mixed_bfloat16'\), state\)"
    nnx.update(model, state)
    with pytest.raises(TypeError, match="A float model of nnx has no place for it; restore its state .*: " + example):
        model(jnp.ones((1, 4)))
    merged = nnx.merge(nnx.graphdef(layer), state)
    with pytest.raises(TypeError, match=r"was read by a layer or code that computes with floats\. Give the model the"):
        merged(jnp.ones((1, 4)))
