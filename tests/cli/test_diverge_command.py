"""`jmp-policy diverge`: two functions run once, and errors of the user are one line."""

import json

import numpy as np
import pytest

from jmp_policy.cli import main

pytestmark = pytest.mark.usefixtures("folder")

MODULE = """
import jax, jax.numpy as jnp

def f(x):
    with jax.named_scope("head"):
        return 2 * x

def g(x):
    with jax.named_scope("head"):
        return 2.5 * x

def arguments():
    return jnp.ones(3)

def shapes():
    return jax.ShapeDtypeStruct((3,), jnp.float32)

def of_two(x, y):
    return x
"""
NAME = "diverging_module"
COMMAND = ["diverge", f"{NAME}:f", f"{NAME}:g", "--args", f"{NAME}:arguments"]


def test_table_is_printed_and_a_page_written(folder, capsys):
    assert main([*COMMAND, "--html", "page.html"]) == 0
    _, _, line, *_ = capsys.readouterr().out.splitlines()
    assert line.split()[:4] == ["head", "forward", "float32", "0.25"]
    assert "head" in (folder / "page.html").read_text(encoding="utf-8")


def test_json_is_one_document(capsys):
    assert main([*COMMAND, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["function"] == f"{NAME}:f"
    [row] = document["rows"]
    assert (row["path"], row["introduced"], row["incoming"]) == ("head", 0.25, 0)


def test_recorded_values_are_read_from_a_file(folder, capsys):
    np.savez(folder / "recording.npz", head=np.full(3, 1.6, np.float32))
    command = ["diverge", f"{NAME}:f", "recording.npz", "--args", f"{NAME}:arguments"]
    assert main(command) == 0
    assert "head introduces the largest error: 0.25 (forward), if f replaces the recording" in capsys.readouterr().out
    np.savez(folder / "recording.npz", tail=np.ones(3, np.float32))
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("jmp-policy: error: recording.npz: No value of the recording belongs to")
    assert main([*command[:2], "missing.npz", *command[3:]]) == 2
    assert "No such file or directory: 'missing.npz'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{NAME}:f", f"{NAME}:h"], f"{NAME} has no 'h', of '{NAME}:h'"),
        (
            [f"{NAME}:f", f"{NAME}:of_two"],
            f"--args {NAME}:arguments returns 1 argument, but {NAME}:of_two takes (x, y)",
        ),
    ],
)
def test_wrong_second_function_is_one_line(words, message, capsys):
    assert main(["diverge", *words, "--args", f"{NAME}:arguments"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1


def test_shapes_have_no_values_to_compare(capsys):
    assert main([*COMMAND[:3], "--args", f"{NAME}:shapes"]) == 2
    assert "returns ShapeDtypeStruct(shape=(3,), dtype=float32)" in capsys.readouterr().err
