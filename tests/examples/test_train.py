"""Training runs: begun, stopped, resumed, and refused."""

import dataclasses
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import tiny

from examples.gpt import (
    GPTConfig,
    Recommendation,
    UserError,
    _open_run as open_module,
    _train as train_module,
    train,
)
from examples.gpt._mesh import MeshShape
from examples.gpt._run_folder import LOCK, RunConfig, RunFolder, hold_folder
from examples.gpt._trainer import make_trainer
from jmp_policy import StaticLossScale, get_policy
from jmp_policy.cli.doctor import Speedup, StepTime

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def stop_after(monkeypatch):
    """Presses Ctrl-C in the middle of a step."""

    def press(step: int) -> None:
        sample = train_module.sample_batch

        def sample_and_press(*args, **kwargs):
            if kwargs["step"] == step - 1:
                signal.raise_signal(signal.SIGINT)
            return sample(*args, **kwargs)

        monkeypatch.setattr(train_module, "sample_batch", sample_and_press)

    return press


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_leaves_metrics_plot_and_checkpoint_and_tells_its_losses(folder):
    result, text = tiny.run(folder)
    assert result.finished
    assert result.step == 6
    assert result.bigram < result.unigram < 8
    assert 0 < result.validation < 9
    *steps, last = tiny.read_records(folder / "run")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].keys() == {"step", "loss", "loss_scale", "skipped_steps"}
    assert last == {"step": 6, "validation_loss": result.validation}
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["6"]
    assert "step 6: validation loss" in text
    assert json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8")) == {
        "policy": "float32",
        "step": 6,
        "matmul_shares": {},  # a table multiplies nothing
        "findings": {},
        "residual_bytes": result.summary.facts.residual_bytes,
        "float32_residual_bytes": result.summary.facts.residual_bytes,
        "loss_scale": {
            "first": 1.0,
            "last": 1.0,
            "lowest": 1.0,
            "highest": 1.0,
            "growths": 0,
            "backoffs": 0,
            "skipped_steps": 0,
            "skipped": [],
        },
    }


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_the_loss_scale_moves_within_a_short_run_and_a_resumed_one_tells_of_all_of_it(folder, monkeypatch):
    monkeypatch.setattr(open_module, "GROWTH_PERIOD", 2)
    straight, text = tiny.run(folder, policy="mixed_float16")
    assert "scale   2^15 at first, doubled by 2 finite steps in a row, halved by an overflow" in text
    scale = straight.summary.scale
    assert (scale.first, scale.last, scale.growths, scale.backoffs) == (2.0**15, 2.0**18, 3, 0)
    tiny.run(folder, policy="mixed_float16", steps=3, out=folder / "resumed")
    monkeypatch.setattr(open_module, "GROWTH_PERIOD", 5)  # a run keeps what it was begun with
    resumed, _ = tiny.run(folder, policy=None, resume=True, out=folder / "resumed")
    assert resumed.summary == straight.summary
    assert (folder / "resumed" / "summary.json").read_bytes() == (folder / "run" / "summary.json").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_of_an_older_version_goes_on_as_it_was_begun(folder, monkeypatch):
    monkeypatch.setattr(open_module, "GROWTH_PERIOD", 2)
    tiny.run(folder, policy="mixed_float16", steps=1)
    file = folder / "run" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    assert config.pop("growth_period") == 2
    file.write_text(json.dumps(config))
    (folder / "run" / "summary.json").unlink()
    resumed, text = tiny.run(folder, policy=None, steps=6, resume=True)
    assert "doubled by 2,000 finite steps in a row" in text
    assert resumed.summary.scale.highest == 2.0**15


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_stopped_run_tells_what_its_policy_did_so_far(folder, stop_after):
    stop_after(4)
    stopped, _ = tiny.run(folder)
    assert (stopped.finished, stopped.step, stopped.summary.step) == (False, 4, 4)
    assert json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))["step"] == 4
    assert (folder / "run" / "loss.png").exists()


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_ctrl_c_saves_and_resume_continues_bit_exactly(folder, stop_after, monkeypatch, api):
    wishes = {"api": api, "policy": "mixed_float16"}
    straight, _ = tiny.run(folder, out=folder / "straight", **wishes)
    stop_after(4)
    stopped, _ = tiny.run(folder, **wishes)
    assert (stopped.finished, stopped.step) == (False, 4)
    assert math.isnan(stopped.validation)
    monkeypatch.undo()
    # As if the run had got further than its checkpoint, and been killed in the middle of a line.
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    resumed, _ = tiny.run(folder, resume=True, policy=None, steps=None, data=())
    assert resumed.validation == straight.validation
    assert tiny.read_records(folder / "run") == tiny.read_records(folder / "straight")


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_finished_run_can_be_continued_and_goes_where_a_longer_one_goes(folder):
    tiny.run(folder, steps=3, out=folder / "longer")
    longer, _ = tiny.run(folder, steps=6, out=folder / "longer", resume=True)
    straight, _ = tiny.run(folder, steps=6)
    assert longer.validation == straight.validation
    again, _ = tiny.run(folder, steps=None, out=folder / "longer", resume=True)
    assert dataclasses.replace(again, folder=straight.folder) == straight
    with pytest.raises(UserError, match="is at step 6 already, past --steps 2: give it more"):
        tiny.run(folder, steps=2, out=folder / "longer", resume=True)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_killed_before_its_first_checkpoint_begins_again(folder):
    straight, _ = tiny.run(folder)
    shutil.rmtree(folder / "run" / "checkpoints")
    resumed, _ = tiny.run(folder, resume=True)
    assert resumed == straight


@pytest.mark.usefixtures("table")
def test_resuming_with_something_else_is_an_error_and_changes_nothing(folder):
    tiny.run(folder, steps=1)
    before = contents(folder / "run")
    (folder / "other.txt").write_text("other text " * 100)
    for wishes, message in [
        ({"policy": "mixed_float16"}, "run was trained with policy float32, not mixed_float16: resume it"),
        ({"api": "linen"}, "run was trained with api nnx, not linen"),
        ({"seed": 1}, "run was trained with seed 0, not 1"),
        ({"data": (str(folder / "other.txt"),)}, r"was trained on other bytes than those of .*other\.txt"),
    ]:
        with pytest.raises(UserError, match=message):
            tiny.run(folder, resume=True, steps=2, **wishes)
    other_model = dataclasses.replace(tiny.options(folder, resume=True), model=GPTConfig(width=32))
    with pytest.raises(UserError, match=r"was trained with model GPTConfig\(width=16, .*\), not GPTConfig\(width=32, "):
        train(other_model, tiny.silent_console())
    assert contents(folder / "run") == before


def test_a_checkpoint_of_another_model_is_an_error_and_changes_nothing(folder, monkeypatch):
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: tiny.TableTrainer(config))
    tiny.run(folder, steps=1)
    monkeypatch.undo()  # now it is a GPT
    before = contents(folder / "run")
    with pytest.raises(UserError, match=r"cannot restore step 1 of .*checkpoints"):
        tiny.run(folder, resume=True, steps=2)
    assert contents(folder / "run") == before


def test_an_occupied_folder_is_refused_and_left_as_it_is(folder):
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(UserError, match="run is not empty: continue a run with --resume, or choose another --out"):
        tiny.run(folder)
    assert contents(folder / "run") == {"thesis.txt": b"ten years of work"}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"policy": "float61"}, "--policy: Unknown dtype .*'float61'"),
        ({"data": ("no/such/file",)}, "--data no/such/file does not exist"),
        ({"resume": True}, "no run to resume in .*run: leave --resume out to begin one"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_written(folder, wishes, message):
    with pytest.raises(UserError, match=message):
        tiny.run(folder, **wishes)
    assert not (folder / "run").exists()


def test_a_folder_that_cannot_be_made_is_an_error(folder):
    with pytest.raises(UserError, match=r"cannot write to .*text\.txt/run: not a directory"):
        tiny.run(folder, out=folder / "text.txt" / "run")


def test_a_folder_that_cannot_be_written_is_an_error(folder, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"cannot write to .*run: permission denied"):
        tiny.run(folder)


COUNT = "must be an integer from 1 to 4294967295, got"
CONFIG = RunConfig("nnx", get_policy("float32"), 0, ("text.txt",), "00ff", tiny.MODEL, 2, 1e-3, 6)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "abc", f"steps: {COUNT} 'abc'"),
        ("steps", math.inf, f"steps: {COUNT} inf"),
        ("steps", 10**30, f"steps: {COUNT} 1000"),
        ("steps", True, f"steps: {COUNT} True"),
        ("api", "os", "api: must be 'nnx' or 'linen', got 'os'"),
        ("seed", -1, "seed: must be an integer from 0 to 4294967295, got -1"),
        ("data", [["text.txt"]], "data: must be a list of strings, got [['text.txt']]"),
        ("data", "text.txt", "data: must be a list of strings, got 'text.txt'"),
        ("data_sha256", 3, "data_sha256: must be a string, got 3"),
        ("batch_size", 1.5, f"batch_size: {COUNT} 1.5"),
        ("learning_rate", math.nan, "learning_rate: must be a positive finite number, got nan"),
        ("growth_period", 0, f"growth_period: {COUNT} 0"),
        ("numerics", "often", f"numerics: {COUNT} 'often'"),
        ("first_scale", -1.0, "first_scale: must be a positive finite number, got -1.0"),
        ("mesh", {"data": "two", "fsdp": 1, "tensor": 1}, f"mesh: data: {COUNT} 'two'"),
        ("mesh", "data=2", "mesh: must be a JSON object, got 'data=2'"),
        ("model", {**dataclasses.asdict(tiny.MODEL), "heads": 0}, f"model: heads: {COUNT} 0"),
        ("model", {**dataclasses.asdict(tiny.MODEL), "heads": 3}, "model: heads: 3 does not divide the width 16"),
        ("model", {"heads": 2}, f"model: width: {COUNT} None"),
        ("policy", {}, "policy: A policy's config has the keys"),
        ("policy_map", {"rules": 3, "default": None}, "policy_map: "),
        ("colour", "red", "unexpected keyword argument 'colour'"),
    ],
)
def test_a_damaged_configuration_is_an_error_that_names_file_and_field(tmp_path, field, value, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_json() | {field: value}))
    with pytest.raises(UserError, match=r"config\.json is not the configuration of a run: .*" + re.escape(message)):
        RunFolder(tmp_path).read_config()


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff"])
def test_a_configuration_that_is_no_json_object_is_an_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"config\.json is not the configuration of a run: "):
        RunFolder(tmp_path).read_config()


def test_a_model_that_the_data_of_a_run_is_too_short_for_is_refused(folder):
    corpus = open_module.load_corpus([folder / "text.txt"])
    config = dataclasses.replace(CONFIG, data_sha256=corpus.sha256, model=GPTConfig(context=10**6))
    with pytest.raises(UserError, match=r"text\.txt holds only \d+ bytes: training needs at least"):
        open_module._load_same(RunFolder(folder), (str(folder / "text.txt"),), config)


@pytest.mark.usefixtures("table")
def test_damaged_logs_are_refused_before_a_run_goes_on(folder):
    tiny.run(folder, steps=1, numerics=1)
    damages = {
        "numerics.jsonl": ('{"step": 1, "rows": 3}', "Line 2 holds no statistics of a step"),
        "metrics.jsonl": ('{"step": 1, "loss": []}', "line 3: loss: must be a finite number"),
    }
    for file, (line, message) in damages.items():
        with (folder / "run" / file).open("a") as log:
            log.write(f"{line}\n")
        with pytest.raises(UserError, match=rf"{file}.*{message}"):
            tiny.run(folder, steps=2, resume=True)
    assert RunFolder(folder / "run").read_config().steps == 1


@pytest.mark.usefixtures("table")
def test_a_finished_run_without_its_metrics_has_no_validation_loss(folder):
    tiny.run(folder, steps=1)
    (folder / "run" / "metrics.jsonl").unlink()
    result, _ = tiny.run(folder, steps=1, resume=True)
    assert result.finished
    assert math.isnan(result.validation)


OWN_FILES = ("config.json", "summary.tmp", "loss.png", "metrics.jsonl", "numerics.html", ".lock", "checkpoints/1/x")


@pytest.mark.parametrize("name", OWN_FILES)
def test_resuming_never_writes_through_a_link(folder, name):
    (folder / "run" / "checkpoints" / "1").mkdir(parents=True)
    RunFolder(folder / "run").write_config(CONFIG)
    outside, file = folder / "outside", folder / "run" / name
    text = (folder / "run" / "config.json").read_text(encoding="utf-8")
    for make_link in (file.symlink_to, file.hardlink_to):
        outside.write_text(text, encoding="utf-8")
        file.unlink(missing_ok=True)
        make_link(outside)
        with pytest.raises(UserError, match=r"is a link or a special file, and .* would write beyond .*run: resume"):
            tiny.run(folder, steps=2, resume=True)
        assert outside.read_text(encoding="utf-8") == text


def test_resuming_never_writes_where_a_link_leads_to_nothing(folder):
    (folder / "run").mkdir()
    RunFolder(folder / "run").write_config(CONFIG)
    (folder / "run" / "origins.tmp").symlink_to(folder / "nothing")
    with pytest.raises(UserError, match=r"cp -rL .*run copy"):
        tiny.run(folder, steps=2, resume=True)
    assert not (folder / "nothing").exists()


def test_resuming_never_writes_to_checkpoints_elsewhere(folder):
    (folder / "run").mkdir()
    RunFolder(folder / "run").write_config(CONFIG)
    (folder / "elsewhere").mkdir()
    (folder / "run" / "checkpoints").symlink_to(folder / "elsewhere")
    with pytest.raises(UserError, match="checkpoints is a link or a special file, and training would write beyond"):
        tiny.run(folder, steps=2, resume=True)
    assert contents(folder / "elsewhere") == {}


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


@pytest.mark.usefixtures("table")
def test_a_run_is_held_while_it_trains_and_no_longer(folder, monkeypatch):
    begin = train_module.make_trainer

    def resume_meanwhile(api, config):
        with pytest.raises(UserError, match="is in use by another process"), hold_folder(folder / "run"):
            pass
        return begin(api, config)

    monkeypatch.setattr(train_module, "make_trainer", resume_meanwhile)
    tiny.run(folder, steps=1)
    tiny.run(folder, steps=2, resume=True)
    with hold_folder(folder / "run"):
        pass


@pytest.mark.usefixtures("table")
def test_a_file_that_cannot_be_written_while_training_is_one_line(folder):
    tiny.run(folder, steps=1)
    (folder / "run" / "loss.png").unlink()
    (folder / "run" / "loss.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write to .*loss\.png: is a directory"):
        tiny.run(folder, steps=2, resume=True)


def test_a_configuration_survives_json(tmp_path):
    policy = open_module._parse_policy("params=float32,compute=float16,output=float32")
    config = RunConfig("nnx", policy, 3, ("a", "b"), "00ff", GPTConfig(width=8), 4, 1e-3, 10, growth_period=7)
    config = dataclasses.replace(config, mesh=MeshShape(data=2, tensor=2))
    RunFolder(tmp_path).write_config(config)
    assert RunFolder(tmp_path).read_config() == config


@pytest.mark.usefixtures("table")
def test_runs_without_out_are_numbered_and_the_last_one_is_resumed(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="no run to resume in runs/: name its folder with --out"):
        tiny.run(folder, out=None, resume=True)
    first, _ = tiny.run(folder, out=None, steps=1)
    second, _ = tiny.run(folder, out=None, steps=1, seed=1)
    assert [str(result.folder) for result in (first, second)] == ["runs/001", "runs/002"]
    for copy in ("003 copy", "3.old", "copy"):  # beside it, as a file manager names them
        shutil.copytree("runs/001", f"runs/{copy}")
    resumed, _ = tiny.run(folder, out=None, steps=2, resume=True)
    assert (str(resumed.folder), resumed.step) == ("runs/002", 2)


@pytest.mark.usefixtures("table")
def test_the_default_policy_is_what_the_doctor_recommends(folder, monkeypatch):
    recommendation = Recommendation("mixed_bfloat16", "it was made up")
    monkeypatch.setattr(open_module, "diagnose", lambda **_: SimpleNamespace(recommendation=recommendation))
    _, text = tiny.run(folder, policy=None, steps=1)
    assert "The doctor recommends mixed_bfloat16: it was made up." in text
    assert str(RunFolder(folder / "run").read_config().policy) == "params=float32,compute=bfloat16,output=bfloat16"


@pytest.mark.usefixtures("table")
def test_on_a_device_for_float32_half_precision_is_shown_all_the_same_and_said_to_be_no_faster(folder, monkeypatch):
    steps = {"float16": StepTime(1.0, Speedup(0.83, 0.8, 0.9))}
    diagnosis = SimpleNamespace(recommendation=Recommendation("float32", "it was made up"), steps=steps)
    monkeypatch.setattr(open_module, "diagnose", lambda **_: diagnosis)
    _, text = tiny.run(folder, policy=None, steps=1)
    assert "float32 would be as fast or faster here: a pass in float16 runs at 0.83x its speed." in text
    assert "--policy float32 trains so" in text
    assert RunFolder(folder / "run").read_config().policy.name == "mixed_float16"


@pytest.mark.slow
def test_a_run_that_only_overflows_says_that_it_is_stuck_and_shows_since_when(folder, monkeypatch):
    monkeypatch.setattr(train_module, "make_trainer", make_overflowing_trainer)
    stuck = r"Training is stuck: the last 12 steps were skipped.*Step 12 was skipped\. .* in the backward pass"
    with pytest.raises(FloatingPointError, match=stuck):
        tiny.run(folder, steps=12, policy="mixed_float16")
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def make_overflowing_trainer(api, config):
    return make_trainer(api, dataclasses.replace(config, loss_scale=StaticLossScale(2.0**127)))


def contents(folder) -> dict[str, bytes]:
    """Every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
