"""Models of `transformers` whose quantized weights we wrote: it loads them by our config, with equal bits."""

import json

import jax.numpy as jnp
import pytest
from quant_reference import fresh

from jmp_policy.contrib import write_quantized
from jmp_policy.quant import Layout, quantize_array

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow


def make_llama():
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=40))


def make_gpt_oss():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, vocab_size=40, layer_types=["full_attention"])
    return transformers.GptOssForCausalLM(config)


LINEAR, EXPERTS, LEFT_OUT = (
    "_proj.weight",
    ("experts.gate_up_proj", "experts.down_proj"),
    ("o_proj.weight", "head.weight"),
)
MODELS = {
    "int8": ("compressed-tensors", make_llama, LINEAR),
    "int4/32": ("compressed-tensors", make_llama, LINEAR),
    "e4m3/-1": ("compressed-tensors", make_llama, LINEAR),
    "e4m3/128": ("fp8", make_llama, LINEAR),
    "nf4/64": ("bitsandbytes", make_llama, LINEAR),
    "mxfp4/32": ("mxfp4", make_gpt_oss, EXPERTS),
}
"""By our format: its layout, the model, and the ends of the names of quantized weights."""


@pytest.mark.parametrize("format", MODELS)
def test_transformers_loads_what_was_written(format, tmp_path):
    written_as, make, endings = MODELS[format]
    if written_as in ("compressed-tensors", "bitsandbytes"):
        for library in (written_as.replace("-", "_"), "accelerate"):
            pytest.importorskip(library)
    model = make()
    state, written, floats = {}, {}, {}
    for name, parameter in model.state_dict().items():
        array = jnp.asarray(fresh(*parameter.shape), jnp.float32)
        if name.endswith(LEFT_OUT):
            state[f"{name.removesuffix('.weight')}/kernel"] = array.T  # by this path, the config leaves it out
            floats[name] = array
        elif name.endswith(endings):  # experts of gpt-oss are (experts, inputs, outputs)
            matrix = array.T if array.ndim == 2 else array
            layout = Layout((matrix.shape[-2],), 1)
            state[name] = written[name] = quantize_array(matrix, f"{format}(min_size=0)", layout)
        else:
            state[name] = floats[name] = array
    names = {"(.*)/kernel": r"\1.weight", "(.*)": r"\1"}
    write_quantized(state, tmp_path, format=written_as, names=names)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"dequantize": True, "run_compressed": False}  # kernels need a GPU
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | config))

    loaded = type(model).from_pretrained(tmp_path)
    for name, weight in written.items():
        theirs = loaded.get_parameter(name).data
        if written_as == "bitsandbytes":
            functional, packed = pytest.importorskip("bitsandbytes.functional"), loaded.get_parameter(name)
            theirs = functional.dequantize_4bit(packed.data, packed.quant_state)
        ours = weight.dequantize()
        assert (ours if ours.ndim == 3 else ours.T).tobytes() == theirs.contiguous().numpy().tobytes()
    for name, array in floats.items():
        assert array.tobytes() == loaded.get_parameter(name).detach().numpy().tobytes()
        is_linear = (
            type(loaded.get_submodule(name.rpartition(".")[0])) is torch.nn.Linear
        )  # not bitsandbytes' Linear4bit
        assert is_linear or not name.endswith(LEFT_OUT)
    assert len(written) == (2 if written_as == "mxfp4" else 6)
