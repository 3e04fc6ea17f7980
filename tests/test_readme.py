"""The README is true: its Python runs, and its commands are complete."""

import pathlib
import re

import jax
import pytest

import jmp_policy as jmp

README = pathlib.Path(__file__).parent.parent / "README.md"
TEXT = README.read_text()


@pytest.fixture
def _standard_promotion():
    with jax.numpy_dtype_promotion("standard"):  # as a user runs it
        yield


@pytest.mark.usefixtures("_standard_promotion")
def test_every_python_block_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)
    assert "loss_scale" in capsys.readouterr().out
    assert jmp.metrics(namespace["optimizer"])["loss_scale"] == 2.0**15


@pytest.mark.usefixtures("_standard_promotion")
def test_its_train_step_computes_the_loss_in_float32_on_a_tpu_too():
    """A loss in bfloat16 is a warning, which is an error here."""
    step = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
    (spelling,) = re.findall(r'On a TPU write `"(.*?)"` and change nothing else', TEXT)
    namespace: dict[str, object] = {}
    step = step.replace("params=float32,compute=float16,output=float32", spelling)
    exec(compile(step, str(README), "exec"), namespace)
    assert namespace["policy"].compute_dtype == "bfloat16"
    assert namespace["loss"].dtype == "float32"


def test_there_are_two_commands_each_complete_on_a_fresh_machine():
    commands = [line for line in TEXT.splitlines() if line.startswith("python3 -m venv")]
    assert commands == [
        "python3 -m venv .venv && .venv/bin/pip install -e '.[demo]' && .venv/bin/jmp-policy train",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[test]' && .venv/bin/pytest",
    ]


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", TEXT):
        assert (README.parent / link).exists(), link
