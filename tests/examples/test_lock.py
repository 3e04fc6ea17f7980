"""The dtypes of the train steps, which are in files."""

import cProfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import examples.gpt
import jmp_policy as jmp
from examples.gpt.model import GPTConfig, TrainerConfig, make_trainer

FOLDER = Path(examples.gpt.__file__).parent
WINDOWS = jax.ShapeDtypeStruct((8, 65), jnp.uint8)


@pytest.mark.usefixtures("standard_promotion", "no_default_precision")
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_the_train_step_has_the_dtypes_of_its_lock(api):
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    make_trainer(api, TrainerConfig(policy)).assert_locked(FOLDER / f"train_step_{api}.lock", WINDOWS)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_12_layers_have_as_many_lines_as_two_and_cost_little_more_than_their_trace(api):
    policy, windows = jmp.get_policy("mixed_bfloat16"), jax.ShapeDtypeStruct((2, 17), jnp.uint8)

    def make_call(depth):
        trainer = make_trainer(api, TrainerConfig(policy, GPTConfig(width=16, depth=depth, heads=2, context=16)))
        state = (trainer.state,) if api == "linen" else (trainer.model, trainer.optimizer)
        return trainer._train_step, (*state, windows)

    step, args = make_call(2)
    lines = len(str(jmp.numerics.lock(step)(*args)).splitlines())
    traced = count_calls(lambda: jax.jit(lambda *args: step(*args)).trace(*args))
    assert count_calls(lambda: jmp.numerics.lock(step)(*args)) <= 1.5 * traced
    step, args = make_call(12)
    assert len(str(jmp.numerics.lock(step)(*args)).splitlines()) == lines <= 300


def count_calls(run):
    """Counts calls of functions, with no traces left over from before."""
    jax.clear_caches()
    with cProfile.Profile() as profile:
        run()
    return sum(entry.callcount for entry in profile.getstats())
