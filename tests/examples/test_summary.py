"""What a run says of its policy: checked against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import jmp_policy as jmp
from examples.gpt import RunSummary, ScaleHistory, StepFacts
from examples.gpt._gpt import TrainerConfig
from examples.gpt._summary import examine_step, follow_loss_scale, measure_residual_bytes
from examples.gpt._trainer import make_trainer

WINDOWS = np.zeros((2, 4), np.uint8)


def loss_fn(dtype):
    """A layer in a dtype: it keeps what multiplied the weight, (2, 4), and the cosine, (2, 8); a sum keeps nothing."""
    return lambda weight, windows: jnp.sum(jnp.sin(windows.astype(dtype) @ weight.astype(dtype)).astype(jnp.float32))


@pytest.mark.parametrize("wrap", [lambda fun: fun, jax.jit], ids=["traced", "jitted"])
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_residuals_are_what_the_backward_pass_reads(dtype, size, wrap):
    kept = measure_residual_bytes(wrap(loss_fn(dtype)), jnp.ones((4, 8)), WINDOWS)
    assert kept == (2 * 4 + 2 * 8) * size


def test_parameters_that_are_kept_as_they_are_do_not_count_and_casts_of_them_do():
    params = {"first": jnp.ones(8), "second": jnp.ones(8)}
    product = lambda dtype: lambda params, _: (params["first"].astype(dtype) * params["second"].astype(dtype)).sum()
    assert measure_residual_bytes(product("float32"), params, WINDOWS) == 0
    assert measure_residual_bytes(product("float16"), params, WINDOWS) == 2 * 8 * 2


def follow(finite, **settings) -> tuple[ScaleHistory, list[dict]]:
    """What is read from the metrics of a scale that met such gradients."""
    scale, records, skips = jmp.DynamicLossScale(**settings), [], 0
    first = float(scale.loss_scale)
    for step, is_finite in enumerate(finite, 1):
        scale = scale.adjust(jnp.array(is_finite))
        skips += not is_finite
        records.append({"step": step, "loss": 1.0, "loss_scale": float(scale.loss_scale), "skipped_steps": skips})
        records.append({"step": step, "validation_loss": 1.0})
    return follow_loss_scale(first, records), records


def test_the_history_of_the_scale_counts_moves_and_names_skipped_steps():
    finite = [False, False, True, True, True, True, False, True]  # 8 4 2 2 4 4 8 4 4
    history, records = follow(finite, loss_scale=8.0, period=2)
    assert history == ScaleHistory(
        first=8.0, last=4.0, lowest=2.0, highest=8.0, growths=2, backoffs=3, skipped_steps=3, skipped=(1, 2, 7)
    )
    # The first four steps were lost: their skips are counted, and not said to be of the fifth.
    later = follow_loss_scale(8.0, records[8:])
    assert (later.skipped_steps, later.skipped) == (3, (7,))


def test_before_the_first_step_nothing_has_moved():
    assert follow([])[0] == ScaleHistory(2.0**15, 2.0**15, 2.0**15, 2.0**15, 0, 0, 0, ())


FACTS = StepFacts({"float16": 1.0}, {}, 3_000_000, 4_000_000)
HISTORY = follow([False, True, False, False, True, True], loss_scale=8.0, period=2)[0]


@pytest.mark.parametrize(
    ("facts", "history", "expected"),
    [
        (
            FACTS,
            HISTORY,
            {
                "matmul flops": "100.0% in float16",
                "kept for backward": "3 MB, 0.75 of float32's 4 MB",
                "loss scale": "2^3 to 2^1, between 2^0 and 2^3",
                "its moves": "1 up, 3 down",
                "skipped steps": "3 of 6: 1, 3-4",
            },
        ),
        (
            StepFacts({"float32": 1.0}, {}, 4_000_000, 4_000_000),
            ScaleHistory(1.0, 1.0, 1.0, 1.0, 0, 0, 0, ()),
            {
                "matmul flops": "100.0% in float32",
                "kept for backward": "4 MB, as in float32",
                "loss scale": "none: only float16 needs one",
                "skipped steps": "0 of 6",
            },
        ),
        (
            StepFacts({"bfloat16": 0.25, "float8_e4m3fn": 0.75}, {}, 5_000_000, 4_000_000),
            follow([True] * 6)[0],
            {
                "matmul flops": "75.0% in float8_e4m3fn, 25.0% in bfloat16",
                "kept for backward": "5 MB, 1.25 of float32's 4 MB",
                "loss scale": "2^15 all along",
                "skipped steps": "0 of 6",
            },
        ),
    ],
    ids=["float16", "float32", "float8"],
)
def test_a_summary_reads_sensibly_under_every_policy(facts, history, expected):
    assert dict(RunSummary("its name", 6, facts, history).list_rows()) == {"policy": "its name"} | expected


def test_many_skipped_steps_are_counted_where_they_are_too_many_to_name():
    steps = tuple(range(10, 100, 10))
    history = dataclasses.replace(HISTORY, skipped_steps=9, skipped=steps)
    assert RunSummary("a policy", 100, FACTS, history).list_rows()[-1][1] == "9 of 100: 10, 20, 30, 40, 50, 60, 3 more"


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_the_step_of_the_gpt_multiplies_in_half_and_keeps_less(api):
    windows = np.zeros((2, tiny.MODEL.context + 1), np.uint8)
    trainers = {name: make(api, name) for name in ("float32", "mixed_float16", "mixed_bfloat16")}
    facts = {name: examine_step(trainer, trainers["float32"], windows) for name, trainer in trainers.items()}
    assert {name: each.matmul_shares for name, each in facts.items()} == {
        "float32": {"float32": 1.0},
        "mixed_float16": {"float16": 1.0},
        "mixed_bfloat16": {"bfloat16": 1.0},
    }
    whole = facts["float32"].residual_bytes
    assert {each.float32_residual_bytes for each in facts.values()} == {whole}
    halves = {facts["mixed_float16"].residual_bytes, facts["mixed_bfloat16"].residual_bytes}
    assert len(halves) == 1
    assert 0.5 < halves.pop() / whole < 0.75  # the norms and the loss stay in float32


def make(api, name):
    policy = jmp.get_policy(name)
    assert isinstance(policy, jmp.Policy)
    return make_trainer(api, TrainerConfig(policy, tiny.MODEL))
