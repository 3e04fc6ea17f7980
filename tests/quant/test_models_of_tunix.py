"""Language models of Tunix, whose modules multiply by their own weights. `pip install google-tunix` is 1.5 GB."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp
from jmp_policy._jaxpr import walk

pytest.importorskip("tunix")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.* layers with weights compute in the dtype"),
]

SIZES = {"embed_dim": 128, "hidden_dim": 256, "num_heads": 4, "head_dim": 64}
LLAMA = {**SIZES, "num_layers": 2, "vocab_size": 256, "num_kv_heads": 2, "rope_theta": 10_000, "norm_eps": 1e-5}
GEMMA = {**SIZES, "num_layers": 2, "num_embed": 256, "num_kv_heads": 1, "sliding_window_size": 8}
MODELS = {
    "llama3": ("llama3", "Llama3", LLAMA),
    "qwen2": ("qwen2", "Qwen2", {**LLAMA, "use_tied_embedding": True}),
    "qwen3": ("qwen3", "Qwen3", {**LLAMA, "use_tied_embedding": True}),
    "qwen3, experts": ("qwen3", "Qwen3", {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma3": ("gemma3", "Gemma3", {**GEMMA, "param_dtype": jnp.float32}),
    "gemma4": ("gemma4", "Gemma4", {**GEMMA, "global_key_size": 64}),
    "gemma4, experts": (
        "gemma4",
        "Gemma4",
        {**GEMMA, "global_key_size": 64, "enable_moe": True, "num_experts": 4, "num_experts_per_tok": 2}
        | {"expert_dim": 128, "moe_dense_hidden_dim": 256},
    ),
}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)), jnp.int32)
INPUTS = (TOKENS, jnp.broadcast_to(jnp.arange(16), (2, 16)), None, jnp.ones((2, 16, 16), bool))
REARRANGED = "gating_einsum"
"""A weight that is transposed and reshaped before it multiplies, and so is not stored."""


def make(name):
    file, kind, sizes = MODELS[name]
    module = importlib.import_module(f"tunix.models.{file}.model")
    return getattr(module, kind)(module.ModelConfig(**sizes), rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # as Tunix writes its arithmetic
        yield


def list_wide_products(call, *args):
    """Lists the matmuls whose operands are not int8, but for attention, routing and positions."""
    wide, count = [], 0
    for step in walk(jax.make_jaxpr(call)(*args).jaxpr, live_only=True):
        if step.name not in ("dot_general", "ragged_dot_general"):
            continue
        left, right = (operand.aval for operand in step.operands[:2])
        has_batch = step.name == "dot_general" and bool(step.eqn.params["dimension_numbers"][1][0])
        if left.dtype == right.dtype == jnp.int8:
            count += 1
        elif not has_batch and left.dtype != jnp.int32:
            wide.append((left, right))
    assert count > 0
    return wide


@pytest.mark.parametrize("name", MODELS)
def test_all_matmuls_by_weights_are_quantized_and_stored_numbers_give_the_same_logits(name):
    policy = "int8(min_size=0)_from_mixed_bfloat16"
    model = jmp.with_policy(make(name), policy)
    explanation = jmp.explain(model, *INPUTS)
    rows = [row for row in explanation.rows if row.is_weight]
    assert {row.quantization for row in rows} == {"int8(min_size=0)"}
    assert {row.path for row in rows if row.layout is None} == {row.path for row in rows if REARRANGED in row.path}
    graph, state = nnx.split(model)
    assert list_wide_products(lambda state: nnx.merge(graph, state)(*INPUTS)[0], state) == []
    stored = jmp.quant.quantize(model, policy, explanation=explanation)
    np.testing.assert_array_equal(stored(*INPUTS)[0], model(*INPUTS)[0])
