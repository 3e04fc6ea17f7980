"""The command line: exit statuses, and one line for each error."""

import argparse
import re
from pathlib import Path

import pytest

from examples.gpt import UserError, __main__, train as train_module
from examples.gpt.devices import ToldElsewhere


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--data", "no/such"], "error: --data no/such does not exist: give text files or folders of them"),
        (["train", "--policy", "float61", "--out", "x"], "error: --policy: Unknown dtype"),
        (["train", "--resume", "--out", "none"], "error: no run to resume in none"),
        (["train", "--local-processes", "2", "--mesh", "data=3"], "error: --mesh data=3 has 3 devices, which 2"),
        (["compare", "--data", "no/such"], "error: --data no/such does not exist"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert __main__.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--seed", "-1"], ["--api", "torch"], ["--polcy=x"]])
def test_arguments_that_argparse_refuses_are_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        __main__.main(["train", *arguments])
    assert refused.value.code == 2
    with pytest.raises(argparse.ArgumentTypeError, match="expected an integer from 1 to 4294967295, got '0'"):
        __main__.integer(1)("0")


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (FloatingPointError("stuck"), 1, "error: stuck\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (ToldElsewhere("process 1 prints what is wrong"), 2, ""),
        (ModuleNotFoundError("", name="orbax"), 2, "error: orbax is not installed: pip install -e '.[demo]'\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line(raised, status, said, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise raised

    monkeypatch.setattr(train_module, "train", fail)
    assert __main__.main(["train"]) == status
    assert capsys.readouterr().err == said


def test_another_error_keeps_its_traceback(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(train_module, "train", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        __main__.main(["train"])


@pytest.mark.parametrize(("interrupted", "status"), [(True, 130), (False, 0)], ids=["Ctrl-C", "to its end or SIGTERM"])
def test_only_ctrl_c_is_a_status_of_its_own(interrupted, status, monkeypatch):
    asked = []
    monkeypatch.setattr(train_module, "train", lambda wishes, **others: asked.append((wishes, others)) or interrupted)
    assert __main__.main(["train", "--steps", "7", "--data", "a", "b", "--resume"]) == status
    assert asked == [({"steps": 7, "data": ["a", "b"]}, {"out": None, "resume": True})]


def test_the_example_uses_public_names_of_the_package_alone_in_at_most_1800_lines():
    sources = {path.name: path.read_text(encoding="utf-8") for path in Path(__main__.__file__).parent.glob("*.py")}
    assert len(sources) <= 10
    assert sum(source.count("\n") for source in sources.values()) <= 1800
    private = r"\bjmp(?:_policy)?\.(?:\w+\.)*_\w+|\bfrom jmp_policy[\w.]* import _\w+|jax\._src"
    assert {name: found for name, source in sources.items() if (found := re.findall(private, source))} == {}
