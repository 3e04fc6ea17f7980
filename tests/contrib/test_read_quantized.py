"""Checkpoints of other libraries: each layout is read beside a plain reader of its published description."""

import dataclasses
import json
import re
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import linen as nn, nnx
from jax.sharding import NamedSharding
from meshes import find_devices
from safetensors.numpy import load_file, save_file

import jmp_policy as jmp
from jmp_policy.contrib import _checkpoint_arrays, policy_of_checkpoint, read_quantized, write_quantized
from jmp_policy.quant import Layout, QuantizedArray, quantize_array

INPUTS, OUTPUTS, GROUP = 32, 24, 8


def draw(seed=0):
    return np.random.default_rng(seed)


def draw_scales(*shape, dtype=np.float16, seed=1):
    return draw(seed).uniform(0.01, 0.1, shape).astype(dtype)


def draw_words(*shape, seed=2):
    return draw(seed).integers(-(2**31), 2**31, shape).astype(np.int32)


# Plain readers: each returns the float32 matrix (inputs, outputs), element by element as the layout is described.


def nibble(word, place):
    return (int(word) >> (4 * place)) & 15


def plain_gptq(stem, tensors, shift=0x11111111):
    qweight, qzeros, scales, g_idx = (tensors[f"{stem}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx"))
    made = np.empty((qweight.shape[0] * 8, qweight.shape[1]), np.float32)
    for i, j in np.ndindex(*made.shape):
        group = g_idx[i]
        zero = nibble(int(qzeros[group, j // 8]) + shift, j % 8)
        made[i, j] = np.float32(nibble(qweight[i // 8, j], i % 8) - zero) * np.float32(scales[group, j])
    return made


def plain_awq(stem, tensors):
    qweight, qzeros, scales = (tensors[f"{stem}.{name}"] for name in ("qweight", "qzeros", "scales"))
    group = qweight.shape[0] // scales.shape[0]
    place = {column: place for place, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7])}
    made = np.empty((qweight.shape[0], qweight.shape[1] * 8), np.float32)
    for i, j in np.ndindex(*made.shape):
        zero = nibble(qzeros[i // group, j // 8], place[j % 8])
        made[i, j] = np.float32(nibble(qweight[i, j // 8], place[j % 8]) - zero) * np.float32(scales[i // group, j])
    return made


def plain_packed(stem, tensors):
    packed, scale, (outputs, inputs) = (tensors[f"{stem}.weight_{name}"] for name in ("packed", "scale", "shape"))
    zeros, g_idx = tensors.get(f"{stem}.weight_zero_point"), tensors.get(f"{stem}.weight_g_idx")
    made = np.empty((inputs, outputs), np.float32)
    for i, j in np.ndindex(*made.shape):
        group = i // (inputs // scale.shape[1]) if g_idx is None else g_idx[i]
        zero = 0 if zeros is None else nibble(zeros[j // 8, group], j % 8) - 8
        made[i, j] = np.float32(nibble(packed[j, i // 8], i % 8) - 8 - zero) * np.float32(scale[j, group])
    return made


def plain_int8(stem, tensors):
    return (tensors[f"{stem}.weight"].astype(np.float32) * tensors[f"{stem}.weight_scale"].astype(np.float32)).T


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def plain_mxfp4(stem, tensors):
    blocks, scales = tensors[f"{stem}.weight_blocks"], tensors[f"{stem}.weight_scales"]
    *_, outputs, groups, size = blocks.shape
    made = np.empty((2 * groups * size, outputs), np.float32)
    for i, j in np.ndindex(*made.shape):
        byte = blocks[j, i // (2 * size), i % (2 * size) // 2]
        exponent = int(scales[j, i // (2 * size)]) - 127
        made[i, j] = np.ldexp(np.float32(E2M1[byte >> 4 if i % 2 else byte & 15]), exponent)
    return made


# Tensors of one layer, with random bits.


def make_gptq(stem, desc_act=False, seed=0):
    g_idx = np.arange(INPUTS, dtype=np.int32) // GROUP
    return {
        f"{stem}.qweight": draw_words(INPUTS // 8, OUTPUTS, seed=seed),
        f"{stem}.qzeros": draw_words(INPUTS // GROUP, OUTPUTS // 8, seed=seed + 1),
        f"{stem}.scales": draw_scales(INPUTS // GROUP, OUTPUTS, seed=seed + 2),
        f"{stem}.g_idx": draw(seed).permutation(g_idx) if desc_act else g_idx,
    }


def make_awq(stem):
    return {
        f"{stem}.qweight": draw_words(INPUTS, OUTPUTS // 8),
        f"{stem}.qzeros": draw_words(INPUTS // GROUP, OUTPUTS // 8, seed=3),
        f"{stem}.scales": draw_scales(INPUTS // GROUP, OUTPUTS),
    }


def make_packed(stem, inputs=INPUTS, outputs=OUTPUTS, group=GROUP, zero_point=False, g_idx=None):
    words = -(-inputs // 8)
    packed = draw_words(outputs, words)
    if inputs % 8:
        packed[:, -1] &= (1 << 4 * (inputs % 8)) - 1  # the library pads with zeros
    made = {
        f"{stem}.weight_packed": packed,
        f"{stem}.weight_scale": draw_scales(outputs, inputs // group, dtype=ml_dtypes.bfloat16),
        f"{stem}.weight_shape": np.array([outputs, inputs], np.int64),
    }
    if zero_point:
        zeros = draw_words(-(-outputs // 8), inputs // group, seed=3)
        if outputs % 8:
            zeros[-1] &= (1 << 4 * (outputs % 8)) - 1
        made[f"{stem}.weight_zero_point"] = zeros
    return made if g_idx is None else made | {f"{stem}.weight_g_idx": g_idx}


def make_int8(stem, inputs=INPUTS, outputs=OUTPUTS):
    weight = draw().integers(-127, 128, (outputs, inputs)).astype(np.int8)
    return {f"{stem}.weight": weight, f"{stem}.weight_scale": draw_scales(outputs, 1, dtype=np.float32)}


def make_mxfp4(stem):
    blocks = draw().integers(0, 256, (OUTPUTS, 2, 8)).astype(np.uint8)
    return {
        f"{stem}.weight_blocks": blocks,
        f"{stem}.weight_scales": draw(1).integers(90, 160, (OUTPUTS, 2)).astype(np.uint8),
    }


def make_float8(stem, suffix, inputs, outputs, rows):
    values = draw().normal(size=(outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    return {f"{stem}.weight": values, f"{stem}.weight_{suffix}": draw_scales(*rows, dtype=np.float32)}


def make_squares(stem):
    return make_float8(stem, "scale_inv", 200, 160, (2, 2))


def plain_squares(stem, tensors):
    weight, scale = tensors[f"{stem}.weight"].astype(np.float32), tensors[f"{stem}.weight_scale_inv"]
    made = np.empty(weight.shape[::-1], np.float32)
    for i, j in np.ndindex(*made.shape):
        made[i, j] = weight[j, i] * scale[j // 128, i // 128]
    return made


NF4_TABLE = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0],
    np.float32,
)  # fmt: skip


def make_nf4(stem, nested=False, inputs=128, outputs=24):
    count = inputs * outputs // 64
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [outputs, inputs]}
    made = {
        f"{stem}.weight": draw().integers(0, 256, (inputs * outputs // 2, 1)).astype(np.uint8),
        f"{stem}.weight.absmax": draw_scales(count, dtype=np.float32),
        f"{stem}.weight.quant_map": NF4_TABLE,
    }
    if nested:
        state |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.04}
        made[f"{stem}.weight.absmax"] = draw(3).integers(0, 256, count).astype(np.uint8)
        made[f"{stem}.weight.nested_absmax"] = draw_scales(-(-count // 32), dtype=np.float32)
        made[f"{stem}.weight.nested_quant_map"] = np.linspace(-1, 1, 256, dtype=np.float32)
    made[f"{stem}.weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return made


def plain_nf4(stem, tensors):
    part = lambda name: tensors[f"{stem}.weight{name}"]
    state = json.loads(part(".quant_state.bitsandbytes__nf4").tobytes())
    outputs, inputs = state["shape"]
    made = np.empty((inputs, outputs), np.float32)
    for i, j in np.ndindex(*made.shape):
        place = j * inputs + i
        byte, scale = int(part("")[place // 2, 0]), part(".absmax")[place // 64]
        if scale.dtype == np.uint8:
            scale = part(".nested_quant_map")[scale] * part(".nested_absmax")[place // 64 // 32] + np.float32(0.04)
        made[i, j] = NF4_TABLE[byte & 15 if place % 2 else byte >> 4] * scale
    return made


SHUFFLED = draw().permutation(np.arange(INPUTS, dtype=np.int32) // GROUP)
LAYOUTS = {
    "gptq": (make_gptq, plain_gptq, f"int4/{GROUP}"),
    "gptq with desc_act": (lambda stem: make_gptq(stem, desc_act=True), plain_gptq, f"int4/{GROUP}"),
    "gptq_v2": (make_gptq, lambda stem, tensors: plain_gptq(stem, tensors, shift=0), f"int4/{GROUP}"),
    "awq": (make_awq, plain_awq, f"int4/{GROUP}"),
    "packed": (make_packed, plain_packed, f"int4/{GROUP}"),
    "packed by channel": (lambda stem: make_packed(stem, group=INPUTS), plain_packed, "int4/-1"),
    "packed with zero points": (lambda stem: make_packed(stem, zero_point=True), plain_packed, f"int4/{GROUP}"),
    "packed with g_idx": (lambda stem: make_packed(stem, g_idx=SHUFFLED), plain_packed, f"int4/{GROUP}"),
    "packed in odd sizes": (lambda stem: make_packed(stem, 30, 21, 5, zero_point=True), plain_packed, "int4/5"),
    "int8": (make_int8, plain_int8, "int8"),
    "mxfp4": (make_mxfp4, plain_mxfp4, "mxfp4/16"),
    "fp8": (make_squares, plain_squares, "e4m3/128"),
    "bitsandbytes": (make_nf4, plain_nf4, "nf4/64"),
    "bitsandbytes with nested scales": (lambda stem: make_nf4(stem, nested=True), plain_nf4, "nf4/64"),
    "float8": (lambda stem: make_float8(stem, "scale", INPUTS, OUTPUTS, (OUTPUTS, 1)), plain_int8, "e4m3/-1"),
}
"""Tensors of a layer, their plain reader, and our format."""

WRITTEN_AS = {"gptq with desc_act": "gptq", "int8": "compressed-tensors"}


def config_of(layout):
    version = {"quantization_config": {"quant_method": "gptq", "checkpoint_format": layout.partition(" ")[0]}}
    return version if layout.startswith("gptq") else {}


def save_checkpoint(folder, tensors, config=None, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / name)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def policy_in(format):
    kind, _, options = format.removesuffix(")").partition("(")
    return f"{kind}(min_size=0{',' * bool(options)}{options})_from_float32"


def linen_like(inputs, outputs, format):
    init = lambda: {"params": {"dense": nn.Dense(outputs).init(jax.random.key(0), jnp.ones((1, inputs)))["params"]}}
    clips = {"dense": 6.0} if "static" in format else {}
    return jax.eval_shape(lambda: jmp.quant.quantize(init(), policy_in(format), input_clips=clips))


class Model(nnx.Module):
    def __init__(self, inputs, outputs):
        self.dense = nnx.Linear(inputs, outputs, rngs=nnx.Rngs(0))


def nnx_like(inputs, outputs, format):
    return nnx.state(nnx.eval_shape(lambda: jmp.quant.quantize(Model(inputs, outputs), policy_in(format))))


def kernel_of(state):
    kernels = [
        x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, QuantizedArray)) if hasattr(x, "layout")
    ]
    (kernel,) = kernels
    return kernel


@pytest.mark.parametrize("make_like", [linen_like, nnx_like])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_read_bit_for_bit_and_written_with_the_same_tensors(layout, make_like, tmp_path):
    make, read_plainly, format = LAYOUTS[layout]
    tensors = make("dense")
    expected = read_plainly("dense", tensors)
    tensors["dense.bias"] = draw().normal(size=expected.shape[1]).astype(np.float32)
    folder = save_checkpoint(tmp_path / "given", tensors, config_of(layout))
    like = make_like(*expected.shape, format)
    state = read_quantized(folder, like)
    kernel = kernel_of(state)
    assert kernel.dequantize().tobytes() == expected.tobytes()
    assert {np.asarray(x).tobytes() for x in jax.tree.leaves(state)} > {tensors["dense.bias"].tobytes()}
    if kernel.input_order is None:
        described = jax.tree.map(lambda x: (x.shape, x.dtype), (state, like))
        assert described[0] == described[1]

    written_as = layout.partition(" ")[0].replace("packed", "compressed-tensors").replace("int8", "compressed-tensors")
    written_as = written_as.replace("float8", "compressed-tensors")
    write_quantized(state, tmp_path / "written", format=written_as)
    if "nested" not in layout:  # those scales are written as they stand, in float32
        check_tensors(tmp_path / "written" / "model.safetensors", tensors)


def check_tensors(path, tensors):
    """Checks names, dtypes, shapes and bytes, by a reader of the file format in three lines."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    assert entries.keys() - {"__metadata__"} == tensors.keys()
    names = {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8", "float16": "F16", "bfloat16": "BF16"}
    names |= {"float32": "F32", "float8_e4m3fn": "F8_E4M3"}
    for name, array in tensors.items():
        first, last = entries[name]["data_offsets"]
        assert entries[name]["shape"] == list(array.shape), name
        assert entries[name]["dtype"] == names.get(array.dtype.name, "F32"), name
        assert data[start + first : start + last] == array.tobytes(), name


def test_a_model_computes_with_the_weights_of_a_checkpoint(tmp_path):
    tensors = make_gptq("dense", desc_act=True) | {"dense.bias": np.zeros(OUTPUTS, np.float32)}
    x = jnp.asarray(draw(5).normal(size=(4, INPUTS)), jnp.float32)
    policy = policy_in(f"int4/{GROUP}")
    params = read_quantized(tensors, linen_like(INPUTS, OUTPUTS, f"int4/{GROUP}"))["params"]["dense"]
    model = jmp.with_policy(nn.Dense(OUTPUTS), policy)
    out = jax.jit(model.apply)({"params": params}, x)
    np.testing.assert_allclose(out, x @ plain_gptq("dense", tensors), rtol=1e-5, atol=1e-5)
    quantized = jmp.quant.quantize(Model(INPUTS, OUTPUTS), policy)
    nnx.update(quantized, read_quantized(tensors, nnx_like(INPUTS, OUTPUTS, f"int4/{GROUP}")))
    np.testing.assert_allclose(quantized.dense(x), out, rtol=1e-5, atol=1e-5)


def stacked_like(layers, format=f"int4/{GROUP}"):
    shapes = {"kernel": (layers, INPUTS, OUTPUTS), "bias": (layers, OUTPUTS)}
    dense = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    return jmp.quant.quantize({"params": {"blocks": {"dense": dense}}}, policy_in(format))


STACKED = {
    "patterns": {
        r"model\.layers\.(\d+)\.(\w+)\.weight": r"blocks[\1]/\2/kernel",
        r".*(\d)\.dense\.bias": r"blocks[\1]/dense/bias",
    },
    "function": lambda name: "blocks[{2}]/{3}/{4}".format(*name.split(".")).replace("weight", "kernel"),
}


@pytest.mark.parametrize("names", STACKED)
@pytest.mark.parametrize("ordered", [(), (1,)])
def test_layers_become_elements_of_a_stack_and_are_written_one_by_one(names, ordered, tmp_path):
    tensors, expected = {}, {}
    for n in (2, 0, 1):
        stem = f"model.layers.{n}.dense"
        tensors |= make_gptq(stem, desc_act=n in ordered, seed=10 * n)
        tensors[f"{stem}.bias"] = draw(n).normal(size=OUTPUTS).astype(np.float32)
        expected[n] = plain_gptq(stem, tensors)
    dense = read_quantized(tensors, stacked_like(3), names=STACKED[names])["params"]["blocks"]["dense"]
    assert dense["kernel"].dequantize().tobytes() == np.stack([expected[n] for n in range(3)]).tobytes()
    assert dense["bias"].tolist() == [tensors[f"model.layers.{n}.dense.bias"].tolist() for n in range(3)]
    back = {r"blocks/(\w+)/kernel": r"model.layers.*.\1.weight", r"blocks/(\w+)/bias": r"model.layers.*.\1.bias"}
    write_quantized({"blocks": {"dense": dense}}, tmp_path, format="gptq", names=back)
    check_tensors(tmp_path / "model.safetensors", tensors)


def test_experts_in_one_tensor_become_a_stack(tmp_path):
    blocks = draw().integers(0, 256, (3, OUTPUTS, 2, 16)).astype(np.uint8)
    scales = draw(1).integers(110, 130, (3, OUTPUTS, 2)).astype(np.uint8)
    tensors = {"experts.up_blocks": blocks, "experts.up_scales": scales}
    like = quantize_array(jax.ShapeDtypeStruct((3, 64, OUTPUTS), jnp.float32), "mxfp4", Layout((64,), 1))
    state = read_quantized(tensors, {"experts": {"up": like}})
    each = [{"x.weight_blocks": blocks[n], "x.weight_scales": scales[n]} for n in range(3)]
    expected = np.stack([plain_mxfp4("x", one) for one in each])
    np.testing.assert_array_equal(state["experts"]["up"].dequantize(), expected)
    write_quantized(state, tmp_path, format="mxfp4")
    check_tensors(tmp_path / "model.safetensors", tensors)


@pytest.mark.parametrize(
    ("shape", "layout"), [((INPUTS, 3, 8), Layout((INPUTS,), 2)), ((4, 8, OUTPUTS), Layout((4, 8), 1))]
)
@pytest.mark.parametrize("format", [f"int4/{GROUP}", "int8"])
def test_a_kernel_with_heads_is_the_matrix_in_another_shape(shape, layout, format):
    make, read_plainly, _ = LAYOUTS["int8" if format == "int8" else "awq"]
    tensors = make("query")
    like = {"query": {"kernel": quantize_array(jax.ShapeDtypeStruct(shape, jnp.float32), format, layout)}}
    kernel = read_quantized(tensors, like)["query"]["kernel"]
    np.testing.assert_array_equal(kernel.dequantize(), read_plainly("query", tensors).reshape(shape))


KERNELS = ["int8", "int4/16", "nf4/16", "e4m3/128", "e4m3/-1", "mxfp4"]
OTHERS = {"table": ["int8", "e4m3/128"], "heads": ["int4/16", "e4m3/128"], "stack": ["e4m3/128", "nvfp4"]}


@pytest.mark.parametrize(
    ("form", "format"),
    [
        *(("kernel", one) for one in KERNELS),
        *(pytest.param(f, o, marks=pytest.mark.slow) for f in OTHERS for o in OTHERS[f]),
    ],
)
def test_floats_that_are_rounded_in_parts_are_the_same_as_rounded_at_once(form, format, monkeypatch):
    shape, layout = {
        "table": ((300, 48), Layout((48,), 0)),
        "kernel": ((48, 300), Layout((48,), 1)),
        "heads": ((48, 3, 100), Layout((48,), 2)),
        "stack": ((2, 48, 150), Layout((48,), 1)),
    }[form]
    weight = draw().normal(size=shape).astype(ml_dtypes.bfloat16)
    like = {"w": quantize_array(jax.ShapeDtypeStruct(shape, jnp.float32), f"{format}(min_size=0)", layout)}
    if form == "stack":
        tensors = {f"w.{n}.weight": weight[n].T for n in range(2)}
    else:
        tensors = {"w.0.weight": weight if form == "table" else weight.reshape(48, 300).T}
    parts = []
    rounded = _checkpoint_arrays._quantize
    monkeypatch.setattr(_checkpoint_arrays, "_CHUNK", 128 * 48)
    monkeypatch.setattr(_checkpoint_arrays, "_quantize", lambda part, **how: parts.append(part) or rounded(part, **how))
    names = (lambda name: f"w[{name[2]}]") if form == "stack" else (lambda name: "w")
    read = read_quantized(tensors, like, names=names)["w"]
    expected = quantize_array(weight.astype(np.float32), like["w"].format, layout)
    jax.tree.map(np.testing.assert_array_equal, read, expected)
    assert format == "nvfp4" or max(part.size for part in parts) == 128 * 48


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floating_tensors_are_cast_or_quantized_where_like_is_quantized(dtype, tmp_path):
    shapes = {"dense.weight": (24, 32), "dense.bias": (24,), "out.weight": (5, 24), "norm.weight": (24,)}
    shapes |= {"table.weight": (7, 24), "conv.weight": (6, 5, 3, 2)}
    tensors = {name: draw().normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    ours = {"dense": {"kernel": (32, 3, 8), "bias": (3, 8)}, "out": {"kernel": (3, 8, 5)}, "norm": {"scale": (24,)}}
    ours |= {"table": {"embedding": (7, 24)}, "conv": {"kernel": (3, 2, 5, 6)}}
    like = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16), ours, is_leaf=lambda x: type(x) is tuple
    )
    given = jmp.PolicyMap({"dense": policy_in("int8")}, "float32")
    save_checkpoint(tmp_path, tensors)
    state = read_quantized(tmp_path, jmp.quant.quantize(like, given))
    half = lambda name: jnp.asarray(tensors[name]).astype(jnp.bfloat16)
    kernel = quantize_array(half("dense.weight").T.reshape(32, 3, 8), given["dense"].quantization, Layout((32,), 2))
    jax.tree.map(np.testing.assert_array_equal, state["dense"]["kernel"], kernel)
    expected = {
        ("dense", "bias"): half("dense.bias").reshape(3, 8),
        ("out", "kernel"): half("out.weight").T.reshape(3, 8, 5),
        ("norm", "scale"): half("norm.weight"),
        ("table", "embedding"): half("table.weight"),
        ("conv", "kernel"): half("conv.weight").transpose(2, 3, 1, 0),
    }
    for (module, name), array in expected.items():
        assert state[module][name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(state[module][name], array)


def test_sharded_checkpoints_are_read_by_their_index_or_all_files(tmp_path):
    first, second = make_int8("dense"), {"dense.bias": np.ones(OUTPUTS, np.float32)}
    save_checkpoint(tmp_path, first, name="model-1-of-2.safetensors")
    save_checkpoint(tmp_path, second, name="model-2-of-2.safetensors")
    like = linen_like(INPUTS, OUTPUTS, "int8")
    whole = read_quantized(first | second, like)
    jax.tree.map(np.testing.assert_array_equal, read_quantized(tmp_path, like), whole)
    index = {name: f"model-{1 + (name in second)}-of-2.safetensors" for name in first | second}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_checkpoint(tmp_path, {"other": np.ones(3)}, name="other.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read_quantized(tmp_path, like), whole)
    (tmp_path / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^The checkpoint '.*' does not fit `like`:\n- ") as caught:
        read_quantized(tmp_path, like)
    assert "- the file 'model-2-of-2.safetensors' cannot be read: it does not exist" in str(caught.value)
    assert "- 'dense.bias' is in 'model.safetensors.index.json', but not in 'model-2-of-2" in str(caught.value)


def test_leaves_are_put_by_the_sharding_of_like():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=find_devices(2))
    like = linen_like(INPUTS, OUTPUTS, f"int4/{GROUP}")
    put = lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, jax.P(*[None] * (x.ndim - 1), "x"))
    )
    state = read_quantized(
        make_gptq("dense", desc_act=True) | {"dense.bias": np.ones(OUTPUTS, np.float32)}, jax.tree.map(put, like)
    )
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_equivalent_to(
            NamedSharding(mesh, jax.P(*[None] * (leaf.ndim - 1), None if leaf.dtype == np.int32 else "x")), leaf.ndim
        )


def test_none_skips_a_tensor_and_a_mapping_is_tried_in_order():
    tensors = make_int8("a.dense") | {"a.dense.bias": np.ones(OUTPUTS, np.float32), "rotary.inv_freq": np.ones(4)}
    like = linen_like(INPUTS, OUTPUTS, "int8")
    names = {r"a\.dense\.weight": "dense/kernel", r"a\.(\w+)\.(\w+)": r"params/\1/\2", r"rotary\..*": None}
    kernel = kernel_of(read_quantized(tensors, like, names=names))
    np.testing.assert_array_equal(kernel.dequantize(), plain_int8("a.dense", tensors))
    with pytest.raises(ValueError, match=r"'rotary\.inv_freq': no pattern of `names` matches it; with None in place"):
        read_quantized(tensors, like, names=dict([*names.items()][:2]))
    with pytest.raises(ValueError, match=r"^'\(' of names is not a valid pattern: missing \)"):
        read_quantized(tensors, like, names={"(": "x"})
    with pytest.raises(ValueError, match=r"^'\\\\2' of names is not a valid template: invalid group reference 2"):
        read_quantized(tensors, like, names={"(.*)": r"\2"})


def without(tensors, *names):
    return {name: array for name, array in tensors.items() if name not in names}


BIAS = {"dense.bias": np.ones(OUTPUTS, np.float32)}
GOOD = make_gptq("dense") | BIAS
PACKED = make_packed("dense") | BIAS
INT4, INT8, STATIC = f"int4/{GROUP}", "int8", "int8(act_scale=static)"
MISFITS = {
    "missing": (without(GOOD, "dense.bias"), INT4, r"- 'params/dense/bias' of `like` has no tensor in the checkpoint"),
    "unknown": (GOOD | {"dens.bias": np.ones(2)}, INT4,
        r"- 'dens\.bias' is for 'dens/bias', which `like` does not have\. Did you mean 'params/dense/bias'\?"),
    "twice": (GOOD | {"dense.kernel": np.ones((OUTPUTS, INPUTS))}, INT4,
        r"- 'dense\.weight' and 'dense\.kernel' are both for 'dense/kernel'"),
    "not an array": (GOOD | {"dense.x": 3}, INT4, r"- 'dense\.x' is 3, not an array"),
    "shape": (GOOD | {"dense.bias": np.ones(5, np.float32)}, INT4,
        r"- 'dense\.bias': its shape is \(5,\), which does not give the \(24,\) of 'params/dense/bias'"),
    "dtype": (GOOD | {"dense.bias": np.ones(OUTPUTS, np.int32)}, INT4,
        r"- 'dense\.bias': it is int32\[24\], and 'params/dense/bias' of `like` float32\[24\]"),
    "lacking": (without(GOOD, "dense.qzeros"), INT4,
        r"- 'dense\.weight': it has \['dense.g_idx', .*\], and lacks \['\.qzeros'\]"),
    "axes": (GOOD | {"dense.qweight": np.ones(3, np.int32)}, INT4,
        r"its qweight is int32\[3\], and the layout has 2 axes"),
    "zeros": (GOOD | {"dense.qzeros": np.ones((4, 24), np.int32)}, INT4,
        r"its qzeros is int32\[4, 24\], and the layout has int32\[4, 3\]"),
    "scales": (GOOD | {"dense.scales": np.ones((4, OUTPUTS), np.float64)}, INT4,
        r"its scales is float64\[4, 24\], and the layout has float32 or float16 or bfloat16\[4, 24\]"),
    "groups": (GOOD | {"dense.scales": np.ones((5, OUTPUTS), np.float32)}, INT4,
        r"its 5 groups of scales do not divide its 32 inputs"),
    "g_idx": (GOOD | {"dense.g_idx": np.zeros(INPUTS, np.int32)}, INT4,
        r"its g_idx does not give each of the 4 groups 8 inputs"),
    "size": (make_int8("dense", 40) | BIAS, INT8,
        r"it has \(\.\.\., inputs, outputs\) of \(40, 24\), and 'params/dense/kernel' of `like`, .*, \(32, 24\)"),
    "block": (GOOD, "int4/16",
        r"it is stored in 'int4/8', with 4 scales for the inputs of each output, and 'params/dense/kernel' of `like` "
        r"in 'int4/16', with 2\. Make `like` with a policy such as 'int4/8\(min_size=0\)_from_mixed_bfloat16'"),
    "format": (GOOD, INT8,
        r"it is stored in 'int4/8', .* of `like` in 'int8', with 1\. Make `like` with a policy such"),
    "calibrated": (make_int8("dense") | BIAS, STATIC,
        r"'params/dense/kernel' of `like` has a calibrated range of its inputs, which the checkpoint does not\. Make"),
    "calibrated and floating": (BIAS | {"dense.weight": np.ones((24, 32), np.float32)}, STATIC,
        r"'params/dense/kernel' of `like` has a calibrated range of its inputs, which the checkpoint does not\. Make"),
    "bits": (PACKED | {"dense.weight_packed": draw_words(OUTPUTS, 8)}, INT4,
        r"its weight_packed is int32\[24, 8\], which does not store 4 bits for each of \[24, 32\] values"),
    "zero point of int8": (make_int8("dense") | BIAS | {"dense.weight_zero_point": np.ones((24, 1), np.int8)}, INT8,
        r"its weight_zero_point is not zero, and int8 weights have no zero points here"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_an_error(case):
    tensors, format, text = MISFITS[case]
    like = linen_like(INPUTS, OUTPUTS, format)
    with pytest.raises(ValueError, match=r"^The checkpoint the mapping does not fit `like`:\n") as caught:
        read_quantized(tensors, like)
    assert re.search(text, str(caught.value))


def test_an_unquantized_leaf_takes_no_integers():
    like = {"dense": {"kernel": jax.ShapeDtypeStruct((INPUTS, OUTPUTS), jnp.float32)}}
    text = r"- 'dense\.weight': it is stored in 'int8', and 'dense/kernel' of `like` is float32\[32, 24\]\. Make `like`"
    with pytest.raises(ValueError, match=text):
        read_quantized(make_int8("dense"), like)
    with pytest.raises(ValueError, match=r"- 'x' of `like` is 3, which is not an array"):
        read_quantized({"x": np.ones(3)}, {"x": 3})


def test_elements_of_a_stack_must_be_all_there():
    tensors = {f"{n}.dense.bias": np.ones(OUTPUTS, np.float32) for n in (0, 5)} | {"w": np.ones((3, INPUTS, OUTPUTS))}
    names = {r"(\d)\.(.*)\.bias": r"blocks[\1]/\2/bias", "w": "blocks/dense/kernel"}
    with pytest.raises(ValueError, match=r"^The checkpoint the mapping does not fit `like`:\n- ") as caught:
        read_quantized(tensors, stacked_like(2), names=names)
    assert "- 'params/blocks/dense/bias' of `like` has no tensor for element [1]" in str(caught.value)
    assert "- 'params/blocks/dense/bias' of `like` has no element [5], which is given" in str(caught.value)
    mixed = {"0": "blocks[0]/dense/bias", "1": "blocks/dense/bias"}
    with pytest.raises(
        ValueError, match=r"'params/blocks/dense/bias' of `like` has the shape \(2, 24\), and indices of"
    ):
        read_quantized({name: np.ones(OUTPUTS) for name in mixed}, stacked_like(2), names=mixed)


def test_ten_problems_are_shown_and_the_others_counted():
    tensors = {f"x{n}": np.ones(2) for n in range(12)}
    with pytest.raises(ValueError, match=r"^The checkpoint the mapping does not fit `like`:\n- ") as caught:
        read_quantized(tensors, {"y": jax.ShapeDtypeStruct((2,), jnp.float32)})
    assert str(caught.value).count("\n- ") == 11
    assert str(caught.value).endswith("\n- and 3 more")


def break_file(tmp_path, change):
    path = save_checkpoint(tmp_path, GOOD) / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    return path.parent


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda data: data[:-3], r"- the file 'model\.safetensors' is cut off in '.*': it has \d+ bytes of \d+"),
        (lambda data: data[:100], r"cannot be read: it has 100 bytes, which are fewer than its header says"),
        (lambda data: data[:8] + b"x" + data[9:], r"cannot be read: it is not a safetensors file \(JSONDecodeError"),
        (
            lambda data: data.replace(b'"F16"', b'"F99"'),
            r"- 'dense\.scales' has the dtype 'F99', which is not supported",
        ),
        (lambda data: data.replace(b"[4,24]", b"[4,-2]"), r"- 'dense\.scales' has the shape \[4, -2\], which is not "),
        (lambda data: data.replace(b'"F16"', b'"F64"'), r"- 'dense\.scales' has 192 bytes, .* of float64\[4, 24\]"),
    ],
)
def test_a_damaged_file_is_an_error_before_a_tensor_is_read(change, text, tmp_path, monkeypatch):
    monkeypatch.setattr(np, "memmap", None)
    with pytest.raises(ValueError, match=text):
        read_quantized(break_file(tmp_path, change), linen_like(INPUTS, OUTPUTS, INT4))


def test_no_matrix_is_read_before_all_headers_fit(tmp_path, monkeypatch):
    read, sizes = np.memmap, []
    monkeypatch.setattr(np, "memmap", lambda *args: sizes.append(*args[4]) or read(*args))
    save_checkpoint(tmp_path, without(GOOD, "dense.bias"))
    with pytest.raises(ValueError, match=r"- 'params/dense/bias' of `like` has no tensor in the checkpoint"):
        read_quantized(tmp_path, linen_like(INPUTS, OUTPUTS, INT4))
    assert sizes == [4 * INPUTS]  # the order of inputs


def test_folders_without_tensors_or_with_a_tensor_twice_are_errors(tmp_path):
    like = linen_like(INPUTS, OUTPUTS, INT4)
    with pytest.raises(ValueError, match=r"has no safetensors files\. Give the folder of a checkpoint with 'model\.s"):
        read_quantized(tmp_path, like)
    for name in ("a.safetensors", "b.safetensors"):
        save_checkpoint(tmp_path, BIAS, name=name)
    with pytest.raises(ValueError, match=r"- 'dense\.bias' is in two files: 'a\.safetensors' and 'b\.safetensors'"):
        read_quantized(tmp_path, like)


def test_plain_writing_dequantizes_and_what_is_written_is_read_again(tmp_path):
    tensors = make_awq("dense") | BIAS
    like = linen_like(INPUTS, OUTPUTS, INT4)
    write_quantized(read_quantized(tensors, like), tmp_path, format="plain")
    floats = jax.eval_shape(lambda: nn.Dense(OUTPUTS).init(jax.random.key(0), jnp.ones((1, INPUTS))))
    state = read_quantized(tmp_path, {"params": {"dense": floats["params"]}})
    np.testing.assert_array_equal(state["params"]["dense"]["kernel"], plain_awq("dense", tensors))
    assert str(policy_of_checkpoint(tmp_path)) == str(jmp.get_policy("float32"))


def weight_in(format, **fields):
    return quantize_array(jnp.asarray(draw().normal(size=(16, 8)), jnp.float32), format, **fields)


@pytest.mark.parametrize(
    ("state", "format", "text"),
    [
        ({"kernel": weight_in("int8")}, "awq", r"'dense/kernel': it is stored in 'int8', which this layout has not"),
        ({"a": weight_in("int8"), "b": weight_in("int4/8")}, "gptq",
         r"it has weights in several formats: 'dense/b' in 'int4/8', 'dense/a' in 'int8'\. Tables are left out by "),
        ({"kernel": quantize_array(jnp.ones((16, 4)), "int4/8")}, "awq", r"its 4 outputs are not a multiple of 8"),
        ({"kernel": quantize_array(jnp.ones((12, 8)), "int4/4")}, "gptq", r"its 12 inputs are not a multiple of 8"),
        ({"kernel": quantize_array(jnp.ones((2, 16, 8)), "int4/8", Layout((16,), 1))}, "awq",
         r"it is a stack of 1 axes; write each by a '\*' in its name"),
        ({"kernel": jnp.ones((2, 3, 4))}, "plain", r"its three axes \(2, 3, 4\) may be of a convolution or of heads"),
        ({"a": {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(2)}}, "plain",
         r"the name 'dense\.a\.weight' is that of another"),
        ({"*": jnp.ones(())}, "plain", r"its name 'dense\.\*' has 1 '\*', and the axes of its stack are \(\)"),
        ({"w": weight_in("int4/8")}, "awq", r"its name 'dense\.w' does not end in '\.weight'"),
    ],
)  # fmt: skip
def test_a_state_that_cannot_be_written_is_an_error(state, format, text, tmp_path):
    with pytest.raises(ValueError, match=rf"^The state cannot be written as {format!r}:\n") as caught:
        write_quantized({"dense": state}, tmp_path / "new", format=format)
    assert re.search(text, str(caught.value))
    assert not (tmp_path / "new").exists()


def read_kernel(tensors, format=INT4):
    return {"dense": {"kernel": kernel_of(read_quantized(tensors | BIAS, linen_like(INPUTS, OUTPUTS, format)))}}


@pytest.mark.parametrize("format", ["awq", "gptq", "gptq_v2", "compressed-tensors"])
def test_a_zero_point_above_15_cannot_be_written(format, tmp_path):
    weight = weight_in("int4/8")
    weight = dataclasses.replace(weight, zero_point=jnp.full_like(weight.zero_point, 16))
    with pytest.raises(ValueError, match=r"- 'dense/kernel': it has a zero point of 16, and 4 bits store 0 to 15"):
        write_quantized({"dense/kernel": weight}, tmp_path, format=format)


def test_gptqmodel_stores_a_zero_point_of_0_with_a_borrow_from_the_next(tmp_path):
    zeros = [0, 8, 15, 0, 0, 1, 2, 0]
    weight = weight_in("int4/16")
    weight = dataclasses.replace(weight, zero_point=jnp.asarray([[zeros]], jnp.uint8))
    write_quantized({"dense/kernel": weight}, tmp_path, format="gptq")
    qzeros = load_file(tmp_path / "model.safetensors")["dense.qzeros"]
    packed = sum(zero << 4 * place for place, zero in enumerate(zeros))
    assert int(qzeros[0, 0]) % 2**32 == (packed - 0x11111111) % 2**32
    read = read_quantized(tmp_path, {"dense": {"kernel": jax.eval_shape(lambda: weight)}})["dense"]["kernel"]
    assert read.zero_point.ravel().tolist() == zeros


def test_awq_stores_neither_input_orders_nor_our_input_scales(tmp_path):
    state = read_kernel(make_packed("dense", g_idx=SHUFFLED))
    with pytest.raises(ValueError, match=r"it has an input_order, which this layout cannot store; format='gptq' can"):
        write_quantized(state, tmp_path, format="awq")
    weight = jmp.quant.quantize_array(jnp.ones((16, 8)), "int4/8")
    scaled = type(weight)(**{**vars(weight), "input_scale": jnp.ones((2, 8, 1))})
    with pytest.raises(ValueError, match=r"it has input scales, of `awq`, which this layout has not"):
        write_quantized({"dense": {"kernel": scaled}}, tmp_path, format="awq")


def test_files_are_not_overwritten_and_formats_are_known(tmp_path, monkeypatch):
    state = {"kernel": weight_in("int8")}
    write_quantized(state, tmp_path, format="compressed-tensors")
    with pytest.raises(FileExistsError, match=r"model\.safetensors' exists already\. Give a new folder, or remove the"):
        write_quantized(state, tmp_path, format="compressed-tensors")
    with pytest.raises(ValueError, match=r"^Unknown format 'gtpq'\. Did you mean 'gptq'\?$"):
        write_quantized(state, tmp_path, format="gtpq")
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(
        ImportError, match=r"^write_quantized needs the package safetensors: pip install 'jmp-policy\[sa"
    ):
        write_quantized(state, tmp_path / "new", format="compressed-tensors")


WEIGHTS_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
WEIGHTS_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}


def scheme(weights, format, inputs=None, **more):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, **more}


@pytest.mark.parametrize(
    ("config", "policy"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "int4/64(min_size=0)"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}, "int4/-1(min_size=0)"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "int4/32(min_size=0)"),
        ({"quant_method": "mxfp4"}, "mxfp4(min_size=0)"),
        (scheme(WEIGHTS_INT8, "int-quantized", {"num_bits": 8, "dynamic": True}), "int8(min_size=0)"),
        (scheme(WEIGHTS_INT8, "naive-quantized"), "int8(activations=false,min_size=0)"),
        (scheme(WEIGHTS_INT4, "pack-quantized"), "int4/64(min_size=0)"),
        (scheme({**WEIGHTS_INT4, "strategy": "channel"}, "pack-quantized"), "int4/-1(min_size=0)"),
    ],
)  # fmt: skip
def test_the_policy_of_a_config_is_its_format_over_its_dtype(config, policy, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "quantization_config": config}))
    assert policy_of_checkpoint(tmp_path) == jmp.get_policy(f"{policy}_from_mixed_bfloat16")


def test_modules_that_a_config_leaves_out_have_rules(tmp_path):
    ignore = ["lm_head", "model.layers.*.router", r"re:.*gate\.proj$"]
    config = {"torch_dtype": "float16", "quantization_config": scheme(WEIGHTS_INT4, "pack-quantized", ignore=ignore)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    policy = policy_of_checkpoint(tmp_path)
    for path in ("lm_head", "net/lm_head", "model/layers/3/router", "model/layers/3/gate/proj"):
        assert policy[path] == jmp.get_policy("mixed_float16")
    for path in ("model/layers/3/mlp", "head", "model/layers/3/x/router"):
        assert policy[path] == jmp.get_policy("int4/64(min_size=0)_from_mixed_float16")
    gptq = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    save_checkpoint(tmp_path, {"lm_head.weight": np.ones((8, 8), np.float32)}, gptq)
    assert policy_of_checkpoint(tmp_path)["lm_head"] == jmp.get_policy("float32")


@pytest.mark.parametrize("format", ["gptq", "gptq_v2", "awq", "compressed-tensors", "mxfp4", "fp8", "bitsandbytes"])
def test_what_was_written_says_its_policy(format, tmp_path):
    ours = {"mxfp4": "mxfp4/32", "fp8": "e4m3/128(activations=true)", "bitsandbytes": "nf4/64"}.get(
        format, f"int4/{GROUP}"
    )
    like = {"dense": {"kernel": jnp.ones((64, 8)) * jnp.arange(-4.0, 4.0)}, "head": {"kernel": jnp.ones((8, 8))}}
    policy = jmp.PolicyMap({"head": "float32"}, policy_in(ours))
    state = jmp.quant.quantize(like, policy)
    write_quantized(state, tmp_path, format=format)
    found = policy_of_checkpoint(tmp_path)
    assert (found["dense"], found["head"]) == (jmp.get_policy(policy_in(ours)), jmp.get_policy("float32"))
    again = read_quantized(tmp_path, jax.eval_shape(lambda: jmp.quant.quantize(like, found)))
    jax.tree.map(np.testing.assert_array_equal, again, state)


def test_transformers_rejects_a_config_of_squares_without_dynamic_inputs(tmp_path):
    write_quantized({"kernel": weight_in("e4m3/128")}, tmp_path, format="fp8")  # inputs are not rounded
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["activation_scheme"] == "dynamic"
    assert policy_of_checkpoint(tmp_path).quantization.activations


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"has no 'config\.json' with settings of a model"),
        ("{", r"config\.json' is not JSON: "),
        ("[]", r"config\.json' is not a JSON object\. For example: "),
        (
            {"quant_method": "quanto"},
            r"^The quant_method 'quanto' is not supported yet\. Supported are gptq, awq, bitsandbytes, ",
        ),
        (
            {"quant_method": "fp8"},
            r"^weight_block_size of the quantization_config is None, .*\. Supported is '\[128, 128\]'",
        ),
        ({"quant_method": "bitsandbytes"}, r"^bnb_4bit_quant_type of the quantization_config is None, .*'nf4'"),
        ({"quant_method": "gptq", "bits": 8}, r"^bits of the quantization_config is 8, .*\. Supported is 4\."),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"^checkpoint_format of the .* is 'marlin'",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, r"^version of the quantization_config is 'gemv', "),
        (scheme(WEIGHTS_INT8, "float-quantized"), r"^format of the quantization_config is 'float-quantized'"),
        (scheme({**WEIGHTS_INT8, "strategy": "tensor"}, "int-quantized"), r"^strategy of the weights of compressed-t"),
        (scheme({**WEIGHTS_INT8, "num_bits": 3}, "pack-quantized"), r"^num_bits of the .* is 3, .* is 4 or 8\."),
        (scheme(None, "dense"), r"^The config has 1 config_groups with weights; one is supported so far"),
    ],
)
def test_a_config_of_another_quantization_is_an_error(text, message, tmp_path):
    if text is not None:
        text = text if isinstance(text, str) else json.dumps({"quantization_config": text})
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        policy_of_checkpoint(tmp_path)
