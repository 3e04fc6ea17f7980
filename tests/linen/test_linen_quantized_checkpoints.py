"""Checkpoints of quantized variables: they restore bit for bit into what they were saved from, and nowhere else."""

import flax
import flax.serialization
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

import jmp_policy as jmp
from jmp_policy import quant

INT8, INT4 = "int8(min_size=0)_from_float32", "int4/4(min_size=0)_from_float32"
POLICIES = [INT8, INT4, *(f"{kind}/4(min_size=0)_from_float32" for kind in ("mxfp8", "mxfp4", "nvfp4"))]
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


class Net(nn.Module):
    boxed: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        init = nn.with_partitioning(init, (None, "devices")) if self.boxed else init
        return nn.Dense(8, kernel_init=init, name="dense")(x)


@pytest.fixture(scope="module")
def variables():
    return Net().init(jax.random.key(0), X)


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), restored, saved)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_flax_serialization_restore_into_an_abstract_target(variables, policy):
    saved = quant.quantize(variables, policy)
    target = jax.eval_shape(lambda: quant.quantize(variables, policy))
    assert_same(flax.serialization.from_bytes(target, flax.serialization.to_bytes(saved)), saved)


@pytest.mark.slow
def test_range_of_inputs_that_was_calibrated_is_saved(variables):
    saved = quant.quantize(variables, INT8, input_clips={"dense": 0.5})
    restored = flax.serialization.from_bytes(saved, flax.serialization.to_bytes(saved))
    assert float(restored["params"]["dense"]["kernel"].input_clip) == 0.5
    message = "^The target at 'params/dense/kernel' is .*'values': 'int8.16, 8.'}; the checkpoint has {'input_clip': 'f"
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes(quant.quantize(variables, INT8), flax.serialization.to_bytes(saved))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, r"a weight that is not quantized: float32\[16, 8\]"),
        (INT4, r"{'scale': 'float32\[4, 1, 8\]', 'values': 'uint8\[4, 2, 8\]', 'zero_point': 'uint8\[4, 1, 8\]'}"),
        (
            POLICIES[-1],
            r"{'scale': 'float8_e4m3fn\[4, 1, 8\]', 'tensor_scale': 'float32\[\]', 'values': 'uint8\[4, 2, 8\]'}",
        ),
    ],
)
def test_bytes_of_another_format_are_refused(variables, policy, found):
    saved = flax.serialization.to_bytes(variables if policy is None else quant.quantize(variables, policy))
    message = (
        r"^The target at 'params/dense/kernel' is QuantizedArray\(int8\(min_size=0\), shape=\(16, 8\), dtype=float32\)"
        r", of the arrays {'scale': 'float32\[1, 8\]', 'values': 'int8\[16, 8\]'}; the checkpoint has " + found + r"\. "
        r"Quantize the target with the policy of the checkpoint, or restore into an unquantized "
        r"target and quantize that\.$"
    )
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes(quant.quantize(variables, INT8), saved)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_shards_restore_onto_the_devices_of_an_abstract_target(variables, policy, tmp_path):
    mesh = make_mesh((4,), ("devices",), axis_types=(AxisType.Auto,))
    columns = NamedSharding(mesh, PartitionSpec(None, "devices"))
    saved = {"kernel": quant.quantize(variables, policy)["params"]["dense"]["kernel"].shard(columns)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "0", abstract)
    assert_same(restored, saved)
    kernel = restored["kernel"]
    for array in (kernel.values, kernel.scale):
        assert {shard.data.shape[-1] for shard in array.addressable_shards} == {2}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mxfp8/4", "mxfp4/4", "nvfp4/4"])
def test_variables_of_a_model_that_trains_in_blocks_are_those_of_its_source(kind):
    policies = f"{kind}(min_size=0)_from_mixed_bfloat16", "mixed_bfloat16"
    assert_same(*(jmp.with_policy(Net(), policy).init(jax.random.key(0), X) for policy in policies))


@pytest.mark.slow
def test_boxed_and_frozen_variables_stay_so():
    model = Net(boxed=True)
    variables = flax.core.freeze(model.init(jax.random.key(0), X))
    made = quant.quantize(variables, INT8)
    kernel = made["params"]["dense"]["kernel"]
    assert isinstance(made, flax.core.FrozenDict)
    assert isinstance(kernel, nn.Partitioned)
    assert isinstance(kernel.unbox(), quant.QuantizedArray)
    assert nn.get_partition_spec(made)["params"]["dense"]["kernel"] == PartitionSpec(None, "devices")
    assert_same(flax.serialization.from_bytes(made, flax.serialization.to_bytes(made)), made)
    policied = jmp.with_policy(model, INT8)
    np.testing.assert_array_equal(policied.apply(made, X), policied.apply(variables, X))
