"""A run says why it skipped steps where no smaller loss scale would have helped, and keeps it beside its metrics."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import train as train_module
from examples.gpt.model import TrainerConfig, make_trainer

pytestmark = pytest.mark.usefixtures("standard_promotion")

STRANGE = 255
"""A byte that no text has."""


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
    text = tiny.run(folder, steps=3, policy="mixed_float16")
    file = folder / "run" / "origins.jsonl"
    (record,) = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert (record["step"], record["kind"], record["argument"]) == (2, "nan", "table")
    assert record["description"].startswith("A nan came in with argument `table`.")
    assert text.count("step 2 skipped: nan in argument `table`") == 1
    tiny.run(folder, steps=4, resume=True, policy="mixed_float16")
    assert len(file.read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.parametrize(
    ("loss", "scale", "is_suspect"),
    [
        (1.0, jmp.DynamicLossScale(8.0), False),  # the search for a scale goes on
        (1.0, jmp.DynamicLossScale(1.0), True),  # the scale cannot fall
        (math.nan, jmp.DynamicLossScale(8.0), True),  # the forward pass does not depend on the scale
        (math.inf, jmp.DynamicLossScale(8.0), True),
        (1.0, jmp.StaticLossScale(8.0), True),
        (1.0, jmp.NoOpLossScale(), True),
    ],
)
def test_a_skip_is_explained_where_a_smaller_scale_would_not_have_helped(loss, scale, is_suspect):
    assert train_module.is_suspect(loss, scale) is is_suspect


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_gpt_names_the_pass_that_overflows(api):
    trainer = make_trainer(api, TrainerConfig(jmp.get_policy("mixed_float16"), tiny.MODEL))
    found = trainer.find_origin(np.zeros((2, 17), np.uint8), jmp.DynamicLossScale(2.0**126, max_loss_scale=2.0**126))
    root = found.cause or found  # the first gradient may hold what the infinity became further on
    assert (found.found, root.direction, root.kind) == (True, "backward", "inf")
