"""Checks pyright's diagnostics of files of user code, line by line: revealed types, and mistakes that it finds."""

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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pyright") is None, reason="needs pip install -e '.[test,lint]'")
def test_pyright_says_of_each_line_what_is_expected(tmp_path):
    for name in FILES:
        shutil.copy(HERE / name, tmp_path)  # a user's project, to which the package is a library
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", tmp_path]
    paths = [str(Path(jmp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    told: dict[str, dict[int, str]] = {name: {} for name in FILES}
    for found in json.loads(ran.stdout)["generalDiagnostics"]:  # may say one thing twice: take the first
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', found["message"], re.DOTALL)
        text = f"revealed: {revealed[1]}" if revealed else f"{found['severity']}: {found['message']}"
        told[Path(found["file"]).name].setdefault(found["range"]["start"]["line"] + 1, text)
    for name in FILES:
        lines = enumerate((HERE / name).read_text(encoding="utf-8").splitlines(), 1)
        found = {number: re.search(r"# ((?:revealed|error): .+)$", line) for number, line in lines}
        expected = {number: match[1] for number, match in found.items() if match}
        assert len(expected) > 30  # neither file is empty, nor written in another way
        for number, text in expected.items():  # the rest of an error is of a version of pyright
            if text.startswith("error: ") and told[name].get(number, "").startswith(text):
                told[name][number] = text
        assert told[name] == expected


@pytest.mark.slow
def test_the_user_code_runs():
    """A type that is revealed of code that fails would be worth nothing."""
    runpy.run_path(str(HERE / "user_code.py"))
