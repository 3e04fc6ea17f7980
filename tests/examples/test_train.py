"""Training runs: begun, stopped, killed, resumed, measured, explained, and refused."""

import dataclasses
import math
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import UserError, train as train_module
from examples.gpt.devices import StopRequest
from examples.gpt.model import GPTConfig
from examples.gpt.run import RunConfig, append_line, hold_folder, read_config, write_config
from examples.gpt.train import draw_loss, parse_policy
from jmp_policy.numerics import StatsHistory

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_half_precision_is_trained_beside_float32_and_its_skipped_steps_are_explained(folder, monkeypatch):
    """Every byte is the same: gradients of almost one, which the scale takes past 65,504, the largest of float16."""
    sample = train_module.sample_batch
    monkeypatch.setattr(train_module, "sample_batch", lambda *args, **sizes: np.full_like(sample(*args, **sizes), 97))
    monkeypatch.setattr(train_module, "GROWTH_PERIOD", 1)
    monkeypatch.setattr(train_module, "PRINT_EVERY", 1)
    text = tiny.run(folder, policy="float16", steps=4)
    *steps, last = tiny.read_records(folder / "run")
    assert [record["loss_scale"] for record in steps] == [2.0**16, 2.0**17, 2.0**16, 2.0**17]
    assert all(record["loss"] == pytest.approx(record["float32_loss"], rel=0.01) for record in steps[:3])
    assert steps[3]["float32_loss"] < steps[2]["float32_loss"] < steps[0]["float32_loss"]  # it skips nothing
    assert last["float32_validation_loss"] != last["validation_loss"]
    half, single = last["validation_loss"], last["float32_validation_loss"]
    for line in (
        "compute=float16,output=float16; float32 to compare with",
        f"step 1: loss {steps[0]['loss']:.3f} (float32 {steps[0]['float32_loss']:.3f}), scale 65536, skipped 0",
        "step 3 skipped because of the loss scale: the step is not finite at 131072, and finite at 65536. The scale f",
        "loss scale     32768 to 131072, between 32768 and 131072",
        "skipped steps  1 of 4\n               The scale doubles after 1 finite steps. A step whose gradients overflow",
        f"The model reaches {half:.3f} (float32 {single:.3f}) bits per byte and does not beat the bigram baseline (",
    ):
        assert line in text


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


# A process that kills itself at a chosen step dies exactly as one that is killed from outside, and never too late.
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
    shutil.rmtree(folder / "run" / "checkpoints")  # as if it had been killed before its first checkpoint
    tiny.run(folder, resume=True, steps=4)
    assert tiny.read_records(folder / "run") == tiny.read_records(folder / "straight")


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
@pytest.mark.usefixtures("table")
def test_a_run_goes_on_bit_exactly_on_its_mesh(folder):
    text = tiny.run(folder, mesh="data=2,tensor=2", out=folder / "straight", steps=3)
    assert "mesh    data=2,tensor=2; processes: 1" in text
    tiny.run(folder, mesh="data=2,tensor=2", steps=2)
    text = tiny.run(folder, resume=True, steps=3)
    assert "mesh    data=2,tensor=2" in text  # as it was begun
    before, after = tiny.read_records(folder / "straight"), tiny.read_records(folder / "run")
    assert [record for record in after if "loss" in record] == [record for record in before if "loss" in record]
    assert after[-1] == before[-1]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_checkpoint_of_another_model_and_damaged_logs_are_errors_and_change_nothing(folder, monkeypatch):
    tiny.run(folder, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "make_trainer", lambda api, config: Other())
        before = tiny.read_contents(folder / "run")
        with pytest.raises(UserError, match=r"cannot restore step 1 of .*checkpoints"):
            tiny.run(folder, resume=True, steps=2)
        assert tiny.read_contents(folder / "run") == before
    with (folder / "run" / "metrics.jsonl").open("a") as log:
        log.write("[]\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 3: not a record of a step"):
        tiny.run(folder, steps=2, resume=True)
    assert read_config(folder / "run").steps == 1


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


def test_a_folder_that_is_occupied_or_cannot_be_written_is_an_error(folder, monkeypatch):
    (folder / "full").mkdir()
    (folder / "full" / "thesis.txt").write_text("ten years of work")
    with pytest.raises(UserError, match="full is not empty: continue a run with --resume, or choose another --out"):
        tiny.run(folder, out=folder / "full")
    assert tiny.read_contents(folder / "full") == {"thesis.txt": b"ten years of work"}

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"cannot write to .*run: permission denied"):
        tiny.run(folder)


@pytest.mark.parametrize("name", ["config.json", "metrics.tmp", ".lock", "checkpoints/1/x"])
def test_resuming_never_writes_through_a_link(folder, name):
    write_run(folder)
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
    write_run(folder)
    (folder / "elsewhere").mkdir()
    for name, target in {"checkpoints": "elsewhere", "skips.tmp": "nothing"}.items():
        (folder / "run" / name).symlink_to(folder / target)
        with pytest.raises(UserError, match=f"{name} is a link or a special file.*cp -rL .*run copy"):
            tiny.run(folder, steps=2, resume=True)
        (folder / "run" / name).unlink()
    assert tiny.read_contents(folder / "elsewhere") == {}
    assert not (folder / "nothing").exists()


def write_run(folder) -> None:
    (folder / "run").mkdir()
    write_config(folder / "run", RunConfig("nnx", "float32", 0, ("text.txt",), "00ff", tiny.MODEL, 2, 6))


@pytest.mark.slow
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
    monkeypatch.setattr(train_module, "make_trainer", begin)
    (folder / "run" / "loss.png").unlink()
    (folder / "run" / "loss.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write to .*loss\.png: is a directory"):  # after the last step
        tiny.run(folder, steps=1, resume=True)


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_runs_without_out_are_numbered_and_the_last_one_is_resumed_with_copies_beside_it(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match="no run to resume in runs/: name its folder with --out"):
        tiny.run(folder, out=None, resume=True)
    assert "out     runs/001" in tiny.run(folder, out=None, steps=1)
    assert "out     runs/002" in tiny.run(folder, out=None, steps=1, seed=1)
    for copy in ("003 copy", "3.old", "copy"):  # beside it, as a file manager names them
        shutil.copytree("runs/001", f"runs/{copy}")
    assert "out     runs/002" in tiny.run(folder, out=None, steps=1, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("losses", [[3.0, 2.5, 2.0], [3.0, math.nan], []])
@pytest.mark.parametrize("compared", [True, False])
def test_a_run_of_any_losses_has_a_plot_whose_curves_have_labels(tmp_path, losses, compared):
    metrics = tmp_path / "metrics.jsonl"
    for step, loss in enumerate(losses, 1):
        record = {"step": step, "loss": loss, "loss_scale": 8.0, "skipped_steps": 1}
        append_line(metrics, record | ({"float32_loss": 2.0} if compared else {}))
    figure = draw_loss(metrics, parse_policy("mixed_float16"), first_scale=16.0, bigram=3.5)
    figure.savefig(tmp_path / "loss.png")
    above, *middle, below = figure.axes
    labels = ["training, each step", "training, mean of the last 20 steps", "validation", "bigram baseline"]
    if compared and losses:
        labels.insert(1, "in float32, mean of 20 steps")
        (difference,) = middle[0].lines
        first, last = difference.get_ydata()[[0, -1]]
        assert (first, last) == pytest.approx((1.0, np.mean(losses) - 2.0), nan_ok=True)
    else:
        assert not middle
    assert above.get_legend_handles_labels()[1] == labels
    assert above.get_ylabel() == "loss in bits per byte"
    assert (below.get_xlabel(), below.get_ylabel(), below.get_yscale()) == ("step", "loss scale", "log")
    _, skips = below.lines
    assert np.array_equal(skips.get_xydata(), [[1, 16.0]] if losses else np.empty((0, 2)))  # the scale that overflowed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_a_second_ctrl_c_interrupts(number):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.is_due(1)
        signal.raise_signal(number)
        assert stop.is_due(1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) is before


STRANGE = 255
"""A byte that no text has."""


@pytest.mark.slow
def test_a_step_that_the_forward_pass_broke_is_explained(folder, monkeypatch):
    """The second batch has a byte of which the table knows nothing but a nan."""
    sample, scale = train_module.sample_batch, jmp.DynamicLossScale(2.0**15)

    def sample_strange_batch(*args, step, **kwargs):
        windows = sample(*args, step=step, **kwargs)
        windows[0, 0] = STRANGE if step == 1 else windows[0, 0]
        return windows

    def make_table(api, config):
        trainer = tiny.TableTrainer(dataclasses.replace(config, loss_scale=scale))
        trainer.state["params"] = trainer.params.at[STRANGE].set(jnp.nan)
        return trainer

    monkeypatch.setattr(train_module, "sample_batch", sample_strange_batch)
    monkeypatch.setattr(train_module, "make_trainer", make_table)
    text = tiny.run(folder, steps=3, policy="mixed_float16")
    log = jmp.optim.SkipLog(folder / "run" / "skips.jsonl")
    (record,) = log.read()
    assert (record["step"], record["batch"], record["kind"], record["place"]) == (2, 1, "state", "params")
    assert record["text"].startswith("The step was skipped because of the state: 256 of 65536 elements of params are")
    assert text.count("step 2 skipped because of the state: 256 of 65536 elements") == 1
    tiny.run(folder, steps=4, resume=True, policy="mixed_float16")
    assert len(log.read()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_that_is_measured_trains_as_one_that_is_not_and_goes_on_in_its_file(folder):
    tiny.run(folder, steps=4)
    assert not list((folder / "run").glob("numerics*"))
    path = folder / "measured"
    tiny.run(folder, steps=2, numerics=2, out=path)
    with (path / "numerics.jsonl").open("a") as log:  # as if it had got further, and been killed
        log.write('{"step": 4, "rows": []}\n{"step": 5, "ro')
    tiny.run(folder, steps=4, out=path, resume=True)  # every second step, as it was begun
    with (path / "numerics.jsonl").open() as file:
        history = StatsHistory.from_json_lines(file)
    assert history.steps == (1, 2, 4)
    text = (path / "numerics.txt").read_text(encoding="utf-8")
    assert text.startswith("Tensors of 3 steps, trained with params=float32,compute=float32,output=float32.")
    assert str(history.merge()) in text
    assert "<title>numerics of a run</title>" in (path / "numerics.html").read_text(encoding="utf-8")
    assert {file.name for file in path.glob("numerics*.png")} == {"numerics-amax.png", "numerics-exponents.png"}
    losses = [[record.get("loss") for record in tiny.read_records(each)] for each in (folder / "run", path)]
    assert [loss for loss in losses[0] if loss] == [loss for loss in losses[1] if loss]
