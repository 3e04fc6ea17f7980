"""Training runs: begun, stopped, resumed, and refused."""

import dataclasses
import math
import shutil
import signal

import jax
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import UserError, train as train_module
from examples.gpt.devices import StopRequest
from examples.gpt.model import GPTConfig, make_trainer
from examples.gpt.run import RunConfig, append_line, hold_folder, read_config, write_config
from examples.gpt.train import draw_loss, parse_policy

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
    text = tiny.run(folder)
    *steps, last = tiny.read_records(folder / "run")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].keys() == {"step", "loss", "loss_scale", "skipped_steps"}
    assert last.keys() == {"step", "validation_loss"}
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["6"]
    for line in (
        f"step 6: validation loss {last['validation_loss']:.3f}",
        "skipped steps  0 of 6",
        "run/ holds checkpoints, config.json, loss.png, metrics.jsonl",
        "does not beat the bigram baseline (",
    ):
        assert line in text


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_the_loss_scale_changes_within_a_short_run_and_a_resumed_one_tells_of_all_of_it(folder, monkeypatch):
    monkeypatch.setattr(train_module, "GROWTH_PERIOD", 2)
    tiny.run(folder, policy="mixed_float16", steps=3)
    text = tiny.run(folder, policy=None, resume=True)
    assert "loss scale     32768 to 262144, between 32768 and 262144" in text


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_ctrl_c_saves_and_resume_continues_bit_exactly(folder, stop_after, monkeypatch, api):
    wishes = {"api": api, "policy": "mixed_float16"}
    tiny.run(folder, out=folder / "straight", **wishes)
    stop_after(4)
    text = tiny.run(folder, **wishes)
    assert f"stopped and saved at step 4: continue with --resume --out {folder / 'run'}" in text
    assert (folder / "run" / "loss.png").exists()
    monkeypatch.undo()
    # As if the run had got further than its checkpoint, and been killed in the middle of a line.
    with (folder / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 0.0}\n{"step": 6, "lo')
    tiny.run(folder, resume=True, policy=None, steps=None, data=None)
    assert tiny.read_records(folder / "run") == tiny.read_records(folder / "straight")


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_finished_run_can_be_continued_and_goes_where_a_longer_one_goes(folder):
    tiny.run(folder, steps=2)
    tiny.run(folder, steps=4, resume=True)
    longer = tiny.read_records(folder / "run")
    tiny.run(folder, steps=4, out=folder / "straight")
    assert [record for record in longer if "loss" in record] == tiny.read_records(folder / "straight")[:-1]
    assert longer[-1] == tiny.read_records(folder / "straight")[-1]
    with pytest.raises(UserError, match="is at step 4 already, past --steps 2: give it more"):
        tiny.run(folder, steps=2, resume=True)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_killed_before_its_first_checkpoint_begins_again(folder):
    tiny.run(folder)
    before = tiny.read_records(folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints")
    tiny.run(folder, resume=True)
    assert tiny.read_records(folder / "run") == before


@pytest.mark.usefixtures("table")
def test_resuming_with_something_else_is_an_error_and_changes_nothing(folder):
    tiny.run(folder, steps=1)
    before = tiny.read_contents(folder / "run")
    (folder / "other.txt").write_text("other text " * 100)
    policy = "params=float32,compute=float32,output=float32, not params=float32,compute=float16,output=float16"
    for wishes, message in [
        ({"policy": "mixed_float16"}, f"run was trained with policy {policy}: resume it"),
        ({"api": "linen"}, "run was trained with api nnx, not linen"),
        ({"seed": 1}, "run was trained with seed 0, not 1"),
        ({"data": (str(folder / "other.txt"),)}, r"was trained on other bytes than those of .*other\.txt"),
        ({"model": GPTConfig(width=32)}, r"with model GPTConfig\(width=16, .*\), not GPTConfig\(width=32, "),
    ]:
        with pytest.raises(UserError, match=message):
            tiny.run(folder, resume=True, **{"steps": 2, "api": "nnx", "seed": 0} | wishes)
    assert tiny.read_contents(folder / "run") == before


def test_a_checkpoint_of_another_model_is_an_error_and_changes_nothing(folder, monkeypatch):
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: tiny.TableTrainer(config))
    tiny.run(folder, steps=1)
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: Other())
    before = tiny.read_contents(folder / "run")
    with pytest.raises(UserError, match=r"cannot restore step 1 of .*checkpoints"):
        tiny.run(folder, resume=True, steps=2)
    assert tiny.read_contents(folder / "run") == before


class Other:
    """A trainer of another model."""

    def __init__(self):
        self.params = jax.numpy.ones(3)
        self.state = {"params": self.params}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"policy": "float61"}, "--policy: Unknown dtype .*'float61'"),
        ({"data": ("no/such/file",)}, "--data no/such/file does not exist"),
        ({"resume": True}, "no run to resume in .*run: leave --resume out to begin one"),
        ({"model": GPTConfig(context=10**6)}, r"text\.txt holds only \d+ bytes: training needs at least"),
        ({"mesh": "data=128"}, "data [*] fsdp = 128 does not divide the 2 windows of a batch"),
    ],
)
def test_bad_wishes_are_refused_before_anything_is_written(folder, wishes, message):
    with pytest.raises(UserError, match=message):
        tiny.run(folder, **wishes)
    assert not (folder / "run").exists()


def test_an_occupied_folder_is_refused_and_left_as_it_is(folder):
    (folder / "run").mkdir()
    (folder / "run" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(UserError, match="run is not empty: continue a run with --resume, or choose another --out"):
        tiny.run(folder)
    assert tiny.read_contents(folder / "run") == {"thesis.txt": b"ten years of work"}


def test_a_folder_that_cannot_be_written_is_an_error(folder, monkeypatch):
    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"cannot write to .*run: permission denied"):
        tiny.run(folder)


@pytest.mark.usefixtures("table")
def test_damaged_logs_are_refused_before_a_run_goes_on(folder):
    tiny.run(folder, steps=1)
    with (folder / "run" / "metrics.jsonl").open("a") as log:
        log.write("[]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: not a record of a step"):
        tiny.run(folder, steps=2, resume=True)
    assert read_config(folder / "run").steps == 1


def begin_run(folder) -> RunConfig:
    config = RunConfig("nnx", "float32", 0, ("text.txt",), "00ff", tiny.MODEL, 2, 6)
    (folder / "run").mkdir()
    write_config(folder / "run", config)
    return config


OWN_FILES = ("config.json", "metrics.tmp", "loss.png", "metrics.jsonl", "numerics.html", ".lock", "checkpoints/1/x")


@pytest.mark.parametrize("name", OWN_FILES)
def test_resuming_never_writes_through_a_link(folder, name):
    begin_run(folder)
    (folder / "run" / "checkpoints" / "1").mkdir(parents=True)
    outside, file = folder / "outside", folder / "run" / name
    text = (folder / "run" / "config.json").read_text(encoding="utf-8")
    for make_link in (file.symlink_to, file.hardlink_to):
        outside.write_text(text, encoding="utf-8")
        file.unlink(missing_ok=True)
        make_link(outside)
        with pytest.raises(UserError, match=r"is a link or a special file, and .* would write beyond .*run: resume"):
            tiny.run(folder, steps=2, resume=True)
        assert outside.read_text(encoding="utf-8") == text


def test_resuming_never_writes_to_a_folder_elsewhere_or_where_a_link_leads_to_nothing(folder):
    begin_run(folder)
    (folder / "elsewhere").mkdir()
    for name, target in {"checkpoints": "elsewhere", "origins.tmp": "nothing"}.items():
        (folder / "run" / name).symlink_to(folder / target)
        with pytest.raises(UserError, match=f"{name} is a link or a special file.*cp -rL .*run copy"):
            tiny.run(folder, steps=2, resume=True)
        (folder / "run" / name).unlink()
    assert tiny.read_contents(folder / "elsewhere") == {}
    assert not (folder / "nothing").exists()


@pytest.mark.usefixtures("table")
def test_a_run_is_held_while_it_trains_and_no_longer(folder, monkeypatch):
    begin = train_module.make_trainer

    def resume_meanwhile(api, config):
        with pytest.raises(UserError, match="is in use by another process"):
            tiny.run(folder, resume=True)
        return begin(api, config)

    monkeypatch.setattr(train_module, "make_trainer", resume_meanwhile)
    tiny.run(folder, steps=1)
    with hold_folder(folder / "run"):
        pass


@pytest.mark.usefixtures("table")
def test_a_file_that_cannot_be_written_while_training_is_one_line(folder):
    tiny.run(folder, steps=1)
    (folder / "run" / "loss.png").unlink()
    (folder / "run" / "loss.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write to .*loss\.png: is a directory"):
        tiny.run(folder, steps=2, resume=True)


@pytest.mark.usefixtures("table")
def test_runs_without_out_are_numbered_and_the_last_one_is_resumed_with_copies_beside_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="no run to resume in runs/: name its folder with --out"):
        tiny.run(folder, out=None, resume=True)
    first = tiny.run(folder, out=None, steps=1)
    second = tiny.run(folder, out=None, steps=1, seed=1)
    assert "out     runs/001" in first
    assert "out     runs/002" in second
    for copy in ("003 copy", "3.old", "copy"):  # beside it, as a file manager names them
        shutil.copytree("runs/001", f"runs/{copy}")
    assert "out     runs/002" in tiny.run(folder, out=None, steps=2, resume=True)


@pytest.mark.slow
def test_a_run_that_only_overflows_says_that_it_is_stuck_and_shows_since_when(folder, monkeypatch):
    monkeypatch.setattr(train_module, "make_trainer", make_overflowing_trainer)
    stuck = r"Training is stuck: the last 12 steps were skipped.* in the backward pass"
    with pytest.raises(FloatingPointError, match=stuck):
        tiny.run(folder, steps=12, policy="mixed_float16")
    assert (folder / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def make_overflowing_trainer(api, config):
    return make_trainer(api, dataclasses.replace(config, loss_scale=jmp.StaticLossScale(2.0**127)))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "losses", [[3.0, 2.5, 2.0], pytest.param([3.0, math.nan], marks=SLOW), pytest.param([], marks=SLOW)]
)
def test_a_run_of_any_losses_has_a_plot_whose_curves_have_labels(tmp_path, losses):
    metrics = tmp_path / "metrics.jsonl"
    for step, loss in enumerate(losses, 1):
        append_line(metrics, {"step": step, "loss": loss, "loss_scale": 8.0, "skipped_steps": 1})
    figure = draw_loss(metrics, parse_policy("mixed_float16"), first_scale=16.0, bigram=3.5)
    figure.savefig(tmp_path / "loss.png")
    above, below = figure.axes
    labels = ["training, each step", "training, mean of the last 20 steps", "validation", "bigram baseline"]
    assert above.get_legend_handles_labels()[1] == labels
    assert above.get_ylabel() == "loss in bits per byte"
    assert (below.get_xlabel(), below.get_ylabel(), below.get_yscale()) == ("step", "loss scale", "log")
    _, skips = below.lines
    assert np.array_equal(skips.get_xydata(), [[1, 16.0]] if losses else np.empty((0, 2)))  # the scale that overflowed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_due(1)
        signal.raise_signal(number)
        assert stop.is_due(1)
    assert signal.getsignal(number) is before


def test_the_second_ctrl_c_interrupts():
    with StopRequest():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
