"""Both trainers, under every policy."""

import jax
import numpy as np
import pytest
from tiny import MODEL

import jmp_policy as jmp
from examples.gpt._gpt import TrainerConfig
from examples.gpt._trainer import make_trainer, read_scaling_figures

WINDOWS = np.random.default_rng(0).integers(97, 101, (4, MODEL.context + 1)).astype(np.uint8)

# Flax's norms and optax's Adam promote by themselves.
pytestmark = [pytest.mark.optimized, pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]
FLOAT8 = "float8/4(min_size=0)_from_mixed_bfloat16"


def make(api: str, policy: str, **wishes):
    parsed = jmp.get_policy(policy)
    assert isinstance(parsed, jmp.Policy)
    return make_trainer(api, TrainerConfig(parsed, MODEL, **wishes))


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
    assert read_scaling_figures(trainer) == {"loss_scale": expected_scale, "skipped_steps": 0}


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


@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_step_that_overflows_is_counted_and_changes_no_parameter(api):
    trainer = make(api, "mixed_float16", loss_scale=jmp.DynamicLossScale(2.0**100, max_loss_scale=2.0**110))
    before = jax.tree.map(np.array, trainer.params)
    trainer.step(WINDOWS)
    assert read_scaling_figures(trainer) == {"loss_scale": 2.0**99, "skipped_steps": 1}
    jax.tree.map(np.testing.assert_array_equal, before, trainer.params)


def test_seeds_give_different_parameters():
    first, second = (jax.tree.leaves(make("nnx", "float32", seed=seed).params) for seed in (0, 1))
    assert any((a != b).any() for a, b in zip(first, second, strict=True))
