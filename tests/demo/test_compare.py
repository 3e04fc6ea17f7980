"""The comparison of policies."""

import json

import jax.numpy as jnp
import pytest
import tiny

from jmp_policy.demo import CompareOptions, UserError, compare
from jmp_policy.demo._compare import _measure_zeroed_share


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_table_tells_what_each_policy_costs_and_saves(folder):
    options = CompareOptions((str(folder / "text.txt"),), 5, 0, folder / "out", tiny.MODEL, batch_size=16)
    out, rows = compare(options, tiny.silent_console())
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
    assert {row.parameter_bytes for row in rows} == {float32.parameter_bytes}
    assert all(row.activation_bytes > 0 and row.step_seconds > 0 for row in rows)
    assert [row["name"] for row in json.loads((out / "table.json").read_text())] == [row.name for row in rows]
    assert (out / "loss.png").exists()


def test_the_zeroed_share_counts_what_float16_loses_and_scaling_keeps():
    reference = {"w": jnp.array([1.0, 1e-9, 2e-9, 0.0])}
    lost = {"w": reference["w"].astype(jnp.float16).astype(jnp.float32)}
    kept = {"w": (reference["w"] * 2**15).astype(jnp.float16).astype(jnp.float32) / 2**15}
    assert _measure_zeroed_share(lost, reference) == 0.5
    assert _measure_zeroed_share(kept, reference) == 0.0


def test_an_occupied_folder_is_refused(folder):
    with pytest.raises(UserError, match="is not empty: choose another --out"):
        compare(CompareOptions((str(folder / "text.txt"),), out=folder), tiny.silent_console())
