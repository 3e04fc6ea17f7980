"""The comparison of policies."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import CompareOptions, GPTConfig, UserError, _compare, compare
from examples.gpt._compare import VARIANTS
from examples.gpt._gpt import TrainerConfig, make_optimizer
from examples.gpt._run_folder import hold_folder, new_folder
from examples.gpt._underflow import LARGEST_FLUSHED, measure_zeroed, measure_zeroed_at_logits
from examples.gpt._verdict import SAME, judge


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_table_tells_what_each_policy_costs_and_saves(folder):
    options = CompareOptions((str(folder / "text.txt"),), 5, 0, folder / "out", tiny.MODEL, batch_size=16)
    console = tiny.silent_console()
    out, rows = compare(options, console)
    float32, bfloat16, unscaled, scaled = rows
    assert [row.name for row in rows] == [
        "float32",
        "mixed_bfloat16",
        "mixed_float16, no scaling",
        "mixed_float16, dynamic scaling",
    ]
    assert (float32.difference, float32.zeroed_gradient_share) == (0.0, 0.0)
    assert unscaled.zeroed_gradient_share >= scaled.zeroed_gradient_share
    assert bfloat16.zeroed_gradient_share < 0.01  # exact cancellations only
    assert (unscaled.loss_scale, scaled.loss_scale) == (1.0, 2.0**15)
    assert all(abs(row.difference) < 0.05 and row.skipped_steps == 0 for row in rows)
    assert all(row.zeroed_layer_shares.keys() == float32.zeroed_layer_shares.keys() for row in rows)
    assert {row.parameter_bytes for row in rows} == {float32.parameter_bytes}
    assert all(row.activation_bytes > 0 and row.step_seconds > 0 for row in rows)
    assert [row["name"] for row in json.loads((out / "table.json").read_text(encoding="utf-8"))] == [
        row.name for row in rows
    ]
    assert (out / "loss.png").exists()
    assert "16 windows of 16 bytes: the loss of a step is the mean over 256 bytes" in tiny.text_of(console)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("standard_promotion")
def test_float16_loses_without_a_loss_scale_and_not_with_it(folder, monkeypatch):
    # The default batch, on which the underflow depends. A model this small, trained this shortly, loses less than the
    # default one: there is time for three trainings only.
    monkeypatch.setattr(_compare, "VARIANTS", [variant for variant in VARIANTS if "bfloat16" not in variant.name])
    model = GPTConfig(width=16, depth=1, heads=1, context=64)
    _, rows = compare(CompareOptions((), 100, 0, folder / "out", model), tiny.silent_console())
    _, unscaled, scaled = rows
    assert unscaled.difference > 2.5 * SAME
    assert abs(scaled.difference) <= SAME
    assert unscaled.zeroed_logits_share > 0.5
    assert scaled.zeroed_logits_share < 0.01
    assert scaled.skipped_steps == 0
    assert max(unscaled.zeroed_layer_shares, key=unscaled.zeroed_layer_shares.__getitem__) == "embed"
    assert judge(rows)[-1].startswith(("Verdict: float16 needs its loss scale", "Verdict: float16 loses here without"))


@pytest.mark.slow
def test_the_zeroed_share_counts_what_float16_loses_and_scaling_keeps():
    reference = {"dense": {"w": jnp.array([1.0, 1e-9, 2e-9, 0.0])}, "norm": {"w": jnp.ones(4)}}
    lost = jax.tree.map(lambda grad: grad.astype(jnp.float16).astype(jnp.float32), reference)
    kept = jax.tree.map(lambda grad: (grad * 2**15).astype(jnp.float16).astype(jnp.float32) / 2**15, reference)
    assert measure_zeroed(lost, reference) == (0.25, {"dense": 0.5, "norm": 0.0})
    assert measure_zeroed(kept, reference) == (0.0, {"dense": 0.0, "norm": 0.0})


def test_the_largest_flushed_number_is_the_last_that_float16_makes_zero():
    assert np.float16(LARGEST_FLUSHED) == 0
    assert np.float16(np.nextafter(LARGEST_FLUSHED, 1.0)) > 0


@pytest.mark.exhaustive
def test_a_larger_batch_loses_more_of_the_gradient_by_the_logits():
    logits = jnp.array(np.random.default_rng(0).normal(0.0, 2.0, 256), jnp.float16)

    def lose(batch_size):
        windows = np.zeros((batch_size, 33), np.uint8)
        batch = jnp.broadcast_to(logits, (batch_size, 32, 256))
        return measure_zeroed_at_logits(batch, windows, jmp.NoOpLossScale())

    assert lose(8) < 0.05 < lose(128) < 0.5 < lose(1024)


def test_float16_without_a_loss_scale_looks_unlike_float16_with_one():
    *_, unscaled, scaled = VARIANTS
    assert unscaled.style != scaled.style
    assert len({variant.style.color for variant in VARIANTS}) == len(VARIANTS)


def test_equal_configurations_share_an_optimizer_and_few_are_kept():
    def make(step):
        return make_optimizer(TrainerConfig(jmp.get_policy("mixed_float16"), learning_rate=1e-3 * step))

    first = make(1)
    assert make(1) is first  # what was compiled for it is found again
    for step in range(2, 40):
        make(step)
    assert make(1) is not first


def test_an_occupied_folder_is_refused(folder):
    with pytest.raises(UserError, match="is not empty: choose another --out"):
        compare(CompareOptions((str(folder / "text.txt"),), out=folder), tiny.silent_console())


def test_two_comparisons_at_once_do_not_share_a_folder(folder):
    out = folder / "compared"
    with hold_folder(new_folder(out)), pytest.raises(UserError, match="compared is in use by another process"):
        compare(CompareOptions((str(folder / "text.txt"),), out=out), tiny.silent_console())
    assert new_folder(out) == out  # which one that was interrupted left empty
