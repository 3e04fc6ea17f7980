"""Quantized checkpoints beside the libraries that define their layouts: equal bits and bytes in both directions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quant_reference import fresh

from jmp_policy.contrib import read_quantized, write_quantized
from jmp_policy.quant import quantize_array

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")

pytestmark = [
    pytest.mark.slow,  # to import a library takes seconds
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # AutoAWQ warns that it is no longer maintained
]


class CompressedTensors:
    """Weights of `compressed-tensors`."""

    written_as = "compressed-tensors"

    def __init__(self, format, dtype="float32", **settings):
        quantization = pytest.importorskip("compressed_tensors.quantization")
        compressors = pytest.importorskip("compressed_tensors.compressors")
        self.args = quantization.QuantizationArgs(**settings)
        self.scheme = quantization.QuantizationScheme(targets=["Linear"], weights=self.args)
        self.dtype = getattr(torch, dtype)
        self.compressor = compressors.BaseCompressor.get_value_from_registry(format)

    def quantize(self, weight):
        from compressed_tensors.quantization.utils import calculate_qparams

        weight = weight.to(self.dtype)
        groups = weight.unflatten(1, (-1, self.args.group_size or weight.shape[1]))
        scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), self.args)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        return self.compressor.compress(given, self.scheme)

    def read_config(self, config):
        from compressed_tensors.quantization import QuantizationConfig

        self.scheme = QuantizationConfig(**config["quantization_config"]).config_groups["group_0"]

    def dequantize(self, tensors):
        return self.compressor.decompress(tensors, self.scheme)["weight"]


class BitsAndBytes:
    """Weights in nf4 of `bitsandbytes`."""

    written_as = "bitsandbytes"

    def __init__(self, dtype="float32", block_size=64, is_nested=False):
        self.functional = pytest.importorskip("bitsandbytes.functional")
        self.dtype, self.block_size, self.is_nested = getattr(torch, dtype), block_size, is_nested

    def quantize(self, weight):
        packed, state = self.functional.quantize_4bit(
            weight.to(self.dtype), None, None, self.block_size, self.is_nested, "nf4"
        )
        return {"weight": packed} | {f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}

    def dequantize(self, tensors):
        rest = {name.removeprefix("weight."): x for name, x in tensors.items() if name != "weight"}
        return self.functional.dequantize_4bit(tensors["weight"], self.functional.QuantState.from_dict(rest, "cpu"))


class Squares:
    """Weights in FP8 squares of `transformers`, as DeepSeek and Qwen."""

    written_as = "fp8"

    def __init__(self):
        self.integration = pytest.importorskip("transformers.integrations.finegrained_fp8")

    def quantize(self, weight):
        from types import SimpleNamespace

        settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
        quantizer = self.integration.Fp8Quantize(SimpleNamespace(quantization_config=settings))
        return quantizer.convert({"weight": weight})

    def dequantize(self, tensors):
        return self.integration.Fp8Dequantize(None).convert(tensors)["weight"]


class GptOss:
    """Weights in MXFP4 of `transformers`, as gpt-oss. It quantizes on GPUs only, so the bits are random."""

    written_as = "mxfp4"

    def __init__(self):
        self.integration = pytest.importorskip("transformers.integrations.mxfp4")

    def quantize(self, weight):
        random, (outputs, inputs) = np.random.default_rng(), weight.shape
        blocks = random.integers(0, 256, (outputs, inputs // 32, 16)).astype(np.uint8)
        scales = random.integers(100, 150, (outputs, inputs // 32)).astype(np.uint8)
        return {"weight_blocks": torch.from_numpy(blocks), "weight_scales": torch.from_numpy(scales)}

    def dequantize(self, tensors):
        blocks, scales = (tensors[f"weight_{name}"][None] for name in ("blocks", "scales"))  # of one expert
        return self.integration.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T


class GptqModel:
    """Weights of `gptqmodel`, which computes in float16."""

    def __init__(self, version="gptq", group_size=32, has_zero_points=False, desc_act=False):
        self.utils = pytest.importorskip("gptqmodel.utils.model")
        self.linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
        self.written_as, self.group_size = version, group_size
        self.has_zero_points, self.desc_act = has_zero_points, desc_act

    def make_layer(self, outputs, inputs):
        return self.linear.TorchLinear(
            4, self.group_size, not self.has_zero_points, self.desc_act, inputs, outputs, register_buffers=True
        ).eval()

    def quantize(self, weight):
        outputs, inputs = weight.shape
        g_idx = torch.arange(inputs, dtype=torch.int32) // self.group_size
        g_idx = g_idx[torch.randperm(inputs)] if self.desc_act else g_idx
        groups = (outputs, inputs // self.group_size)
        zeros = torch.randint(0, 16, groups) if self.has_zero_points else torch.full(groups, 8)
        linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float32)
        linear.weight.data = weight
        layer = self.make_layer(outputs, inputs)
        with torch.no_grad():
            layer.pack_original(linear, torch.rand(groups) / 4 + 0.1, zeros.float(), g_idx)
        if self.written_as == "gptq":
            self.utils.convert_gptq_v2_to_v1_format_module(layer, layer)
        return {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales", "g_idx")}

    def dequantize(self, tensors):
        outputs = tensors["scales"].shape[1]
        layer = self.make_layer(outputs, 8 * len(tensors["qweight"]))
        for name, tensor in tensors.items():
            layer.register_buffer(name, tensor.half() if name == "scales" else tensor.clone())
        if self.written_as == "gptq":
            self.utils.convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
        return self.linear.PackableQuantLinear.dequantize_weight(layer).T  # that of TorchLinear compiles it


class Awq:
    """Weights of AutoAWQ."""

    written_as = "awq"

    def __init__(self, group_size=32):
        self.module, self.group_size = pytest.importorskip("awq.modules.linear.gemm"), group_size

    def quantize(self, weight):
        outputs, inputs = weight.shape
        groups = (inputs // self.group_size, outputs)
        scales, zeros = (torch.rand(groups) / 4 + 0.1).half().float(), torch.randint(0, 16, groups)
        each = lambda x: x.repeat_interleave(self.group_size, 0).T
        linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float32)
        linear.weight.data = weight.clamp(each(-zeros * scales), each((15 - zeros) * scales))  # it does not clip
        return self.pack(linear, scales, zeros)

    def pack(self, linear, scales, zeros):
        layer = self.module.WQLinear_GEMM.from_linear(linear, 4, self.group_size, False, scales, zeros)
        return {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}

    def dequantize(self, tensors):
        groups = (tensors["qweight"], tensors["qzeros"], tensors["scales"].half())
        return self.module.dequantize_gemm(*groups, 4, self.group_size).T


class AwqOfGptqModel(Awq):
    """Weights in the layout of AutoAWQ, by the layer of `gptqmodel`."""

    def __init__(self, group_size=32):
        self.module, self.group_size = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch_awq"), group_size

    def pack(self, linear, scales, zeros):
        settings = (4, self.group_size, False, False, linear.in_features, linear.out_features)
        layer = self.module.AwqTorchLinear(*settings, register_buffers=True)
        layer.pack(linear, scales.T, zeros.T)
        return {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}


INT8 = {"num_bits": 8, "strategy": "channel"}
INT4 = {"num_bits": 4, "strategy": "group"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def packed(group_size, **settings):
    return lambda: CompressedTensors("pack-quantized", **INT4, group_size=group_size, **settings)


CASES = {
    "int8 per channel": (lambda: CompressedTensors("int-quantized", **INT8), "int8", (24, 40)),
    "int8 in bfloat16": (lambda: CompressedTensors("int-quantized", "bfloat16", **INT8), "int8", (21, 33)),
    "int4 in 32": (packed(32), "int4/32", (24, 64)),
    "int4 in 128": (packed(128), "int4/128", (21, 256)),
    "int4 in bfloat16": (packed(32, dtype="bfloat16"), "int4/32", (13, 96)),
    "int4 with zero points": (packed(32, symmetric=False), "int4/32", (24, 64)),
    "int4 with zero points, odd": (packed(128, symmetric=False), "int4/128", (21, 256)),
    "int4 with zero points in float16": (packed(32, symmetric=False, dtype="float16"), "int4/32", (13, 96)),
    "int4 per channel": (
        lambda: CompressedTensors("pack-quantized", num_bits=4, strategy="channel"), "int4/-1", (21, 30),
    ),
    "fp8 per channel": (lambda: CompressedTensors("float-quantized", **FLOAT8), "e4m3/-1", (24, 40)),
    "fp8 in bfloat16": (lambda: CompressedTensors("float-quantized", "bfloat16", **FLOAT8), "e4m3/-1", (21, 33)),
    "nf4": (BitsAndBytes, "nf4/64", (24, 128)),
    "nf4 in bfloat16": (lambda: BitsAndBytes("bfloat16"), "nf4/64", (21, 192)),
    "nf4 in 128": (lambda: BitsAndBytes("float16", 128), "nf4/128", (13, 256)),
    "nf4 with nested scales": (lambda: BitsAndBytes(is_nested=True), "nf4/64", (24, 128)),
    "nf4 with nested scales in bfloat16": (lambda: BitsAndBytes("bfloat16", is_nested=True), "nf4/64", (301, 192)),
    "fp8 in squares": (Squares, "e4m3/128", (256, 384)),
    "mxfp4": (GptOss, "mxfp4/32", (21, 96)),
    "gptq": (GptqModel, "int4/32", (24, 64)),
    "gptq in 128 with an order of inputs": (lambda: GptqModel(group_size=128, desc_act=True), "int4/128", (40, 256)),
    "gptq with zero points": (lambda: GptqModel(has_zero_points=True), "int4/32", (24, 64)),
    "gptq_v2 with zero points": (lambda: GptqModel("gptq_v2", has_zero_points=True), "int4/32", (24, 64)),
    "awq": (Awq, "int4/32", (32, 64)),
    "awq in 128": (lambda: Awq(128), "int4/128", (96, 256)),
    "awq of gptqmodel": (AwqOfGptqModel, "int4/32", (24, 64)),
    "awq of gptqmodel in 128": (lambda: AwqOfGptqModel(128), "int4/128", (40, 256)),
}  # fmt: skip
"""The library, our format, and (outputs, inputs)."""


def to_bytes(array):
    """Bytes of an array of either library."""
    return array.contiguous().view(torch.uint8).numpy().tobytes() if torch.is_tensor(array) else array.tobytes()


def name_dtype(array):
    return str(getattr(array, "dtype", "float32")).removeprefix("torch.")


def like(shape, format, dtype):
    outputs, inputs = shape
    weight = jax.ShapeDtypeStruct((inputs, outputs), dtype)
    return {"dense": {"kernel": jax.eval_shape(lambda x: quantize_array(x, f"{format}(min_size=0)"), weight)}}


def strip(tensors):
    return {name.removeprefix("dense."): x for name, x in tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_weights_of_a_library_are_read_with_its_bits_and_written_with_its_bytes(case, tmp_path):
    make, format, shape = CASES[case]
    library = make()
    given = library.quantize(torch.from_numpy(fresh(*shape)).float())
    theirs = library.dequantize(dict(given))
    (tmp_path / "theirs").mkdir()
    safetensors.save_file(
        {f"dense.{name}": x.contiguous() for name, x in given.items()}, tmp_path / "theirs/model.safetensors"
    )
    method = {"quant_method": "gptq", "checkpoint_format": library.written_as}
    (tmp_path / "theirs/config.json").write_text(json.dumps({"quantization_config": method}))
    state = read_quantized(tmp_path / "theirs", like(shape, format, name_dtype(theirs)))
    ours = state["dense"]["kernel"].dequantize()
    assert name_dtype(ours) == name_dtype(theirs)
    assert to_bytes(ours.T) == to_bytes(theirs)

    write_quantized(state, tmp_path / "ours", format=library.written_as)
    again = strip(safetensors.load_file(tmp_path / "ours/model.safetensors"))
    if "nested" in case:  # their scales are read, and written in float32
        assert again["weight.absmax"].dtype == torch.float32
        given = {"weight": given["weight"], "weight.quant_map": given["weight.quant_map"]}
        again = {name: again[name] for name in given}
    describe = lambda x: (x.dtype, x.shape, to_bytes(x))
    assert {name: describe(x) for name, x in again.items()} == {name: describe(x) for name, x in given.items()}


@pytest.mark.parametrize("case", [case for case in CASES if "nested" not in case])
def test_weights_of_ours_are_read_by_a_library_with_our_bits(case, tmp_path):
    make, format, shape = CASES[case]
    library = make()
    weight = jnp.asarray(fresh(*shape[::-1]), name_dtype(library))
    kernel = quantize_array(weight, f"{format}(min_size=0)")
    if library.written_as in ("gptq", "gptq_v2", "awq"):  # these libraries cast scales to float16
        kernel = dataclasses.replace(kernel, scale=kernel.scale.astype(jnp.float16).astype(jnp.float32))
    if "order" in case:
        order = jnp.asarray(np.random.default_rng().permutation(shape[1]), jnp.int32)
        kernel = dataclasses.replace(kernel, input_order=order)
    write_quantized({"dense": {"kernel": kernel}}, tmp_path / "ours", format=library.written_as)
    if isinstance(library, CompressedTensors):
        library.read_config(json.loads((tmp_path / "ours/config.json").read_text()))
    theirs = library.dequantize(strip(safetensors.load_file(tmp_path / "ours/model.safetensors")))
    ours = kernel.dequantize(name_dtype(theirs))
    assert to_bytes(ours.T) == to_bytes(theirs)
