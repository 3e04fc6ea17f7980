"""`jmp-policy doctor`: its tables, its recommendation and its JSON, of a diagnosis that was made up."""

import json
import os
import subprocess
import sys

import pytest

import jmp_policy.cli._doctor as doctor
from jmp_policy.cli import main
from jmp_policy.cli._doctor import MATMULS, Diagnosis, Machine, MatmulRate, Speedup, StepTime, list_versions

MACHINE = Machine("cpu", "AMD EPYC", "Linux x86_64, 2 cores", list_versions() | {"jax": "0.10.2", "jaxlib": "0.10.2"})


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
    diagnosis = Diagnosis(MACHINE, sizes, rates, steps, *advice)
    monkeypatch.setattr(doctor, "diagnose", lambda: diagnosis)
    return diagnosis


def read_rows(shown: str) -> dict[str, str]:
    """The lines of both tables, by their first cell."""
    return {line.split("  ")[0]: " ".join(line.split()) for line in shown.splitlines() if line}


@pytest.mark.usefixtures("diagnosed")
def test_tables_say_what_was_measured_on_what(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "\nAMD EPYC (cpu), Linux x86_64, 2 cores; jax 0.10.2, jaxlib 0.10.2\n" in shown
    measured = "Shortest times of a matmul of 1024 x 1024 matrices, and of a perceptron of 512 inputs, 256 x 1024"
    assert measured in " ".join(shown.split())
    assert "Recommended policy: float32\nWhy: half precision is slower here.\n" in shown


@pytest.mark.usefixtures("diagnosed")
def test_every_speed_up_is_larger_where_it_is_faster(capsys):
    main(["doctor"])
    shown = capsys.readouterr().out
    assert shown.count("over float32") == 2  # the same words over both columns
    rows = read_rows(shown)
    assert rows["float8_e4m3fn"] == "float8_e4m3fn ? 0.125 0.75x"
    assert rows["int8"] == "int8 - not supported -"
    # The names of both tables are the same: the second one's rows stand.
    assert rows["bfloat16"] == "bfloat16 3 bfloat16, 2 float32 25.00 0.80x"
    assert rows["float16"] == "float16 ? 10.00 2.00x"


def test_a_busy_machine_is_said(diagnosed, capsys):
    main(["doctor"])
    assert "busy" not in capsys.readouterr().out
    diagnosed.steps["bfloat16"] = StepTime(0.025, Speedup(0.8, 0.6, 1.0))
    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "This machine is busy: speed-ups of the perceptron vary by 50%. Run this again when idle. Recom" in shown


def test_json_is_one_document_and_nothing_else(diagnosed, capsys):
    assert main(["doctor", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == diagnosed.to_dict()
    assert shown["matmuls"][-1] == {
        "name": "int8",
        "dtype": "int8",
        "multiplied_in": None,
        "teraflops": None,
        "speedup": None,
    }


def test_help_lists_the_keys_of_json(diagnosed, capsys):
    assert main(["doctor", "--help"]) == 0
    shown = capsys.readouterr().out
    for key in diagnosed.to_dict():
        assert key in shown


@pytest.mark.exhaustive
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
    assert "jmp_policy" in done.stdout
    assert "Recommended policy: " in done.stdout
    assert "no findings" in done.stdout
