"""`train --numerics N`: what is measured of a run, beside its metrics; the run itself stays as it is."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import GPTConfig, TrainerConfig, _train as train_module, make_trainer, train
from jmp_policy.numerics import StatsHistory

pytestmark = pytest.mark.usefixtures("standard_promotion")

ALWAYS = ("summary.json", "metrics.jsonl", "loss.png", "checkpoints/")
REPORT = ("numerics-amax.png", "numerics-exponents.png", "numerics.html", "numerics.jsonl", "numerics.txt")


def run(folder, **wishes):
    return train(tiny.options(folder, **wishes), tiny.silent_console())


def read_metrics(path) -> list[dict]:
    """The metrics of a run, without the times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in line.items() if key != "step_seconds"} for line in lines]


def read_history(path) -> StatsHistory:
    with (path / "numerics.jsonl").open() as file:
        return StatsHistory.from_json_lines(file)


@pytest.fixture
def table(monkeypatch):
    """Trains a table instead of a GPT: little to compile."""
    monkeypatch.setattr(train_module, "make_trainer", lambda api, config: tiny.TableTrainer(config))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_the_first_and_every_nth_step_is_measured_and_a_report_ends_the_run(folder):
    result = run(folder, numerics=4, steps=9)
    path = folder / "run"
    history = read_history(path)
    assert history.steps == (1, 4, 8)
    assert result.files[:4] == ALWAYS
    assert set(result.files[4:]) == {*REPORT, *(file.name for file in path.glob("numerics-underflow-*.png"))}
    assert (path / "numerics-underflow-float8_e4m3fn.png").exists()
    assert not (path / "numerics-underflow-bfloat16.png").exists()  # it loses nothing
    for name in result.files:
        if name.endswith(".png"):
            assert (path / name).read_bytes().startswith(b"\x89PNG")
    text = " ".join((path / "numerics.txt").read_text(encoding="utf-8").split())
    assert text.startswith("What the tensors of 3 steps from 1 to 8 looked like, trained with float32, and what other")
    assert str(history.merge()) in (path / "numerics.txt").read_text(encoding="utf-8")
    assert "<title>numerics of a run</title>" in (path / "numerics.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_a_run_that_is_measured_trains_as_one_that_is_not(folder):
    measured = run(folder, numerics=2, out=folder / "measured")
    plain = run(folder)
    assert plain.files == ALWAYS
    assert not list((folder / "run").glob("numerics*"))
    assert read_metrics(folder / "measured") == read_metrics(folder / "run")
    assert dataclasses.replace(measured, folder=plain.folder, files=plain.files) == plain


@pytest.mark.exhaustive
@pytest.mark.usefixtures("table")
def test_a_resumed_run_goes_on_in_the_file(folder):
    run(folder, numerics=2, steps=8, out=folder / "straight")
    run(folder, numerics=2, steps=5)
    file = folder / "run" / "numerics.jsonl"
    with file.open("a") as log:  # as if the run had got further than its checkpoint, and been killed within a line
        log.write('{"step": 6, "rows": []}\n{"step": 8, "ro')
    run(folder, resume=True, policy=None, steps=8)
    assert file.read_bytes() == (folder / "straight" / "numerics.jsonl").read_bytes()
    for name in ("numerics.txt", "numerics.html", "numerics-amax.png"):
        assert (folder / "run" / name).read_bytes() == (folder / "straight" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("table")
def test_how_often_is_measured_may_change_when_a_run_is_resumed(folder):
    run(folder, steps=3)
    run(folder, steps=6, resume=True, numerics=3)
    run(folder, steps=9, resume=True)  # as it was last
    assert read_history(folder / "run").steps == (6, 9)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_is_measured_with_true_gradients_and_its_state_stays(api):
    model = GPTConfig(width=8, depth=1, heads=1, context=8)
    config = TrainerConfig(jmp.get_policy("float32"), model, loss_scale=jmp.StaticLossScale(2.0**10))
    trainer = make_trainer(api, config)
    windows = np.random.default_rng(0).integers(0, 256, (4, 9), dtype=np.uint8)
    before = jax.tree.map(jnp.copy, trainer.state)
    rows = trainer.observe(windows).rows()
    assert all(map(jnp.array_equal, jax.tree.leaves(before), jax.tree.leaves(trainer.state)))
    block = "blocks/0" if api == "nnx" else "blocks_0"
    paths = {f"{block}/attention/qkv", f"{block}/expand", f"{block}/contract", "embed"}
    for direction in ("forward", "backward"):
        assert {row.path for row in rows if row.direction == direction} >= paths
    grads = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.grad(trainer.loss_fn)(trainer.params, windows))]
    results = [row for row in rows if row.direction == "result"]
    # Other fusions: the last bits differ, and so a number may fall to the other side of a bound.
    for row, grad in zip(results, grads, strict=True):
        assert row.amax == pytest.approx(float(np.abs(grad).max()), rel=1e-5)
        lost = np.mean((grad.astype(jnp.float8_e4m3fn) == 0) & (grad != 0))
        assert row.formats["float8_e4m3fn"].underflow == pytest.approx(float(lost), abs=2 / grad.size)
