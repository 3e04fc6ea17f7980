"""The two GPTs are one model, and both train under every policy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

import jmp_policy as jmp
from examples.gpt import gpt_linen, gpt_nnx
from examples.gpt.model import GPTConfig, TrainerConfig, causal_attention, make_trainer, read_scaling

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
    linen_model = gpt_linen.GPT(CONFIG)
    params = linen_model.init(jax.random.key(0), TOKENS)["params"]
    nnx_model = gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(nnx_model, linen_params_as_nnx(params))
    expected = linen_model.apply({"params": params}, TOKENS)
    np.testing.assert_allclose(nnx_model(TOKENS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_divide_the_width(heads):
    with pytest.raises(ValueError, match=f"heads: {heads} does not divide the width 16, for example: heads=1"):
        GPTConfig(width=16, heads=heads)


@pytest.mark.slow
def test_no_byte_sees_a_later_one():
    model = gpt_nnx.GPT(CONFIG, rngs=nnx.Rngs(0))
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
    model = jmp.with_policy(gpt_nnx.GPT, policy)(CONFIG, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote by themselves
        program = jax.jit(lambda tokens: model(tokens)).lower(TOKENS).as_text()
    products = re.findall(r"stablehlo.dot_general.*-> tensor<[0-9x]*x(\w+)>", program)
    assert len(products) == 6 * CONFIG.depth + 1
    assert set(products) == {"f16" if policy == "mixed_float16" else "bf16"}
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}


WINDOWS = np.random.default_rng(0).integers(97, 101, (4, tiny.MODEL.context + 1)).astype(np.uint8)

# Flax's norms and optax's Adam promote by themselves.
TRAINS = [pytest.mark.optimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


def trains(test):
    for mark in TRAINS:
        test = mark(test)
    return test


POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
FLOAT8 = "float8/4(min_size=0)_from_mixed_bfloat16"


def make(api: str, policy: str, **wishes):
    parsed = jmp.get_policy(policy)
    assert isinstance(parsed, jmp.Policy)
    return make_trainer(api, TrainerConfig(parsed, tiny.MODEL, **wishes))


@trains
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_few_steps_lower_the_loss(api, policy):
    trainer = make(api, policy)
    losses = [trainer.step(WINDOWS) for _ in range(8)]
    after = jax.jit(trainer.loss_fn)(trainer.params, WINDOWS)
    assert losses[0].dtype == np.float32
    assert losses[-1] < losses[0] - 0.05
    assert after < losses[0]
    expected_scale = 2.0**15 if policy == "mixed_float16" else 1.0
    assert read_scaling(trainer.opt_state) == {"loss_scale": expected_scale, "skipped_steps": 0}


@trains
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_restored_state_goes_on_bit_exactly(api):
    straight, resumed = make(api, FLOAT8), make(api, FLOAT8, seed=1)
    straight.step(WINDOWS)
    leaves = jax.tree_util.tree_leaves_with_path(straight.state)
    seen = [leaf for path, leaf in leaves if "amax_history" in jax.tree_util.keystr(path)]
    assert seen
    assert all(history[0] > 0 and history[1] == 0 for history in map(np.array, seen))
    resumed.state = jax.tree.map(lambda leaf: np.array(leaf), straight.state)
    assert straight.step(WINDOWS) == resumed.step(WINDOWS)
    jax.tree.map(np.testing.assert_array_equal, straight.state, resumed.state)


@trains
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_step_that_overflows_is_counted_and_changes_no_parameter(api):
    trainer = make(api, "mixed_float16", loss_scale=jmp.DynamicLossScale(2.0**100, max_loss_scale=2.0**110))
    before = jax.tree.map(np.array, trainer.params)
    trainer.step(WINDOWS)
    assert read_scaling(trainer.opt_state) == {"loss_scale": 2.0**99, "skipped_steps": 1}
    jax.tree.map(np.testing.assert_array_equal, before, trainer.params)


@trains
def test_seeds_give_different_parameters():
    first, second = (jax.tree.leaves(make("nnx", "float32", seed=seed).params) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
