"""`QuantizedArray`: what it says of itself, the trees it lives in, what cuts and shards it, and every error."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meshes import find_devices
from properties import examples
from quant_reference import fresh

import jmp_policy as jmp
from jmp_policy.quant import Layout, QuantizedArray, quantize_array, table_layout

quantized = jax.jit(quantize_array, static_argnums=(1, 2))


def weight(format="int8", dtype="float32"):
    return quantized(jnp.asarray(fresh(16, 6), dtype), format)


def paths_of(array):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(array)]


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(
        ["int8", "e4m3/-1", "e4m3/2", "nf4/2", "int4/2", "int4/1000", "int4/-1", "mxfp8/2", "mxfp4/2", "nvfp4/2"]
    ),
    st.sampled_from(["float32", "float16", "bfloat16"]),
)
@examples(8)
def test_it_has_the_shape_and_dtype_of_the_weight_and_the_bytes_of_its_arrays(shape, channels, summed, format, dtype):
    summed = min(summed, len(shape))
    channels = min(channels, len(shape) - summed)
    shape = [2 * length for length in shape]  # so that blocks of two divide
    contracted = tuple(shape[len(shape) - channels - summed : len(shape) - channels])
    array = quantize_array(jax.ShapeDtypeStruct(tuple(shape), dtype), format, Layout(contracted, channels))
    assert (array.shape, array.dtype, array.ndim) == (tuple(shape), jnp.dtype(dtype), len(shape))
    assert array.size == np.prod(shape)
    blocks = array.size // np.prod(contracted) * (np.prod(contracted) // 2 if format.endswith("/2") else 1)
    blocks //= 2 if format == "e4m3/2" and channels else 1  # the squares span two outputs as well
    values = array.size // 2 if "4/" in format else array.size
    of_tensors = 4 * int(np.prod(shape[: len(shape) - channels - summed])) if format == "nvfp4/2" else 0
    assert (
        array.nbytes
        == values + blocks * {"int8": 4, "e4m3": 4, "nf4": 4, "int4": 5}.get(format.partition("/")[0], 1) + of_tensors
    )
    restored = jax.eval_shape(lambda array: array.dequantize(), array)
    assert (restored.shape, restored.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("format", ["int4/8", "nvfp4/8"])
def test_trees_rebuild_it_with_any_leaves_whose_paths_are_their_names(format):
    array = weight(format)
    leaves, structure = jax.tree.flatten(array)
    for leaf in (None, object(), "x", jax.ShapeDtypeStruct((2,), jnp.int8)):
        other = jax.tree.unflatten(structure, [leaf] * len(leaves))
        assert (type(other), other.values, other.format) == (QuantizedArray, leaf, array.format)
        assert repr(other).startswith(f"QuantizedArray({format}, shape=")
    assert repr(array) == f"QuantizedArray({format}, shape=(16, 6), dtype=float32)"
    assert paths_of(array) == [".values", ".scale", ".zero_point" if format == "int4/8" else ".tensor_scale"]
    lowered = jax.jit(lambda array: array.dequantize()).lower(array)
    assert lowered.in_avals[0][0].format == array.format
    for again in (copy.copy(array), copy.deepcopy(array), pickle.loads(pickle.dumps(array))):
        assert jax.tree.structure(again) == structure
        jax.tree.map(np.testing.assert_array_equal, again, array)


def test_a_pickle_from_before_there_were_blocks_has_no_scale_of_the_tensor():
    array = weight("int4/8")
    old = object.__new__(QuantizedArray)
    vars(old).update({name: value for name, value in vars(array).items() if name != "tensor_scale"})
    again = pickle.loads(pickle.dumps(old))
    assert again.tensor_scale is None
    jax.tree.map(np.testing.assert_array_equal, again, array)


def test_no_policy_casts_it(any_policy):
    tree = {"kernel": weight(), "count": 3}
    for cast in (any_policy.cast_to_param, any_policy.cast_to_compute, any_policy.cast_to_output):
        assert cast(tree)["kernel"] is tree["kernel"]
        assert cast(tree["kernel"]) is tree["kernel"]
    cast = jmp.cast_floating(tree | {"bias": jnp.zeros(2)}, "float16")
    assert cast["kernel"] is tree["kernel"]
    assert cast["bias"].dtype == jnp.float16


@pytest.mark.parametrize(
    ("format", "layout", "spec", "placed"),
    [
        ("int8", None, ("data", "model"), {"values": ("data", "model"), "scale": (None, "model")}),
        ("int8", None, ("data",), {"values": ("data", None), "scale": (None, None)}),
        ("int8", table_layout((16, 8)), ("data", "model"), {"values": ("data", "model"), "scale": ("data", None)}),
        ("int4/4", None, ("data", "model"), {"values": ("data", None, "model"), "scale": ("data", None, "model")}),
        ("e4m3/-1", None, ("data", "model"), {"values": ("data", "model"), "scale": (None, "model")}),
        ("e4m3/4", None, ("data", "model"), {"values": ("data", "model"), "scale": (None, None)}),
        ("mxfp4/16", None, ("data", "model"), {"values": (None, None, "model"), "scale": (None, None, "model")}),
        ("nvfp4/4", None, ("data", "model"), {"values": ("data", None, "model"), "tensor_scale": ()}),
    ],
)
def test_shard_puts_each_scale_beside_its_values(format, layout, spec, placed):
    mesh = Mesh(np.array(find_devices(4)).reshape(2, 2), ("data", "model"))
    array = quantized(jnp.asarray(fresh(16, 8), jnp.float32), format, layout)
    sharded = array.shard(NamedSharding(mesh, PartitionSpec(*spec)))
    for name, expected in placed.items():
        assert getattr(sharded, name).sharding.is_equivalent_to(
            NamedSharding(mesh, PartitionSpec(*expected)), len(expected)
        )
    assert sharded.sharding == sharded.values.sharding
    jax.tree.map(np.testing.assert_array_equal, sharded, array)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: quantize_array(jnp.ones(4), None), ValueError,
         r"^quantize_array needs a format that stores weights, got None\."),
        (lambda: quantize_array(weight(), "int8", where=" 'a/kernel'"), ValueError,
         r"^The weight 'a/kernel' is quantized already: QuantizedArray\(int8, .*Quantize the array of its deq"),
        (lambda: quantize_array(jnp.arange(4), "int8", where=" of 'a'"), TypeError,
         r"^Only floating arrays with axes and elements are quantized, got int32\[4\] of 'a'\. For example: jnp\.ones"),
        (lambda: quantize_array(jnp.ones((0, 4)), "int8"), TypeError, r"^Only floating .*, got float32\[0, 4\]\. "),
        (lambda: quantize_array([1.0, 2.0], "int8"), TypeError, r"^Only floating .*, got \[1\.0, 2\.0\]\. "),
        (lambda: quantize_array(jnp.ones(32), "mxfp8", clip="best"), ValueError, r"^clip is 'absmax', 'mse' or a "),
        (lambda: quantize_array(jnp.ones(32), "mxfp4", clip="mse", where=" 'a/kernel'"), ValueError,
         r"^clip='mse' is for integers, and 'mxfp4' scales each block of the weight 'a/kernel' by its largest "
         r"element\. Leave clip out; where a map has integers too, quantize those first, "),
        (lambda: quantize_array(jnp.ones(24), "nvfp4", clip=99.0), ValueError, r"^clip=99\.0 is for .* 'nvfp4' scales"),
        (lambda: weight().dequantize("int8"), ValueError, r"^Unknown dtype 'int8'\."),
        (lambda: jnp.asarray(weight()), TypeError,
         r"^QuantizedArray\(int8, .*\) is quantized, and was read by a layer or code that .*call its deq"),
        (lambda: weight("int4/8") + jnp.ones(2), TypeError, r"unsupported operand|is quantized, and was read by "),
        (lambda: jnp.dot(jnp.ones((2, 16)), weight("int4/8")), TypeError,
         r"Give the model the policy it was quantized with: with_policy\(model, policy\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_an_error(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("format", ["int4/8", "e4m3/4", "nf4/8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_an_exported_program_of_quantized_weights_is_serialized(format):
    params, x = {"w": quantize_array(jnp.asarray(fresh(16, 8)), format)}, jnp.ones((2, 16))
    exported = jax.export.export(jax.jit(lambda params, x: x @ params["w"].dequantize()))(params, x)
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree
    np.testing.assert_array_equal(again.call(params, x), x @ params["w"].dequantize())


def test_a_table_of_parameters_is_told_to_leave_out_statistics():
    with pytest.raises(TypeError, match=r"QuantizedArray\(int8, .*\) is not one number\. .*include_stats=False"):
        float(quantize_array(jnp.ones((16, 8)), "int8"))


@pytest.mark.parametrize("differentiate", ["value_and_grad", "minimize"])
def test_training_of_quantized_weights_names_the_weight_and_what_to_train(differentiate):
    params = {"head": {"kernel": quantize_array(jnp.ones((16, 8)), "int4/8")}}
    loss_fn = lambda params: jnp.sum(params["head"]["kernel"].dequantize())
    message = (
        r"^{} got the quantized weight QuantizedArray\(int4/8, .*\) at .*\['head'\]\['kernel'\]: integers have no "
        r"gradient\. Train the floating weights .*with_policy\(model, 'int4/8_from_mixed_bfloat16'\)\.$"
    )
    run = {
        "value_and_grad": jmp.value_and_grad(loss_fn, loss_scale=jmp.NoOpLossScale()),
        "minimize": lambda params: jmp.optim.minimize(loss_fn, optax.sgd(0.1))(params, optax.sgd(0.1).init(params)),
    }
    with pytest.raises(TypeError, match=message.format(differentiate)):
        run[differentiate](params)


def test_the_error_for_a_table_does_not_propose_the_format_that_it_is_stored_in():
    """A table under int4/32 is stored in int8(activations=false)."""
    variables = {"params": {"embedding": jax.ShapeDtypeStruct((32, 32), jnp.float32)}}
    table = jmp.quant.quantize(variables, "int4/32(min_size=0)_from_mixed_bfloat16")["params"]["embedding"]
    with pytest.raises(AttributeError, match=r"For example: PolicyMap\({.*: 'mixed_bfloat16'}, policy\)\.$"):
        table.T  # noqa: B018
