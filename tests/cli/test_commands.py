"""The commands but `doctor`: what they print and write of the functions of a user."""

import importlib
import io
import json
import os
import sys

import jax
import numpy as np
import pytest

import jmp_policy as jmp
from jmp_policy.cli import main

# What is still printed when the interpreter exits goes through no command.
from jmp_policy.cli._main import spell_signs_plainly

pytestmark = pytest.mark.usefixtures("folder")

AUDIT = ["audit", "user:product", "--args", "user:shapes"]
NUMERICS = ["numerics", "user:product", "--args", "user:arguments", "--of", "forward"]
DIVERGE = ["diverge", "user:product", "user:doubled", "--args", "user:arguments"]
LOCK = ["lock", "user:product", "--args", "user:shapes", "-o", "product.lock"]
TUNE = ["tune", "user:net", "--args", "user:ones"]


def read_json(command, capsys, noise=""):
    """The one document that a command prints, whose first keys are the same everywhere."""
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert set(captured.err.splitlines()) == {noise} - {""}
    assert list(document)[:3] == ["versions", "device", "function"]
    assert document["versions"]["jax"] == jax.__version__
    assert document["device"]["platform"] == jax.default_backend()
    assert document["function"] == command[1]
    assert main([command[0], "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [key for key in document if key not in shown] == []
    return document


def test_a_lock_is_written_and_a_difference_is_status_1(capsys, folder):
    assert main([*LOCK, "--platform", "cuda"]) == 0
    text = (folder / "product.lock").read_text()
    assert capsys.readouterr().out == f"product.lock: {len(text.splitlines())} lines\n"
    assert "function: product\nplatform: cuda\n" in text
    assert "head | forward matmul | bfloat16 x bfloat16 -> bfloat16 | 1 time\n" in text
    assert main([*LOCK, "--check"]) == 0
    assert capsys.readouterr().out == "no differences in product\n"
    other = [*LOCK[:3], "user:ones", *LOCK[4:], "--check"]
    assert main(other) == 1
    shown = capsys.readouterr().out
    assert "head | forward matmul | " in shown
    assert shown.endswith("\n\nIf you meant to change it: the same command without --check\n")
    assert "  + float32 x float32 -> float32, multiplied in TF32: 1 time\n" in shown
    assert (folder / "product.lock").read_text() == text
    assert main([*LOCK, "--compiled", "--platform", "cpu"]) == 0
    assert "compiled for: " in (folder / "product.lock").read_text()


@pytest.mark.parametrize(("command", "before", "message"), [
    ([*LOCK, "--check"], None, "--check: product.lock is missing or empty. Write it first, without --check"),
    ([*LOCK, "--check"], "", "--check: product.lock is missing or empty. Write it first, without --check"),
    (LOCK, "import jax", "product.lock is not a lock: it starts with 'import jax'. Pass"),
    ([*LOCK, "--check"], "import jax", "product.lock is not a lock: it starts with 'import jax'."),
    ([*LOCK, "-o", "none/product.lock"], None, "--output none/product.lock: the folder none does not exist"),
    ([*LOCK, "-o", "."], None, "--output . is a folder: name a file."),
    ([*LOCK, "-o", "-"], None, "--output - is not a file: name one. For example: -o numerics.lock"),
    ([*LOCK, "-o", "a" * 300], None, f"--output {'a' * 300}: File name too long"),
    (["lock", "user:none"], None, "The lock of none was not written: it has no floating-point operation or result"),
    (["lock", "user:forgetful", *LOCK[2:]], None, "The lock of forgetful was not written: it has no floating-point"),
    ([*LOCK, "--platform", "cuda", "--compiled"], None, "There is no cuda here to compile for. Lock the tr"),
    (["lock", "user:number"], None, "'user:number' is not a function, but 3"),
    (["lock", "user:failing", *LOCK[2:]], None, "user:failing raised RuntimeError: no data, at "),
])  # fmt: skip
def test_a_lock_that_cannot_be_made_is_an_error_of_one_line(command, before, message, capsys, folder):
    if before is not None:
        (folder / "product.lock").write_text(before)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1
    assert before is not None or not list(folder.glob("*.lock"))
    assert before is None or (folder / "product.lock").read_text() == before


def test_a_lock_of_another_function_is_not_overwritten_and_a_damaged_one_is(capsys, folder):
    assert main(LOCK) == 0
    before = (folder / "product.lock").read_text()
    assert main(["lock", "user:doubled", *LOCK[2:]]) == 2
    said = "product.lock is of product, not of doubled. Name another with -o, or delete it if the function was renamed"
    assert said in capsys.readouterr().err
    assert main(["lock", "user:doubl", *LOCK[2:]]) == 2
    assert "user has no 'doubl', of 'user:doubl'. Did you mean 'doubled'?" in capsys.readouterr().err
    assert main(["lock", "user:noisy", *LOCK[2:], "--check"]) == 0
    assert capsys.readouterr().out == "no differences in product\nfunction: product, now noisy\n"
    assert (folder / "product.lock").read_text() == before
    (folder / "product.lock").write_text(before.replace("bfloat16", "float16"))
    assert main([*LOCK, "--check"]) == 2
    assert "the digest does not match the lines" in capsys.readouterr().err
    assert main(LOCK) == 0
    assert (folder / "product.lock").read_text() == before


def test_the_command_and_a_test_write_the_same_file(folder):
    assert main(LOCK) == 0
    before = (folder / "product.lock").read_text()
    user = importlib.import_module("user")
    jmp.numerics.assert_locked("product.lock", user.product, update=True)(*user.shapes())
    assert (folder / "product.lock").read_text() == before
    assert main(LOCK) == 0
    assert (folder / "product.lock").read_text() == before
    assert main(["lock", "user:partial", "--args", "user:one"]) == 0
    assert "function: named\n" in (folder / "numerics.lock").read_text()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_pipe_is_not_waited_for(options, capsys, folder):
    os.mkfifo(folder / "pipe")
    assert main([*LOCK, "-o", "pipe", *options]) == 2
    assert capsys.readouterr().err.startswith("jmp-policy: error: pipe is not a regular file. Pass another name.")


def test_a_damaged_lock_without_platform_needs_one(capsys, folder):
    assert main([*LOCK, "--platform", "cuda"]) == 0
    before = (folder / "product.lock").read_text()
    (folder / "product.lock").write_text(before.replace("platform: cuda\n", ""))
    assert main(LOCK) == 2
    assert "product.lock is damaged, and has platform ''. Name the platform to rege" in capsys.readouterr().err
    assert main([*LOCK, "--platform", "cuda"]) == 0
    assert (folder / "product.lock").read_text() == before


def test_an_audit_is_printed_and_findings_are_status_1_if_strict(capsys, line_of):
    assert main([*AUDIT, "--strict"]) == 0
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("bf16", "dot_general", "no findings"))
    command = ["audit", "user:Model.apply", "--args", "user:one"]
    assert main(command) == 0
    assert main([*command, "--strict"]) == 1
    shown = " ".join(capsys.readouterr().out.split()).replace("Model.apply", "apply")
    assert f"{line_of('return jnp.cumsum(x)')}(apply): half-cumulative" in shown


def test_an_audit_as_json_has_the_lines_of_its_findings(capsys, line_of):
    command = ["audit", "user:noisy_sum", "--args", "user:one"]
    document = read_json(command, capsys, noise="running")
    (finding,) = document["findings"]
    assert finding["id"] == "half-cumulative"
    assert finding["source"].endswith(f"{line_of('def noisy_sum')}(noisy_sum)")
    assert [row["operation"] for row in document["rows"]] == ["cumsum"]
    assert main([*command, "--json", "--strict"]) == 1


@pytest.mark.parametrize(("encoding", "arrow"), [("cp1252", ">"), ("ascii", ">"), ("utf-8", "→")])
def test_signs_that_a_pipe_has_no_code_for_are_plain(encoding, arrow, monkeypatch):
    """As on Windows, where a pipe has the code page of the machine; a terminal has all signs."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(AUDIT) == 0
    with spell_signs_plainly():
        output.write("half → ← ∞")
    output.seek(0)
    shown = output.read()
    assert ("─" if arrow == "→" else "-") * 20 in shown
    assert shown.endswith("half → ← ∞" if arrow == "→" else "half > ? ?")
    assert output.errors == "strict"


@pytest.mark.slow
def test_numerics_are_printed_with_the_formats_that_were_asked_for_and_a_page_and_a_plot(capsys, folder, line_of):
    assert main([*NUMERICS, "--formats", "float8_e5m2", "int8", "--html", "page.html", "--plot", "plot.png"]) == 0
    header, _, line, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[-4:] == ["amax", "rms", "e5m2", "int8"]
    assert line.split()[:4] == ["head", "dot_general", line_of("return x @ w").strip(), "forward"]
    assert line.split()[4:7] == ["4.5e-08", "4.5e-08", "↓100%"]
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "<title>numerics of user:product</title>" in page
    assert "dot_general" in page
    assert "://" not in page.replace("http://www.w3.org/2000/svg", "")  # it needs no network
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_numerics_as_json_have_exact_counts(capsys):
    command = ["numerics", "user:noisy", *NUMERICS[2:], "--where", "head", "--formats", "float16"]
    (row,) = read_json(command, capsys, noise="running")["rows"]
    assert (row["path"], row["primitive"], row["count"]) == ("head", "dot_general", 8)
    assert row["amax"] == 3 * 2.0**-26
    assert row["formats"]["float16"]["subnormal"] == 1.0
    assert main(["numerics", "user:none"]) == 0
    assert "Nothing was observed" in capsys.readouterr().out


def test_a_divergence_is_printed_as_a_table_a_page_and_json(folder, capsys):
    assert main([*DIVERGE, "--html", "page.html"]) == 0
    _, _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["head", "forward", "float32", "1"]
    assert "head" in (folder / "page.html").read_text(encoding="utf-8")
    [row] = read_json(DIVERGE, capsys)["rows"]
    assert (row["path"], row["introduced"], row["incoming"]) == ("head", 1, 0)


PARITY = ["parity", "user:trainer", "user:sampler", "--args", "user:tokens", "--mask", "user:mask"]


def test_parity_is_printed_as_tables_and_json_and_a_bound_sets_the_status(folder, capsys):
    assert main([*PARITY, "--plot", "plot.png", "--mean", "1", "--largest", "1"]) == 0
    printed = capsys.readouterr().out
    cause = "The sampler's logits are 1.25 times the trainer's, and head introduces 0.19: its scale is another one"
    assert cause in " ".join(printed.split())
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    document = read_json(PARITY, capsys)
    assert document["count"] == 3
    assert document["rows"][0]["path"] == "head"
    assert main([*PARITY, "--mean", "1e-6"]) == 1
    assert main([*PARITY, "--mean", "-1"]) == 2
    assert "--mean is a difference of log-probabilities, a number above 0, got -1.0" in capsys.readouterr().err
    np.savez(folder / "recording.npz", head=np.ones(3, np.float32))
    assert main([*PARITY[:2], "recording.npz", *PARITY[3:]]) == 2
    assert capsys.readouterr().err.startswith("jmp-policy: error: recording.npz: The recording has neither logits")


def test_recorded_values_are_read_from_a_file(folder, capsys):
    command = [*DIVERGE[:2], "recording.npz", *DIVERGE[3:]]
    np.savez(folder / "recording.npz", head=np.full((2, 4), 3 * 2.0**-27, np.float32))
    assert main(command) == 0
    printed = " ".join(capsys.readouterr().out.split())  # lines as wide as the terminal
    assert "head introduces the largest error: 1 (forward), if product replaces the recording there alone." in printed
    np.savez(folder / "recording.npz", tail=np.ones(3, np.float32))
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("jmp-policy: error: recording.npz: No value of the recording belongs to")


@pytest.mark.slow
def test_a_map_is_printed_as_code_and_as_json(capsys):
    assert main(TUNE) == 0
    shown = capsys.readouterr().out
    assert [rule.key for rule in eval(shown[shown.index("jmp.PolicyMap(") :]).rules] == ["big"]
    document = read_json(TUNE, capsys, noise="running")
    assert document["scopes"] == ["big"]
    assert eval(document["code"]) == jmp.PolicyMap.from_config(document["policy_map"])


@pytest.mark.slow
def test_a_page_a_plot_and_the_trials_of_a_search_are_written(folder, capsys):
    command = [*TUNE, "--html", "page.html", "--plot", "plot.png", "--trials", "trials.jsonl"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "<title>tune of user:net</title>" in (folder / "page.html").read_text(encoding="utf-8")
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")
    trials = (folder / "trials.jsonl").read_text(encoding="utf-8")
    assert main(command) == 0
    assert capsys.readouterr().out == first
    assert (folder / "trials.jsonl").read_text(encoding="utf-8") == trials


@pytest.mark.slow
def test_a_module_and_a_metric_are_tuned(capsys):
    assert main(["tune", "user_model:model", "--args", "user_model:inputs", "--tolerance", "0.1"]) == 0
    assert "scopes of Linear can go to float16" in capsys.readouterr().out
    assert main([*TUNE, "--metric", "user:train"]) == 0
    assert "'big'" in capsys.readouterr().out


def test_a_budget_that_was_spent_is_said(capsys):
    assert main([*TUNE, "--budget", "1"]) == 0  # all in float32, which is within the tolerance
    assert "The budget ran out" in capsys.readouterr().out


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("jmp_policy.numerics._audit._Inspector", fail)
    monkeypatch.setattr("jmp_policy.numerics._collect._describe_line", fail)
    for command in (AUDIT, NUMERICS):
        with pytest.raises(RuntimeError, match="a bug"):
            main(command)
