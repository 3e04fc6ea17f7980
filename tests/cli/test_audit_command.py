"""`jmp-policy audit`: the function is imported from the current folder, and what is wrong with its name is one line."""

import sys

import pytest

from jmp_policy.cli import main

MODULE = """
import jax, jax.numpy as jnp

number = 3

class Model:
    @staticmethod
    def apply(x):
        return jnp.cumsum(x)

def good(x, w):
    return x @ w

def arguments():
    return jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)

def one():
    return jax.ShapeDtypeStruct((8,), jnp.float16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with a module, which is the current one."""
    (tmp_path / "audited_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("audited_module", None)


def test_report_is_printed(capsys):
    assert main(["audit", "audited_module:good", "--args", "audited_module:arguments", "--strict"]) == 0
    shown = capsys.readouterr().out
    assert "bf16" in shown
    assert "dot_general" in shown
    assert "no findings" in shown


def test_findings_are_status_1_if_strict(capsys):
    command = ["audit", "audited_module:Model.apply", "--args", "audited_module:one"]
    assert main(command) == 0
    assert main([*command, "--strict"]) == 1
    assert "audited_module.py:9 (apply): half-cumulative" in capsys.readouterr().out.replace("Model.apply", "apply")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("good", "'good' names no function. For example: train:train_step"),
        ("absent_module:f", "there is no module 'absent_module', of 'absent_module:f'"),
        ("audited_module:god", "audited_module has no 'god', of 'audited_module:god'"),
        ("audited_module:number", "'audited_module:number' is no function, but 3"),
    ],
)
def test_bad_name_is_one_line_and_status_2(name, message, capsys):
    assert main(["audit", name]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1


def test_module_that_lacks_another_keeps_its_traceback(tmp_path):
    (tmp_path / "lacking_module.py").write_text("import absent_module")
    with pytest.raises(ModuleNotFoundError, match="absent_module"):
        main(["audit", "lacking_module:f"])
