"""A run says why it skipped steps where no smaller loss scale would have helped, and keeps it beside its metrics."""

import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import TrainerConfig, _train as train_module, make_trainer, train
from examples.gpt._origins import SkipInspector
from examples.gpt._run_folder import MetricsLog
from jmp_policy.numerics import Provenance, first_nonfinite

pytestmark = pytest.mark.usefixtures("standard_promotion")

STRANGE = 255
"""A byte that no text has."""


def run(folder, **wishes):
    console = tiny.silent_console()
    return train(tiny.options(folder, policy="mixed_float16", **wishes), console), tiny.text_of(console)


@pytest.fixture
def strange_batch(monkeypatch):
    """The second batch has a byte of which the table knows nothing but a nan."""
    sample, scale = train_module.sample_batch, jmp.DynamicLossScale(2.0**15)

    def sample_strange_batch(*args, step, **kwargs):
        windows = sample(*args, step=step, **kwargs)
        windows[0, 0] = STRANGE if step == 1 else windows[0, 0]
        return windows

    def make_table(api, config):
        trainer = tiny.TableTrainer(TrainerConfig(config.policy, loss_scale=scale))
        trainer.state["params"] = trainer.params.at[STRANGE].set(jnp.nan)
        return trainer

    monkeypatch.setattr(train_module, "sample_batch", sample_strange_batch)
    monkeypatch.setattr(train_module, "make_trainer", make_table)


@pytest.mark.slow
@pytest.mark.usefixtures("strange_batch")
def test_a_step_that_the_forward_pass_broke_is_explained(folder):
    result, text = run(folder, steps=3)
    (record,) = [
        json.loads(line) for line in (folder / "run" / "origins.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert (record["step"], record["kind"], record["argument"]) == (2, "nan", "table")
    assert record["description"].startswith("A nan came in with argument `table`.")
    assert text.count("step 2 skipped: nan in argument `table`") == 1
    assert result.files[-1] == "origins.jsonl"
    resumed, _ = run(folder, steps=4, resume=True)
    assert len((folder / "run" / "origins.jsonl").read_text(encoding="utf-8").splitlines()) == 1
    assert resumed.summary.scale.skipped == (2,)


class Recorded:
    """A trainer that was asked for origins at these scales."""

    def __init__(self, scale):
        self.opt_state = jmp.optim.loss_scaled(optax.sgd(1.0), scale).init(jnp.ones(2))
        self.scales = []

    def find_origin(self, windows, scale) -> Provenance:
        self.scales.append(float(scale.loss_scale))
        return first_nonfinite(lambda x: jnp.log(-x))(jnp.ones(2))[1]


def look(trainer, tmp_path, *steps):
    """Shows an inspector the loss of steps, the scale and the skips after each; returns what it says."""
    said = []
    inspector = SkipInspector(trainer, MetricsLog(tmp_path / "origins.jsonl"))
    for step, (loss, scale, skips) in enumerate(steps, 1):
        figures = {"loss_scale": scale, "skipped_steps": skips}
        inspector.look(step, np.zeros((1, 5), np.uint8), loss, figures, SimpleNamespace(note=said.append))
    return said


def test_a_search_for_a_scale_is_not_explained(tmp_path):
    trainer = Recorded(jmp.DynamicLossScale(8.0))
    assert look(trainer, tmp_path, (1.0, 4.0, 1), (1.0, 2.0, 2), (1.0, 2.0, 2)) == []
    assert trainer.scales == []


def test_a_scale_that_can_fall_no_more_or_a_loss_that_is_not_finite_is(tmp_path):
    trainer = Recorded(jmp.DynamicLossScale(4.0))
    steps = (math.nan, 2.0, 1), (1.0, 1.0, 2), (1.0, 1.0, 3), (1.0, 1.0, 4), (math.inf, 1.0, 4)
    (line,) = look(trainer, tmp_path, *steps)  # one origin is said once
    assert line.startswith("step 1 skipped: nan in `log`, test_origins.py")
    assert trainer.scales == [4.0, 1.0, 1.0]
    assert [
        json.loads(record)["step"] for record in (tmp_path / "origins.jsonl").read_text(encoding="utf-8").splitlines()
    ] == [1, 3, 4]


def test_a_scale_that_does_not_move_is_always_looked_into(tmp_path):
    trainer = Recorded(jmp.StaticLossScale(8.0))
    assert len(look(trainer, tmp_path, (1.0, 8.0, 1))) == 1
    assert trainer.scales == [8.0]


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_names_the_pass_that_overflows(api):
    trainer = make_trainer(api, TrainerConfig(jmp.get_policy("mixed_float16"), tiny.MODEL))
    found = trainer.find_origin(np.zeros((2, 17), np.uint8), jmp.DynamicLossScale(2.0**126, max_loss_scale=2.0**126))
    root = found.cause or found  # the first gradient may hold what the infinity became further on
    assert (found.found, root.direction, root.kind) == (True, "backward", "inf")
