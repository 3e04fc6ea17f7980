"""The folder of a run: its configuration, its lines of metrics, its checkpoints, and who may write to it."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import UserError
from examples.gpt.model import GPTConfig
from examples.gpt.run import (
    LOCK,
    RunConfig,
    append_line,
    dump_config,
    hold_folder,
    new_folder,
    open_checkpoints,
    read_config,
    read_lines,
    restore_checkpoint,
    save_checkpoint,
    truncate_lines,
    write_config,
)

CONFIG = RunConfig("nnx", "float32", 0, ("text.txt",), "00ff", tiny.MODEL, 2, 6)
SIZES = dataclasses.asdict(tiny.MODEL)


def test_a_configuration_survives_json(tmp_path):
    config = RunConfig("linen", "mixed_float16", 3, ("a", "b"), "00ff", GPTConfig(width=8), 4, 10, 7, "data=2,tensor=2")
    for each in (config, CONFIG):
        write_config(tmp_path, each)
        assert read_config(tmp_path) == each


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "abc", "steps is 'abc', for example: 1500"),
        ("steps", math.inf, "steps is inf, for example: 1500"),
        ("steps", 10**30, "steps is 1000"),
        ("steps", True, "steps is True, for example: 1500"),
        ("api", "os", "api is 'os', for example: 'nnx'"),
        ("seed", -1, "seed is -1, for example: 0"),
        ("data", [["text.txt"]], "data is [['text.txt']], for example: ()"),
        ("data_sha256", 3, "data_sha256 is 3"),
        ("batch_size", 1.5, "batch_size is 1.5, for example: 16"),
        ("numerics", "often", "numerics is 'often'"),
        ("mesh", "data=two", "mesh is 'data=two', --mesh data=two: expected sizes of the axes data, fsdp, tensor"),
        ("mesh", {"data": 2}, "mesh is {'data': 2}"),
        ("model", SIZES | {"heads": 0}, "model is {"),
        ("model", SIZES | {"heads": 3}, "heads: 3 does not divide the width 16"),
        ("model", {"heads": 2}, "model is {'heads': 2}, for example: {'width': 64"),
        ("model", "small", "model is 'small', "),
        ("policy", "float61", "policy is 'float61', Unknown dtype"),
        ("policy", {}, "policy is {}, for example: 'params=float32"),
        ("colour", "red", "colour is unknown"),
    ],
)
def test_a_damaged_configuration_is_one_line_that_names_file_and_field(tmp_path, field, value, message):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(dump_config(CONFIG)) | {field: value}))
    with pytest.raises(UserError, match=r"config\.json is not the configuration of a run: .*" + re.escape(message)):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_configuration_that_is_no_json_object_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json is not the configuration of a run: "):
        read_config(tmp_path)


def test_records_come_back_and_numbers_that_json_lacks_are_null(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert read_lines(file) == []
    append_line(file, {"step": 1, "loss": 2.5})
    append_line(file, {"step": 2, "loss": math.nan})
    assert read_lines(file) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]


def test_a_line_broken_by_a_kill_and_later_steps_are_dropped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for step in range(1, 6):
        append_line(file, {"step": step})
    with file.open("a") as lines:
        lines.write('{"step": 6, "lo')
    truncate_lines(file, 3)
    append_line(file, {"step": 4})
    assert [record["step"] for record in read_lines(file)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ["[]", "{}", '{"step": ', "[" * 100_000, '{"step": null}'], ids=range(5))
def test_a_damaged_line_is_an_error_that_names_file_and_line(tmp_path, line):
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "loss": 1.5}}\n{line}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a record of a step .*Remove the line"):
        read_lines(file)


def state_of(value: float, size: int = 3) -> dict:
    scale = jmp.DynamicLossScale(value, min_loss_scale=0.25)
    return {"w": [jnp.full(size, value, jnp.bfloat16), jnp.float32(value)], "scale": scale, "none": None}


def save(folder, state, step: int = 1) -> None:
    manager = open_checkpoints(folder)
    save_checkpoint(manager, step, state)
    manager.close()


def test_states_come_back_with_their_structure_and_dtypes(tmp_path):
    save(tmp_path, state_of(1.5), step=3)
    manager = open_checkpoints(tmp_path)
    assert manager.latest_step() == 3
    restored = restore_checkpoint(manager, 3, state_of(0.5))
    manager.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state_of(1.5))
    for leaf, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(1.5)), strict=True):
        assert leaf.dtype == expected.dtype
        np.testing.assert_array_equal(leaf, expected)


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    save(tmp_path, state_of(1.0))
    for file in (tmp_path / "checkpoints" / "1" / "default").iterdir():
        if file.is_file():
            file.unlink()
    manager = open_checkpoints(tmp_path)
    with pytest.raises(UserError, match=r"cannot restore step 1 of .*checkpoints: \S"):
        restore_checkpoint(manager, 1, state_of(1.0))
    manager.close()


def test_a_damaged_description_of_checkpoints_is_one_line(tmp_path):
    save(tmp_path, state_of(1.0))
    (tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA").write_text("[]")
    with pytest.raises(UserError, match=r"cannot read .*checkpoints: Metadata dict must be a dictionary"):
        open_checkpoints(tmp_path)


def test_an_occupied_folder_is_refused_and_one_that_was_left_empty_is_not(tmp_path):
    with hold_folder(tmp_path):
        pass
    assert new_folder(tmp_path) == tmp_path
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(UserError, match="is not empty: choose another --out"):
        new_folder(tmp_path)


HOLDER = """
import fcntl, sys
lock = open(sys.argv[1], "ab")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="flock is of POSIX")
def test_a_folder_that_another_process_holds_is_refused_until_that_one_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        in_use = "is in use by another process: wait for it, or choose another --out"
        with pytest.raises(UserError, match=in_use), hold_folder(tmp_path):
            pass
        holder.kill()
    with hold_folder(tmp_path):
        pass


def test_a_disk_that_was_full_at_the_configuration_leaves_a_folder_for_a_new_run(tmp_path, monkeypatch):
    def fill_disk(file, text, **_):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    folder = new_folder(tmp_path / "run")
    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(UserError, match="no space left on device"), hold_folder(folder):
        write_config(folder, CONFIG)
    monkeypatch.undo()
    again = new_folder(tmp_path / "run")
    with hold_folder(again):
        write_config(again, CONFIG)
    assert read_config(again) == CONFIG
