"""Which policy follows from measurements, and how it is explained: all of them made up."""

import pytest

from jmp_policy.cli._doctor import Machine, MatmulRate, Speedup, StepTime, recommend_policy

VERSIONS = {"jax": "0.12.0", "jaxlib": "0.12.0"}
GPU = Machine("gpu", "H100", "Linux x86_64, 8 cores", VERSIONS)
BFLOAT16, FLOAT16 = (f"params=float32,compute={dtype},output=float32" for dtype in ("bfloat16", "float16"))
NONE = {"bfloat16": (), "float16": ()}
CPU = Machine("cpu", "EPYC", "Linux x86_64, 2 cores", VERSIONS, NONE)


def sure(value: float) -> Speedup:
    """A speed-up of a quiet machine."""
    return Speedup(value, value * 0.99, value * 1.01)


def recommend(steps, matmuls=(1.0, 1.0), kept=("bfloat16", "float16"), machine=GPU, widened=None):
    """The policy and the reason for speed-ups of steps and matmuls in bfloat16 and float16."""
    rates = [MatmulRate(f"float32 {name}", "float32", "float32", 1.0, 1.0) for name in ("highest", "default")]
    for name, speedup, dtype in zip(("bfloat16", "float16"), matmuls, kept, strict=True):
        rates.append(MatmulRate(name, name, dtype, None if speedup is None else 1.0, speedup))
    speedups = [step if isinstance(step, Speedup) else sure(step) for step in steps]
    times = {"float32": StepTime(1.0, sure(1.0))}
    times |= {name: StepTime(1.0, x, widened or {}) for name, x in zip(("bfloat16", "float16"), speedups, strict=True)}
    return recommend_policy(rates, times, machine)


@pytest.mark.parametrize(
    ("steps", "policy"),
    [
        ((1.9, 1.9), BFLOAT16),
        ((1.9, 2.0), BFLOAT16),  # float16 gains too little for its loss scale
        ((1.9, 2.4), FLOAT16),
        ((1.2, Speedup(1.8, 1.15, 1.9)), BFLOAT16),  # too noisy to say that float16 is faster
        ((1.9, 0.5), BFLOAT16),
        ((0.8, 1.9), FLOAT16),
        ((0.8, 0.8), "float32"),
        ((1.0, 1.0), "float32"),
        ((1.04, 0.9), "float32"),
        ((Speedup(1.23, 1.05, 1.8), 0.9), "float32"),  # the noise exceeds the gain
        ((Speedup(1.4, 0.9, 1.5), 0.9), "float32"),  # a third of the turns says slower
    ],
)
def test_the_time_of_a_step_decides(steps, policy):
    assert recommend(steps)[0] == policy


def test_matmuls_decide_nothing():
    assert recommend((1.3, 1.3), matmuls=(0.8, 0.8))[0] == BFLOAT16
    assert recommend((0.9, 0.9), matmuls=(8.0, 8.0))[0] == "float32"


def test_the_reason_for_half_has_the_ratios_of_steps_and_of_matmuls():
    assert recommend((1.9, 1.85), matmuls=(7.5, 7.25))[1] == (
        "forward and backward run at 1.90x the speed of float32 in bfloat16 (matmuls alone 7.50x) and 1.85x the speed "
        "of float32 in float16 (matmuls alone 7.25x); bfloat16 has the range of float32, so it needs no loss scale"
    )


def test_the_reason_for_float16_names_the_loss_scale():
    assert recommend((0.8, 1.9))[1].endswith("; float16 has a small range, so it needs a dynamic loss scale")


def test_a_jaxlib_that_converts_is_blamed_and_not_the_device():
    policy, reason = recommend((0.85, 0.9), (1.02, 1.08), kept=("float32", "float32"), machine=CPU)
    assert policy == "float32"
    assert reason == (
        "half precision is slower here: forward and backward run at 0.85x the speed of float32 in bfloat16 (matmuls "
        "alone 1.02x) and 0.90x the speed of float32 in float16 (matmuls alone 1.08x); jaxlib 0.12.0 computes the "
        "matmuls of both by converting to float32"
    )


def test_each_format_has_its_own_blame():
    reason = recommend((0.8, 0.9), (0.7, 0.9), kept=("bfloat16", "float32"), machine=CPU)[1]
    assert reason.endswith(
        "; jaxlib 0.12.0 leaves bfloat16 matmuls in bfloat16, but they run no faster than in float32, and Linux lists "
        "no bfloat16 instructions for this CPU; jaxlib 0.12.0 computes float16 matmuls by converting to float32"
    )


def test_instructions_that_gain_nothing_are_named():
    machine = Machine(
        "cpu", "Xeon", "Linux x86_64, 2 cores", VERSIONS, NONE | {"bfloat16": ("avx512_bf16", "amx_bf16")}
    )
    reason = recommend((0.8, 0.9), (1.0, 1.0), machine=machine)[1]
    assert "run no faster than in float32, although Linux lists avx512_bf16 and amx_bf16 for this CPU" in reason


def test_nothing_is_said_of_instructions_where_nothing_lists_them():
    assert "lists" not in recommend((0.8, 0.9), machine=GPU)[1]


def test_quick_matmuls_in_a_slower_step_blame_the_rest_of_it():
    policy, reason = recommend((0.8, 0.9), (1.6, 2.0), machine=CPU, widened={"bfloat16": 3, "float32": 2})
    assert policy == "float32"
    assert (
        "bfloat16 matmuls are quick here, but the rest of the step is not, in which 2 of 5 matmuls are in float32; "
        "float16 matmuls are quick here, but the rest of the step is not"
    ) in reason


def test_a_tie_is_called_one():
    reason = recommend((Speedup(1.1, 0.9, 1.2), 0.97))[1]
    assert reason.startswith("half precision gains no time here, within the noise: ")
    assert "1.10x the speed of float32 in bfloat16 (a tie; matmuls alone 1.00x)" in reason


def test_a_tie_beside_a_slower_format_is_not_called_slower():
    reason = recommend((0.8, 1.0))[1]
    assert reason.startswith("half precision gains no time here: forward")


def test_nothing_is_said_of_conversions_where_xla_does_not_tell():
    reason = recommend((0.8, 0.9), (0.7, 0.9), kept=(None, None))[1]
    assert "; bfloat16 matmuls run no faster than in float32; float16 matmuls run no faster" in reason
    assert "jaxlib" not in reason


def test_a_matmul_that_the_device_lacks_is_said():
    reason = recommend((0.8, 0.9), (1.0, None))[1]
    assert "in float16 (no matmuls)" in reason
    assert reason.endswith("jaxlib 0.12.0 has no matmul in float16 for this device")
