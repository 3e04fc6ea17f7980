"""The dtypes of the train steps, which are in files."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import examples.gpt
import jmp_policy as jmp
from examples.gpt.model import TrainerConfig, make_trainer

FOLDER = Path(examples.gpt.__file__).parent
WINDOWS = jax.ShapeDtypeStruct((8, 65), jnp.uint8)


@pytest.mark.usefixtures("standard_promotion", "no_default_precision")
@pytest.mark.parametrize("api", ["linen", "nnx"])
def test_the_train_step_has_the_dtypes_of_its_lock(api):
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    make_trainer(api, TrainerConfig(policy)).assert_locked(FOLDER / f"train_step_{api}.lock", WINDOWS)
