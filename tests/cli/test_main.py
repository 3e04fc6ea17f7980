"""The command line: exit statuses, one line for each error, and what the commands print."""

import builtins
import dataclasses
import math
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

import examples.gpt as demo
import jmp_policy as jmp
from jmp_policy.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "no/such"], "jmp-policy: error: --data no/such does not exist: give text files"),
        (["train", "--policy", "float61", "--out", "x"], "jmp-policy: error: --policy: Unknown dtype"),
        (["train", "--resume", "--out", "none"], "jmp-policy: error: no run to resume in none"),
        (["train", "--steps", "0"], "jmp-policy train: error: argument --steps: expected an integer from 1 to"),
        (["train", "--seed", "-1"], "jmp-policy train: error: argument --seed: expected an integer from 0 to"),
        (["train", "--api", "torch"], "jmp-policy train: error: argument --api: invalid choice: 'torch'"),
        (["compare", "--data", "no/such"], "jmp-policy: error: --data no/such does not exist"),
        (
            ["fly"],
            "jmp-policy: error: there is no command 'fly'. Known are 'train', 'compare', 'doctor', 'audit', "
            "'numerics', 'tune'.",
        ),
        (["docter"], "jmp-policy: error: there is no command 'docter'. Did you mean 'doctor'?"),
        (["--verison"], "jmp-policy: error: there is no option '--verison'. Did you mean '--version'?"),
        (["-x"], "jmp-policy: error: there is no option '-x'. Known are '--help', '--version'."),
        (["train", "--polcy=x"], "jmp-policy train: error: there is no option '--polcy=x'. Did you mean '--policy'?"),
        (["doctor", "cpu"], "jmp-policy doctor: error: 'cpu' is one word too many. jmp-policy doctor --help shows"),
        (["audit"], "jmp-policy audit: error: the following arguments are required: MODULE:FUNCTION"),
        (
            [],
            "jmp-policy: error: which command? train, compare, doctor, audit, numerics or tune: jmp-policy --help "
            "says what they do",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_missing_extra_is_one_line_that_says_what_to_install(capsys, monkeypatch):
    import_module = builtins.__import__

    def without_orbax(name, *args, **kwargs):
        if name.startswith("orbax"):
            raise ModuleNotFoundError("No module named 'orbax'", name="orbax")
        return import_module(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("examples.gpt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_orbax)
    assert main(["train"]) == 2
    assert capsys.readouterr().err == "jmp-policy: error: orbax is not installed: pip install 'jmp-policy[demo]'\n"


def test_help_is_status_0(capsys):
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_the_versions_are_one_line(capsys):
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "optax")]
    python = platform.python_version()
    assert shown == f"jmp_policy {jmp.__version__} (python {python}, {', '.join(versions)})\n"


@pytest.fixture
def trained(monkeypatch):
    """Stands in for training: sets its result, or its error."""

    def set_result(result):
        def train(options, console):
            if isinstance(result, BaseException):
                raise result
            return result

        monkeypatch.setattr(demo, "train", train)

    return set_result


SUMMARY = demo.RunSummary(
    policy="mixed_float16",
    step=1500,
    facts=demo.StepFacts({"float16": 1.0}, {}, 24_500_000, 40_900_000),
    scale=demo.ScaleHistory(2.0**15, 2.0**16, 2.0**15, 2.0**19, 13, 12, 12, tuple(range(111, 1500, 111))[:12]),
)


def test_a_finished_run_is_shown_beside_its_baselines(trained, capsys):
    trained(demo.TrainResult(Path("out"), 10, True, 2.5, 4.8, 3.5, SUMMARY))
    assert main(["train"]) == 0
    shown = capsys.readouterr().out
    for text in ("2.500", "4.800", "3.500", "The model beats the bigram baseline.", "out/ holds summary.json, "):
        assert text in shown


def test_a_run_ends_with_what_its_policy_did_in_80_columns(trained, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    trained(demo.TrainResult(Path("out"), 10, True, 2.5, 4.8, 3.5, SUMMARY))
    main(["train"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    cells = [re.split(r"\s*│\s*", line)[1:3] for line in lines if line.startswith("│")]
    assert cells[:6] == [  # no row is broken into two
        ["policy", "mixed_float16"],
        ["matmul flops", "100.0% in float16"],
        ["kept for backward", "24.5 MB, 0.60 of float32's 40.9 MB"],
        ["loss scale", "2^15 to 2^16, between 2^15 and 2^19"],
        ["its moves", "13 up, 12 down"],
        ["skipped steps", "12 of 1,500: 111, 222, 333, 444, 555, 666, 6 more"],
    ]


def test_a_worse_model_is_not_praised(trained, capsys):
    trained(demo.TrainResult(Path("out"), 10, True, 3.6, 4.8, 3.5, SUMMARY))
    assert main(["train"]) == 0
    assert "The model does not beat the bigram baseline." in capsys.readouterr().out


@pytest.mark.parametrize(("interrupted", "status"), [(True, 130), (False, 0)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_says_how_to_continue(trained, capsys, interrupted, status):
    trained(demo.TrainResult(Path("out"), 7, False, math.nan, 4.8, 3.5, SUMMARY, interrupted=interrupted))
    assert main(["train"]) == status
    shown = capsys.readouterr().out
    assert "saved at step 7; continue with: jmp-policy train --resume --out out" in shown
    assert "100.0% in float16" in shown


def test_control_characters_in_names_are_escaped(trained, capsys):
    summary = dataclasses.replace(SUMMARY, policy="pol\x1b[31m")
    trained(demo.TrainResult(Path("out\x1b[2J"), 7, False, math.nan, 4.8, 3.5, summary))
    main(["train"])
    trained(FloatingPointError("stuck in \x1b]0;out\x07"))
    main(["train"])
    main(["train", "\x1b[2J"])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    for text in (r"pol\x1b[31m", r"--out out\x1b[2J"):
        assert text in shown.out
    assert r"stuck in \x1b]0;out\x07" in shown.err


@pytest.mark.parametrize(("error", "status"), [(FloatingPointError("stuck"), 1), (KeyboardInterrupt(), 130)])
def test_stuck_and_interrupted_runs_end_in_one_line(trained, capsys, error, status):
    trained(error)
    assert main(["train"]) == status
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to initialize\nbackend 'cuda'"), ": Unable to initialize backend 'cuda'"),
        (AssertionError(), ", perhaps because jaxlib was installed without it"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(error, said, monkeypatch, capsys):
    def find_none():
        raise error

    monkeypatch.setattr(jax, "devices", find_none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main(["doctor"]) == 2
    expected = f"jmp-policy: error: JAX finds no device, with JAX_PLATFORMS='cuda'{said}\n"
    assert capsys.readouterr().err == expected


def test_another_error_keeps_its_traceback(trained):
    trained(RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])
