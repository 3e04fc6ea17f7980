"""The two GPTs are one model."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_policy as jmp
from examples.gpt import GPTConfig, _gpt_linen, _gpt_nnx
from examples.gpt._gpt import causal_attention

CONFIG = GPTConfig(width=16, depth=2, heads=2, context=8)
TOKENS = jnp.array(np.random.default_rng(0).integers(0, 256, (2, 8)))


def linen_params_as_nnx(params: dict) -> dict:
    """The parameters of the linen model under the names of the nnx model."""
    renamed = {}
    for name, value in params.items():
        if name.startswith("blocks_"):
            renamed.setdefault("blocks", {})[int(name.removeprefix("blocks_"))] = value
        else:
            renamed[name] = value
    return renamed


@pytest.mark.exhaustive
def test_linen_and_nnx_compute_the_same_from_the_same_parameters():
    linen_model = _gpt_linen.GPT(CONFIG)
    params = linen_model.init(jax.random.key(0), TOKENS)["params"]
    nnx_model = _gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(nnx_model, linen_params_as_nnx(params))
    expected = linen_model.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(nnx_model(TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_divide_the_width(heads):
    with pytest.raises(ValueError, match=f"heads: {heads} does not divide the width 16, for example: heads=1"):
        GPTConfig(width=16, heads=heads)


@pytest.mark.slow
def test_no_byte_sees_a_later_one():
    model = _gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0))
    logits = model(TOKENS)
    changed = model(TOKENS.at[:, 5].add(1) % 256)
    np.testing.assert_array_equal(logits[:, :5], changed[:, :5])
    assert (logits[:, 5:] != changed[:, 5:]).any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_attention_stays_in_its_dtype_under_jit(dtype):
    heads = jax.random.normal(jax.random.key(0), (1, 4, 2, 8), dtype)
    attended = jax.jit(causal_attention)(heads, heads, heads)
    assert attended.dtype == dtype
    np.testing.assert_array_equal(attended[:, 0], heads[:, 0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_every_matmul_is_in_half_under_a_mixed_policy(policy):
    model = jmp.with_policy(_gpt_nnx.GPT, policy)(CONFIG, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote by themselves
        program = jax.jit(lambda tokens: model(tokens)).lower(TOKENS).as_text()
    products = re.findall(r"stablehlo.dot_general.*-> tensor<[0-9x]*x(\w+)>", program)
    assert len(products) == 6 * CONFIG.depth + 1
    assert set(products) == {"f16" if policy == "mixed_float16" else "bf16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
