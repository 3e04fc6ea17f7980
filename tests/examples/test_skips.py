"""The example with planted events: its log of skipped steps tells what happened."""

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import train as train_module

pytestmark = pytest.mark.usefixtures("standard_promotion")

EVENTS = {step: ("row", "spike", "bit")[i % 3] for i, step in enumerate(range(80, 170, 3))}
EXPECTED = {"row": ("data", "windows"), "spike": ("spike", ""), "bit": ("state", "params/embed/embedding")}


def _flip_a_bit(table):
    """Flips the highest bit of an exponent on the host, of the row of a byte that every batch has."""
    words = np.array(table).view(np.uint32)
    words[ord("e"), 3] ^= np.uint32(1 << 30)
    return jnp.asarray(words.view(np.float32))


@pytest.mark.slow
def test_thirty_planted_events_are_skipped_and_told_apart(tmp_path, monkeypatch):
    tiny.write_text(tmp_path / "text.txt")
    sample, train_step = train_module.sample_batch, train_module.Run.train_step

    def sample_with_bad_rows(*args, step, **kwargs):
        windows = sample(*args, step=step, **kwargs).astype(np.int32)
        if EVENTS.get(step + 1) == "row":
            windows[1, 5] = 70_000
        return windows

    def train_step_with_faults(run, step):
        model = run.trainer.model
        change = {"spike": (model.norm.scale, lambda x: 50 * x), "bit": (model.embed.embedding, _flip_a_bit)}
        variable, fault = change.get(EVENTS.get(step, ""), (model.norm.scale, lambda x: x))
        before = variable[...]
        variable[...] = fault(before)
        train_step(run, step)
        if step in EVENTS:
            variable[...] = before  # the skipped step has left it as it was

    monkeypatch.setattr(train_module, "sample_batch", sample_with_bad_rows)
    monkeypatch.setattr(train_module.Run, "train_step", train_step_with_faults)
    policy = "params=float32,compute=bfloat16,output=float32"
    text = tiny.run(tmp_path, policy=policy, steps=175, batch_size=4)
    entries = jmp.optim.SkipLog(tmp_path / "run" / "skips.jsonl").read()
    told = {entry["step"]: (entry["kind"], entry["place"]) for entry in entries}
    assert told == {step: EXPECTED[event] for step, event in EVENTS.items()}
    assert all(entry["batch"] == entry["step"] - 1 for entry in entries)
    assert {tuple(entry["rows"]) for entry in entries if entry["kind"] == "data"} == {(1,)}
    assert "step 80 skipped because of the data: 1 of 68 elements are outside of 32 to 121, such as 70000," in text
    assert "skipped steps  30 of 175" in text
