"""`jmp-policy audit`: the function is imported from the current folder, and what is wrong with its name is one line."""

import io
import json
import sys

import jax
import pytest

from jmp_policy.cli import main
from jmp_policy.cli._main import spell_signs_plainly

pytestmark = pytest.mark.usefixtures("folder")

NAME = "audited_module"
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

def noisy(x):
    print("tracing"); return jnp.cumsum(x)

def named(x, *, scale: float): return x * scale
def variadic(x, y=2, *rest): return x
def unfit():
    return jnp.ones((2, 3)), jnp.ones((2, 3))

def branch(x):
    return x if x.sum() > 0 else -x

def failing():
    raise RuntimeError("no data")

def silent(x):
    raise ValueError

def outer(x): return silent(x)
"""


def line_of(code: str, function: str) -> str:
    """Where a piece of the module stands."""
    return f"audited_module.py:{MODULE[: MODULE.index(code)].count(chr(10)) + 1} ({function})"


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
    shown = " ".join(capsys.readouterr().out.split())  # as one line
    assert "audited_module.py:9 (apply): half-cumulative" in shown.replace("Model.apply", "apply")


@pytest.mark.parametrize(("encoding", "arrow"), [("cp1252", ">"), ("ascii", ">"), ("utf-8", "→")])
def test_signs_that_a_pipe_has_no_code_for_are_plain(encoding, arrow, monkeypatch):
    """As on Windows, where a pipe has the code page of the machine; a terminal has all signs."""
    output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", output)
    assert main(["audit", "audited_module:good", "--args", "audited_module:arguments"]) == 0
    with spell_signs_plainly():
        output.write("half → ← ∞")
    output.seek(0)
    shown = output.read()
    assert ("─" if arrow == "→" else "-") * 20 in shown
    assert shown.endswith("half → ← ∞" if arrow == "→" else "half > ? ?")
    assert output.errors == "strict"


def test_json_is_one_document_and_nothing_else(capsys):
    command = ["audit", "audited_module:noisy", "--args", "audited_module:one", "--json"]
    assert main(command) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == "tracing\n"  # what the function prints
    assert list(document)[:3] == ["versions", "device", "function"]
    assert document["versions"]["jax"] == jax.__version__
    assert document["device"]["platform"] == jax.default_backend()
    assert document["function"] == "audited_module:noisy"
    (finding,) = document["findings"]
    assert finding["id"] == "half-cumulative"
    assert finding["source"].endswith(line_of("print(", "noisy"))
    assert [row["operation"] for row in document["rows"]] == ["cumsum"]
    assert main([*command, "--strict"]) == 1


def test_help_lists_the_keys_of_json_and_shows_arguments(capsys):
    main(["audit", "audited_module:good", "--args", "audited_module:arguments", "--json"])
    keys = list(json.loads(capsys.readouterr().out))
    assert main(["audit", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [key for key in keys if key not in shown] == []
    assert "def make_args(): return" in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("good", "'good' is not the name of a function. For example: train:"),
        ("absent_module:f", "the module 'absent_module', of 'absent_module:f', is not here"),
        (
            "audited_module.py:good",
            "'audited_module.py', of 'audited_module.py:good', is not a Python module name",
        ),
        ("./audited_module:good", "'./audited_module', of './audited_module:good', is not a Python module name"),
        ("audited_module:god", "audited_module has no 'god', of 'audited_module:god'. Did you mean 'good'?"),
        ("audited_module:zzz", "audited_module has no 'zzz', of 'audited_module:zzz'\n"),
        ("audited_module:number", "'audited_module:number' is not a function, but 3"),
        ("audited_module:Model", "audited_module:Model: audit takes a function, got <class 'audited_module.Model'>"),
    ],
)
def test_bad_name_is_one_line_and_status_2(name, message, capsys):
    assert main(["audit", name]) == 2
    check_error(capsys, message)


EXAMPLE = (
    "For example, write `def make_args(): return x, w` in audited_module, where each is an array or, say, "
    "jax.ShapeDtypeStruct((8, 128), jnp.float32), and add --args audited_module:make_args"
)


@pytest.mark.parametrize(
    ("function", "maker", "message"),
    [
        ("good", None, "MODULE:good takes (x, w), and --args is missing. EXAMPLE\n"),
        ("good", "one", "--args MODULE:one returns 1 argument, but MODULE:good takes (x, w). EXAMPLE\n"),
        ("good", "good", "--args MODULE:good is called without arguments, but takes (x, w): give them defaults\n"),
        ("noisy", "arguments", "--args MODULE:arguments returns 2 arguments, but MODULE:noisy takes (x). For example"),
        ("one", "arguments", "--args MODULE:arguments returns 2 arguments, but MODULE:one takes (). Leave --args out."),
        ("named", "one", "--args MODULE:one returns 1 argument, but MODULE:named takes (x, *, scale). Arguments by "
         "name cannot be given: write a function that passes scale itself.\n"),
        ("variadic", None, "MODULE:variadic takes (x, y=2, *rest), and --args is missing. For example, write `def "
         "make_args(): return x` in MODULE, where"),
    ],
)  # fmt: skip
def test_other_arguments_are_one_line_that_shows_what_to_write(function, maker, message, capsys):
    arguments = [] if maker is None else ["--args", f"audited_module:{maker}"]
    assert main(["audit", f"audited_module:{function}", *arguments]) == 2
    check_error(capsys, message.replace("EXAMPLE", EXAMPLE).replace("MODULE", "audited_module"))


@pytest.mark.parametrize(
    ("function", "maker", "message", "line"),
    [
        ("good", "unfit", "TypeError: dot_general requires contracting dimensions to have the same shape, got (3,) and "
         "(2,)", line_of("return x @ w", "good")),
        ("branch", "one", "TracerBoolConversionError: Attempted boolean conversion of traced array with shape bool[]",
         line_of("return x if", "branch")),
        ("silent", "one", "ValueError", line_of("raise ValueError", "silent")),
        ("outer", "one", "ValueError", line_of("raise ValueError", "silent")),  # the innermost line
    ],
)  # fmt: skip
def test_what_the_users_code_raises_is_one_line_with_its_place(function, maker, message, line, capsys):
    assert main(["audit", f"audited_module:{function}", "--args", f"audited_module:{maker}"]) == 2
    assert check_error(capsys, f"audited_module:{function} raised {message}, at ").endswith(f"{line}\n")


def test_arguments_that_cannot_be_made_are_one_line(capsys):
    assert main(["audit", "audited_module:good", "--args", "audited_module:failing"]) == 2
    error = check_error(capsys, "--args audited_module:failing raised RuntimeError: no data, at ")
    assert error.endswith(f"{line_of('raise Runt', 'failing')}\n")


@pytest.mark.parametrize(
    ("code", "message", "line"),
    [
        ("import absent_module", "ModuleNotFoundError: No module named 'absent_module', at ", "broken.py:1 (<module>)"),
        ("1 / 0", "ZeroDivisionError: division by zero, at ", "broken.py:1 (<module>)"),
        ("def f(:", "SyntaxError: invalid syntax (broken.py, line 1)", ""),
        ("raise SystemExit('use it so')", "SystemExit: use it so, at ", "broken.py:1 (<module>)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_its_place(code, message, line, tmp_path, capsys):
    (tmp_path / "broken.py").write_text(code)
    assert main(["audit", "broken:f"]) == 2
    assert check_error(capsys, f"broken cannot be imported: it raised {message}").endswith(f"{line}\n")


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch):
    def inspect(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("jmp_policy.numerics._audit._Inspector", inspect)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["audit", "audited_module:good", "--args", "audited_module:arguments"])


def check_error(capsys, message: str) -> str:
    """Checks that the error is one line that begins so, and returns it."""
    captured = capsys.readouterr()
    assert captured.err.startswith(f"jmp-policy: error: {message}")
    assert (captured.err.count("\n"), captured.out) == (1, "")
    return captured.err
