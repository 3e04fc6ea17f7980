"""Checkpoints of quantized weights in both APIs: bit for bit what was saved, onto the devices of the target."""

import dataclasses
import pickle
import tempfile
from pathlib import Path

import flax
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn, nnx, serialization
from jax.sharding import PartitionSpec
from quantized_apis import DENSE, X, filled, made
from saved_states import save_with_orbax

import jmp_policy as jmp
from jmp_policy import quant

INT8, INT4 = "int8(min_size=0)_from_float32", "int4/4(min_size=0)_from_float32"
NVFP4 = "nvfp4/4(min_size=0)_from_float32"
POLICIES = [INT8, INT4, "int4/6(min_size=0)_from_float32", NVFP4]
POLICIES += [f"{kind}/4(min_size=0)_from_float32" for kind in ("e4m3", "nf4", "mxfp8", "mxfp4")]
VARIABLES = filled(made("linen", "Dense")[1])


def assert_same(restored, saved):
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), restored, saved)


def restore_state_dict(saved, target):
    return serialization.from_state_dict(target, serialization.to_state_dict(saved))


def restore_bytes(saved, target):
    return serialization.from_bytes(target, serialization.to_bytes(saved))


def restore_with_orbax(saved, target):
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder) / "state", saved)
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder) / "state", target)


WAYS = {
    "state dict": restore_state_dict,
    "bytes": restore_bytes,
    "orbax": restore_with_orbax,
    "orbax without a target": lambda saved, target: jmp.convert_state(save_with_orbax(saved), target),
    "pickle": lambda saved, target: pickle.loads(pickle.dumps(saved)),
}
STORED = {
    "int4 of padded inputs": ("int4/32(activations=true,min_size=0)", 40),
    "int4 with an order of its inputs": ("int4/8(min_size=0)", 40),
    "e4m3 in squares": ("e4m3/128(min_size=0)", 200),
    "e4m3 per output": ("e4m3/-1(activations=true,min_size=0)", 40),
    "nf4": ("nf4/64(min_size=0)", 128),
    "nf4 of padded inputs": ("nf4/64(min_size=0)", 40),
    "mxfp4 of padded inputs": ("mxfp4/32(min_size=0)", 40),
}
"""Formats, and the inputs of a layer with 24 outputs."""


def draw_stored(api, case):
    """Returns a quantized state of random bits: to quantize floats would take a compilation."""
    format, inputs = STORED[case]
    policy, random = f"{format}_from_mixed_bfloat16", np.random.default_rng(0)
    if api == "linen":
        init = lambda: nn.Dense(24).init(jax.random.key(0), jnp.ones((1, inputs)))
        shapes = jax.eval_shape(lambda: quant.quantize(init(), policy))
    else:
        make = lambda: quant.quantize(nnx.Linear(inputs, 24, rngs=nnx.Rngs(0)), policy)
        shapes = nnx.state(nnx.eval_shape(make))

    def draw(leaf):
        if isinstance(leaf, quant.QuantizedArray):
            order = jnp.asarray(random.permutation(inputs), jnp.int32) if "order" in case else None
            return dataclasses.replace(jax.tree.map(draw, leaf), input_order=order)
        if leaf.dtype == jnp.float32:
            return jnp.asarray(random.uniform(0.1, 1, leaf.shape), jnp.float32)
        return jnp.asarray(random.integers(0, 255, leaf.shape).astype(np.uint8).view(leaf.dtype))

    return jax.tree.map(draw, shapes, is_leaf=lambda leaf: isinstance(leaf, quant.QuantizedArray))


@pytest.mark.parametrize(
    "way", ["bytes", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "bytes")]
)
@pytest.mark.parametrize("case", STORED)
@pytest.mark.parametrize("api", ["linen", pytest.param("nnx", marks=pytest.mark.slow)])
def test_saved_weights_are_restored_with_all_bits_and_metadata(api, case, way):
    saved = draw_stored(api, case)
    if api == "nnx" and way in ("state dict", "bytes"):
        saved = nnx.to_pure_dict(saved)  # flax.serialization does not take an `nnx.State`
    for target in (jax.tree.map(jnp.ones_like, saved), jax.eval_shape(lambda: saved)):
        restored = WAYS[way](saved, target)
        assert jax.tree.structure(restored) == jax.tree.structure(saved)
        describe = lambda x: (x.shape, x.dtype, np.asarray(x).tobytes())
        assert jax.tree.map(describe, restored) == jax.tree.map(describe, saved)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_of_flax_serialization_restore_into_an_abstract_target(policy):
    saved = quant.quantize(VARIABLES, policy)
    target = jax.eval_shape(lambda: quant.quantize(VARIABLES, policy))
    assert_same(restore_bytes(saved, target), saved)


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (None, r"a weight that is not quantized: float32\[16, 16\]"),
        pytest.param(
            INT4,
            r"{'scale': 'float32\[4, 1, 16\]', 'values': 'uint8\[4, 2, 16\]', 'zero_point': 'uint8\[4, 1, 16\]'}",
            marks=pytest.mark.slow,
        ),
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
