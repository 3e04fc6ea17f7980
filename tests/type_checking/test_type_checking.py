"""What pyright says of a file of user code, line by line: what it reveals, and the mistakes that it finds."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jmp_policy as jmp

HERE = Path(__file__).parent
FILES = ("user_code.py", "user_mistakes.py")
EXPECTED = re.compile(r"# (revealed|error): (.+)$")
REVEALED = re.compile(r'^Type of ".*" is "(.*)"$', re.DOTALL)


def read_expected(path: Path) -> dict[int, str]:
    """What a file says of its lines, by their numbers."""
    found = {
        number: EXPECTED.search(line) for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    }
    return {number: f"{match[1]}: {match[2]}" for number, match in found.items() if match}


def describe(diagnostic: dict) -> str:
    """A diagnostic in the words of the comments."""
    revealed = REVEALED.match(diagnostic["message"])
    return f"revealed: {revealed[1]}" if revealed else f"{diagnostic['severity']}: {diagnostic['message']}"


def shorten(told: dict[int, str], expected: dict[int, str]) -> dict[int, str]:
    """Cuts an error down to the beginning that is expected, since the rest is of a version of pyright."""

    def cut(text: str, beginning: str) -> str:
        return beginning if beginning.startswith("error: ") and text.startswith(beginning) else text

    return {number: cut(text, expected.get(number, "")) for number, text in told.items()}


def run_pyright(project: Path) -> dict[str, dict[int, str]]:
    """The first diagnostic of each line, by file: pyright may say of one mistake in two ways what is wrong."""
    for name in FILES:
        shutil.copy(HERE / name, project)  # a user's project, to which the package is a library
    (project / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", project]
    paths = [str(Path(jmp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    told: dict[str, dict[int, str]] = {name: {} for name in FILES}
    for diagnostic in json.loads(ran.stdout)["generalDiagnostics"]:
        line = diagnostic["range"]["start"]["line"] + 1
        told[Path(diagnostic["file"]).name].setdefault(line, describe(diagnostic))
    return told


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="needs pip install -e '.[test,lint]'")
def test_pyright_says_of_each_line_what_is_expected(tmp_path):
    told = run_pyright(tmp_path)
    for name in FILES:
        expected = read_expected(HERE / name)
        assert len(expected) > 30  # neither file is empty, nor written in another way
        assert shorten(told[name], expected) == expected


@pytest.mark.slow
def test_the_user_code_runs():
    """A type that is revealed of code that fails would be worth nothing."""
    runpy.run_path(str(HERE / "user_code.py"))
