"""`jmp-policy doctor`: what is measured, which policy follows, how it is explained, and what is printed."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

# A command measures for minutes, so most of these measurements are made up.
import jmp_policy.cli._doctor as doctor
from jmp_policy.cli import main
from jmp_policy.cli._doctor import MATMULS, Diagnosis, Machine, MatmulRate, Speedup, StepTime, recommend_policy

VERSIONS = {"jax": "0.12.0", "jaxlib": "0.12.0"}
GPU = Machine("gpu", "NVIDIA H100", "Linux x86_64, 8 cores", VERSIONS)
CPU = Machine("cpu", "AMD EPYC", "Linux x86_64, 2 cores", VERSIONS, {"bfloat16": (), "float16": ()})


@pytest.fixture
def diagnosed(monkeypatch):
    """Stands in for the measurement."""
    rates = [MatmulRate(name, MATMULS[name][0], "float32", 0.15, 1.25) for name in list(MATMULS)[:-2]]
    rates += [MatmulRate("float8_e4m3fn", "float8_e4m3fn", None, 0.125, 0.75), MatmulRate("int8", "int8")]
    steps = {
        "float32": StepTime(0.02, Speedup(1.0, 1.0, 1.0), {"float32": 5}),
        "bfloat16": StepTime(0.025, Speedup(0.8, 0.75, 0.85), {"bfloat16": 3, "float32": 2}),
        "float16": StepTime(0.01, Speedup(2.0, 1.9, 2.1)),
    }
    sizes, advice = {"matrix": 1024, "rows": 512, "width": 256}, ("float32", "half precision is slower here")
    diagnosis = Diagnosis(dataclasses.replace(CPU, half_instructions=None), sizes, rates, steps, *advice)
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    return diagnosis


def test_tables_say_what_was_measured_on_what(diagnosed, capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "\nAMD EPYC (cpu), Linux x86_64, 2 cores; jax 0.12.0, jaxlib 0.12.0\n" in shown
    measured = "Shortest times of a matmul of 1024 x 1024 matrices, and of a perceptron of 512 inputs, 256 x 1024"
    assert measured in " ".join(shown.split())
    assert "Recommended policy: float32\nWhy: half precision is slower here.\n" in shown
    assert shown.count("over float32") == 2  # the same words over both columns
    rows = {line.split("  ")[0]: " ".join(line.split()) for line in shown.splitlines()}
    assert rows["float8_e4m3fn"] == "float8_e4m3fn ? 0.125 0.75x"
    assert rows["int8"] == "int8 - not supported -"
    # The names of both tables are the same: the second one's rows stand.
    assert rows["bfloat16"] == "bfloat16 3 bfloat16, 2 float32 25.00 0.80x"
    assert rows["float16"] == "float16 ? 10.00 2.00x"
    assert "busy" not in shown
    diagnosed.steps["bfloat16"] = StepTime(0.025, Speedup(0.8, 0.6, 1.0))
    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "This machine is busy: speed-ups of the perceptron vary by 50%. Run this again when idle. Recom" in shown


def test_json_is_one_document_whose_keys_are_in_the_help(diagnosed, capsys):
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == diagnosed.to_dict()
    missing = {"multiplied_in": None, "teraflops": None, "speedup": None}
    assert shown["matmuls"][-1] == {"name": "int8", "dtype": "int8"} | missing
    assert main(["doctor", "--help"]) == 0
    listed = capsys.readouterr().out
    assert [key for key in shown if key not in listed] == []


@pytest.mark.slow
def test_the_bare_package_suffices():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('matplotlib', 'orbax')))\n"  # their import fails
        "from jmp_policy.cli import main\n"
        "import jmp_policy.cli._doctor as diagnosis\n"
        "diagnosis.SIZES = {'cpu': {'matrix': 16, 'rows': 16, 'width': 16}}\n"
        "statuses = [main(a.split()) for a in ('--version', 'doctor', 'audit os:getcwd')]\n"
        "sys.exit(statuses != [0, 0, 0])"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # a GPU's libraries write to stderr
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Recommended policy: " in done.stdout
    assert "no findings" in done.stdout


def test_the_shortest_times_are_compared_and_thirds_that_disagree_show_the_noise():
    assert doctor.compare_times([2.0, 2.0, 2.0, 50.0], [1.0, 1.0, 1.0, 90.0]) == Speedup(2.0, 2.0, 2.0)
    assert doctor.compare_times([1.0, 1.0, 1.0], [0.5, 1.0, 2.0]) == Speedup(2.0, 0.5, 2.0)


def test_calls_take_turns_and_a_slow_machine_has_fewer_rounds():
    called = []
    seconds = doctor.time_rounds({name: lambda name=name: called.append(name) for name in "abc"}, clock=lambda: 0.0)
    assert "".join(called[:9]) == "abcbcacab"  # each round begins with another
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", doctor.ROUNDS)
    now = iter(range(10**6))  # each look at the clock takes a second
    seconds = doctor.time_rounds({"a": lambda: None}, clock=lambda: float(next(now)))
    assert doctor.MOST_SECONDS < doctor.FEWEST_ROUNDS
    assert seconds == {"a": [1.0] * doctor.FEWEST_ROUNDS}


def test_matmuls_of_a_program_and_of_a_step_are_told_and_counted():
    assert doctor.measure_matmuls(32, ["float32 highest"])[0].multiplied_in == "float32"
    assert doctor.read_matmuls(jax.jit(jnp.exp).lower(jnp.ones(8)).compile().as_text()) == []
    steps = doctor.measure_steps(32, 16, dtypes=["float32"])
    assert steps["float32"].multiplied_in == {"float32": 5}  # two forward, three backward
    assert steps["float32"].speedup == Speedup(1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("%a = f16[8]{0} parameter(0)\n%b = f16[8]{0} parameter(1)\nROOT %c = f32[] dot(%a, %b), x={0}", ["float16"]),
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
def test_matmuls_are_read_from_the_text_of_a_program(text, dtypes):
    assert doctor.read_matmuls(text) == dtypes


@pytest.mark.parametrize(
    ("facts", "instructions"),
    [
        ({"flags": "fpu avx2 f16c"}, {"bfloat16": (), "float16": ()}),  # f16c only converts
        ({"flags": "amx_bf16 avx512_fp16"}, {"bfloat16": ("amx_bf16",), "float16": ("avx512_fp16",)}),
        ({"Features": "fp asimd asimdhp bf16"}, {"bfloat16": ("bf16",), "float16": ("asimdhp",)}),  # ARM
        ({"model name": "unknown"}, None),
    ],
)
def test_instructions_are_those_that_linux_lists(facts, instructions):
    assert doctor.find_half_instructions(facts) == instructions


def test_the_machine_is_named_with_its_versions(monkeypatch):
    machine = doctor.find_machine()
    assert machine.platform == jax.default_backend()
    assert str(machine).endswith(f"; jax {jax.__version__}, jaxlib {doctor.list_versions()['jaxlib']}")
    monkeypatch.setattr(doctor, "PACKAGES", ("jax", "no_such_package"))
    assert doctor.list_versions()["no_such_package"] == "not installed"


def recommend(steps, matmuls=(1.0, 1.0), kept=("bfloat16", "float16"), machine=GPU, widened=None):
    """The policy and the reason for speed-ups of steps and matmuls in bfloat16 and float16."""
    sure = lambda value: Speedup(value, value * 0.99, value * 1.01)
    rates = [MatmulRate(f"float32 {name}", "float32", "float32", 1.0, 1.0) for name in ("highest", "default")]
    for name, speedup, dtype in zip(("bfloat16", "float16"), matmuls, kept, strict=True):
        rates.append(MatmulRate(name, name, dtype, None if speedup is None else 1.0, speedup))
    speedups = [step if isinstance(step, Speedup) else sure(step) for step in steps]
    times = {"float32": StepTime(1.0, sure(1.0))}
    times |= {name: StepTime(1.0, x, widened or {}) for name, x in zip(("bfloat16", "float16"), speedups, strict=True)}
    return recommend_policy(rates, times, machine)


@pytest.mark.parametrize(
    ("steps", "matmuls", "dtype"),
    [
        ((1.9, 2.0), (1.0, 1.0), "bfloat16"),  # float16 gains too little for its loss scale
        ((1.9, 2.4), (1.0, 1.0), "float16"),
        ((1.2, Speedup(1.8, 1.15, 1.9)), (1.0, 1.0), "bfloat16"),  # too noisy to say that float16 is faster
        ((0.8, 1.9), (1.0, 1.0), "float16"),
        ((1.04, 0.9), (1.0, 1.0), "float32"),
        ((Speedup(1.23, 1.05, 1.8), 0.9), (1.0, 1.0), "float32"),  # the noise exceeds the gain
        ((Speedup(1.4, 0.9, 1.5), 0.9), (1.0, 1.0), "float32"),  # a third of the turns says slower
        ((1.3, 1.3), (0.8, 0.8), "bfloat16"),  # matmuls decide nothing
    ],
)
def test_the_time_of_a_step_decides(steps, matmuls, dtype):
    expected = dtype if dtype == "float32" else f"params=float32,compute={dtype},output=float32"
    assert recommend(steps, matmuls)[0] == expected


CONVERTED = ("float32", "float32")
REASONS = [  # what was measured, and what is said of it
    (((1.9, 1.85), (7.5, 7.25)),
     r"forward and backward run at 1.90x the speed of float32 in bfloat16 \(matmuls alone 7.50x\) and 1.85x the speed "
     r"of float32 in float16 \(matmuls alone 7.25x\); bfloat16 has the range of float32, so it needs no loss scale$"),
    (((0.8, 1.9),), ".*; float16 has a small range, so it needs a dynamic loss scale$"),
    (((0.85, 0.9), (1.02, 1.08), CONVERTED, CPU),
     "half precision is slower here: forward and backward run at 0.85x .*; jaxlib 0.12.0 computes the matmuls of both "
     "by converting to float32$"),
    (((0.8, 0.9), (0.7, 0.9), ("bfloat16", "float32"), CPU),
     ".*; jaxlib 0.12.0 leaves bfloat16 matmuls in bfloat16, but they run no faster than in float32, and Linux lists "
     "no bfloat16 instructions for this CPU; jaxlib 0.12.0 computes float16 matmuls by converting to float32$"),
    (((0.8, 0.9), (1.0, 1.0), ("bfloat16", "float16"),
      Machine("cpu", "Xeon", "Linux", VERSIONS, {"bfloat16": ("avx512_bf16", "amx_bf16"), "float16": ()})),
     ".*run no faster than in float32, although Linux lists avx512_bf16 and amx_bf16 for this CPU"),
    (((0.8, 0.9),), "(?!.*lists)"),  # nothing lists the instructions of a GPU
    (((0.8, 0.9), (1.6, 2.0), ("bfloat16", "float16"), CPU, {"bfloat16": 3, "float32": 2}),
     ".*bfloat16 matmuls are quick here, but the rest of the step is not, in which 2 of 5 matmuls are in float32; "
     "float16 matmuls are quick here, but the rest of the step is not"),
    (((Speedup(1.1, 0.9, 1.2), 0.97),), r"half precision gains no time here, within the noise: .*1.10x the speed of "
     r"float32 in bfloat16 \(a tie; matmuls alone 1.00x\)"),
    (((0.8, 1.0),), "half precision gains no time here: forward"),  # a tie is not called slower
    (((0.8, 0.9), (0.7, 0.9), (None, None)),
     "(?!.*jaxlib).*; bfloat16 matmuls run no faster than in float32; float16 matmuls run no faster"),
    (((0.8, 0.9), (1.0, None)),
     r".*in float16 \(no matmuls\).*jaxlib 0.12.0 has no matmul in float16 for this device$"),
]  # fmt: skip


@pytest.mark.parametrize(("measured", "reason"), REASONS)
def test_a_recommendation_has_its_reason(measured, reason):
    assert re.match(reason, recommend(*measured)[1])
