"""What is measured, how noise is told from a difference, and what XLA's text says."""

import json

import jax
import jax.numpy as jnp
import pytest

from jmp_policy.cli._doctor import (
    FEWEST_ROUNDS,
    MATMULS,
    MOST_SECONDS,
    ROUNDS,
    Machine,
    Speedup,
    compare_times,
    diagnose,
    find_half_instructions,
    find_machine,
    list_versions,
    measure_matmuls,
    measure_steps,
    read_matmuls,
    time_rounds,
)


def test_the_shortest_times_are_compared():
    assert compare_times([2.0, 2.0, 2.0, 50.0], [1.0, 1.0, 1.0, 90.0]) == Speedup(2.0, 2.0, 2.0)


def test_thirds_that_disagree_show_the_noise():
    speedup = compare_times([1.0, 1.0, 1.0], [0.5, 1.0, 2.0])
    assert (speedup.value, speedup.low, speedup.high) == (2.0, 0.5, 2.0)


def test_calls_take_turns_and_each_round_begins_with_another():
    called = []
    seconds = time_rounds({name: lambda name=name: called.append(name) for name in "abc"}, clock=lambda: 0.0)
    assert "".join(called[:9]) == "abcbcacab"
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", ROUNDS)


def test_a_slow_machine_has_fewer_rounds_and_never_too_few():
    now = iter(range(10**6))  # each look at the clock takes a second
    seconds = time_rounds({"a": lambda: None}, clock=lambda: float(next(now)))
    assert MOST_SECONDS < FEWEST_ROUNDS
    assert seconds == {"a": [1.0] * FEWEST_ROUNDS}


@pytest.mark.slow
def test_every_kind_is_measured_or_said_to_be_unsupported():
    measured = measure_matmuls(size=32)
    assert [rate.name for rate in measured] == list(MATMULS)
    assert measured[0].speedup == 1.0
    for rate in measured:
        assert rate.teraflops is None or rate.teraflops > 0


def test_a_matmul_in_float32_is_multiplied_in_float32():
    assert measure_matmuls(32, ["float32 highest"])[0].multiplied_in == "float32"


def test_the_matmuls_of_a_step_are_counted():
    steps = measure_steps(32, 16, dtypes=["float32"])
    assert steps["float32"].multiplied_in == {"float32": 5}  # two forward, three backward
    assert steps["float32"].speedup == Speedup(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("%a = f16[8]{0} parameter(0)\n%b = f16[8]{0} parameter(1)\nROOT %c = f32[] dot(%a, %b), x={0}", ["float16"]),
        ("a = bf16[8,8] parameter(0)\nc = bf16[8,8] dot(a, a)", ["bfloat16"]),
        ("a = bf16[8,8] parameter(0)\nc = bf16[8,8] convolution(bf16[8,8]{1,0} a, bf16[8,8]{1,0} a)", ["bfloat16"]),
        (
            '%a = s8[8,8] parameter(0)\n%c = (s32[8,8], s8[4]) custom-call(%a, %a), custom_call_target="__cublas$gemm"',
            ["int8"],
        ),
        ('%a = f32[8] parameter(0)\n%c = f32[8] custom-call(%a, %a), custom_call_target="TopK"', []),
        ("%a = f16[8] parameter(0)\n%b = f32[8] parameter(1)\n%c = f32[] dot(%a, %b)", []),  # two dtypes
        ("%a = u3[8] parameter(0)\n%c = f32[] dot(%a, %a)", []),  # a dtype that is not known
        ("something that is no HLO", []),
    ],
)
def test_products_are_read_from_the_text_of_a_program(text, dtypes):
    assert read_matmuls(text) == dtypes


def test_an_elementwise_program_has_no_products():
    assert read_matmuls(jax.jit(jnp.exp).lower(jnp.ones(8)).compile().as_text()) == []


@pytest.mark.parametrize(
    ("facts", "instructions"),
    [
        ({"flags": "fpu avx2 f16c"}, {"bfloat16": (), "float16": ()}),  # f16c only converts
        ({"flags": "amx_bf16 avx512_fp16"}, {"bfloat16": ("amx_bf16",), "float16": ("avx512_fp16",)}),
        ({"Features": "fp asimd asimdhp bf16"}, {"bfloat16": ("bf16",), "float16": ("asimdhp",)}),  # ARM
        ({"model name": "unknown"}, None),
        ({}, None),
    ],
)
def test_instructions_are_those_that_linux_lists(facts, instructions):
    assert find_half_instructions(facts) == instructions


def test_the_machine_is_named_with_its_versions():
    machine = find_machine()
    assert machine.platform == jax.default_backend()
    assert str(machine).endswith(f"; jax {jax.__version__}, jaxlib {list_versions()['jaxlib']}")
    assert str(Machine("gpu", "NVIDIA H100", "Linux", {"jax": "1", "jaxlib": "2"})) == (
        "NVIDIA H100 (gpu), Linux; jax 1, jaxlib 2"
    )


def test_a_package_that_is_not_there_has_no_version(monkeypatch):
    monkeypatch.setattr("jmp_policy.cli._doctor.PACKAGES", ("jax", "no_such_package"))
    assert list_versions()["no_such_package"] == "not installed"


@pytest.mark.slow
def test_a_diagnosis_is_json(monkeypatch):
    tiny = {jax.default_backend(): {"matrix": 32, "rows": 32, "width": 16}}
    monkeypatch.setattr("jmp_policy.cli._doctor.SIZES", tiny)
    plain = json.loads(json.dumps(diagnose().to_dict(), allow_nan=False))
    assert list(plain) == ["versions", "device", "sizes", "matmuls", "steps", "recommendation"]
    assert plain["versions"]["jax"] == jax.__version__
    assert set(plain["device"]) == {"platform", "name", "system", "half_instructions"}
    assert [rate["name"] for rate in plain["matmuls"]] == list(MATMULS)
    assert set(plain["matmuls"][0]) == {"name", "dtype", "multiplied_in", "teraflops", "speedup"}
    assert list(plain["steps"]) == ["float32", "bfloat16", "float16"]
    assert set(plain["steps"]["float16"]) == {"seconds", "speedup", "multiplied_in"}
    assert set(plain["recommendation"]) == {"policy", "reason"}
