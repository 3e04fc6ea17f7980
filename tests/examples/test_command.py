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
    ("outcome", "status", "said"),
    [
        (FloatingPointError("stuck"), 1, "error: stuck\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (UserError("two\nlines"), 2, "error: two lines\n"),
        (ToldElsewhere("process 1 prints what is wrong"), 2, ""),
        (ModuleNotFoundError("", name="orbax"), 2, "error: orbax is not installed: pip install -e '.[demo]'\n"),
        (True, 130, ""),  # Ctrl-C
        (False, 0, ""),  # to its end, or SIGTERM
    ],
    ids=repr,
)
def test_each_end_of_a_training_has_a_status_and_at_most_one_line(outcome, status, said, capsys, monkeypatch):
    asked = []

    def end(wishes, **others):
        asked.append((wishes, others))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(train_module, "train", end)
    assert __main__.main(["train", "--steps", "7", "--data", "a", "b", "--resume"]) == status
    assert asked == [({"steps": 7, "data": ["a", "b"]}, {"out": None, "resume": True})]
    assert capsys.readouterr().err == said


def test_another_error_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train_module, "train", lambda *args, **kwargs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        __main__.main(["train"])


def test_the_example_uses_public_names_of_the_package_alone_in_at_most_1850_lines():
    sources = {path.name: path.read_text(encoding="utf-8") for path in Path(__main__.__file__).parent.glob("*.py")}
    assert len(sources) <= 10
    assert sum(source.count("\n") for source in sources.values()) <= 1850
    private = r"\bjmp(?:_policy)?\.(?:\w+\.)*_\w+|\bfrom jmp_policy[\w.]* import _\w+|jax\._src"
    assert {name: found for name, source in sources.items() if (found := re.findall(private, source))} == {}
