"""Checkpoints come back bit for bit, or say in one line why not."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_policy as jmp
from examples.gpt import UserError
from examples.gpt._checkpoints import Checkpoints


def state_of(value: float, size: int = 3) -> dict:
    scale = jmp.DynamicLossScale(value, min_loss_scale=0.25)
    return {"w": [jnp.full(size, value, jnp.bfloat16), jnp.float32(value)], "scale": scale, "none": None}


def test_states_come_back_with_their_structure_and_dtypes(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state_of(1.5))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 3
        restored = checkpoints.restore(3, state_of(0.5))
    assert jax.tree.structure(restored) == jax.tree.structure(state_of(1.5))
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(1.5)), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_the_last_two_checkpoints_are_kept_and_none_is_written_twice(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step is None
        for step in (1, 2, 3, 3):
            checkpoints.save(step, state_of(float(step)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


@pytest.mark.slow
def test_a_checkpoint_that_was_not_finished_is_not_taken_for_one(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1.0))
        checkpoints.save(2, state_of(2.0))
    # What a kill in the middle leaves: the temporary folder that was about to be renamed.
    shutil.move(tmp_path / "2", tmp_path / "2.orbax-checkpoint-tmp")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 1
        assert checkpoints.restore(1, state_of(0.5))["w"][1] == 1.0
        checkpoints.save(2, state_of(2.0))


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (state_of(1.0, size=4), r"w\.0 is bfloat16\[3\] there, bfloat16\[4\] here"),
        ({"v": jnp.ones(3)}, r"scale\.counter is int32\[\] there, missing here"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(tmp_path, other, difference):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1.0))
    message = f"cannot restore step 1 of .*: it is of another model: {difference}"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(1, other)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1.0))
    for file in (tmp_path / "1" / "default").iterdir():
        if file.is_file():
            file.unlink()
    message = r"cannot restore step 1 of .*: it is damaged"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(1, state_of(1.0))


def test_a_checkpoint_without_the_bytes_of_an_array_is_an_error(tmp_path):
    state = {"table": jnp.arange(2.0**16).reshape(2**8, 2**8)}  # large enough for a file of its own
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    max((tmp_path / "1").rglob("*/d/*"), key=lambda file: file.stat().st_size).unlink()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=r"cannot restore step 1 of .*: \w+"):
        checkpoints.restore(1, state)


def test_a_damaged_description_of_a_checkpoint_is_an_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(1.0))
    (tmp_path / "1" / "default" / "_METADATA").write_text("[]")
    message = r"cannot restore step 1 of .*: 'list' object has no attribute"
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match=message):
        checkpoints.restore(1, state_of(1.0))
    (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(UserError, match=f"cannot read {tmp_path}: Metadata dict must be a dictionary"):
        Checkpoints(tmp_path)
