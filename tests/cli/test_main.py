"""The command line: exit statuses, one line for each error, and what the commands print."""

import builtins
import io
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import jax
import pytest

import jmp_policy as jmp
from jmp_policy.cli import main


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "f:g", "--budget", "0"], "jmp-policy tune: error: argument --budget: expected an integer from 1 to"),
        (["tune", "f:g", "--seed", "-1"], "jmp-policy tune: error: argument --seed: expected an integer from 0 to"),
        (["fly"], "jmp-policy: error: there is no command 'fly'. Known are 'doctor', 'audit', 'lock', 'numerics', "),
        (["docter"], "jmp-policy: error: there is no command 'docter'. Did you mean 'doctor'?"),
        (["--verison"], "jmp-policy: error: there is no option '--verison'. Did you mean '--version'?"),
        (["-x"], "jmp-policy: error: there is no option '-x'. Known are '--help', '--version'."),
        (["tune", "--polcy=x", "f:g"], "jmp-policy tune: error: there is no option '--polcy=x'. Did you mean '--pol"),
        (["doctor", "cpu"], "jmp-policy doctor: error: 'cpu' is one word too many. jmp-policy doctor --help shows"),
        (["audit"], "jmp-policy audit: error: the following arguments are required: MODULE:FUNCTION"),
        (
            [],
            "jmp-policy: error: which command? doctor, audit, lock, numerics, diverge, parity or tune: jmp-policy",
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

    def without_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    assert main(["numerics", "os:getcwd", "--plot", "plot.png"]) == 2
    expected = "jmp-policy: error: matplotlib is not installed: pip install 'jmp-policy[demo]'\n"
    assert capsys.readouterr().err == expected


def test_the_versions_are_one_line_and_control_characters_are_escaped(capsys):
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "flax", "optax")]
    python = platform.python_version()
    assert shown == f"jmp_policy {jmp.__version__} (python {python}, {', '.join(versions)})\n"
    assert main(["\x1b[2J"]) == 2
    assert r"\x1b[2J" in capsys.readouterr().err


def test_an_interrupted_command_ends_in_one_line(capsys, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(jax, "devices", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "jmp-policy: error: interrupted\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("Unable to initialize\nbackend 'cuda'"), ": Unable to initialize backend 'cuda'"),
        (AssertionError(), ", perhaps because jaxlib was installed without it"),
        (ValueError("a bug"), None),
    ],
)
def test_a_device_that_is_not_there_is_one_line(error, said, monkeypatch, capsys):
    def find_none():
        raise error

    monkeypatch.setattr(jax, "devices", find_none)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    if said is None:  # another error keeps its traceback
        with pytest.raises(ValueError, match="a bug"):
            main(["doctor"])
        return
    assert main(["doctor"]) == 2
    expected = f"jmp-policy: error: JAX finds no device, with JAX_PLATFORMS='cuda'{said}\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("command", "buffered"), [("--version", True), ("--help", False)])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is a device of Linux")
def test_a_stdout_that_cannot_be_written_to_is_one_line(command, buffered, capsys, monkeypatch):
    with open("/dev/full", "wb", -1 if buffered else 0) as full:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(full, write_through=not buffered))
        assert main([command]) == 2
    said = "cannot write to stdout: No space left on device. For example: jmp-policy --version"
    assert capsys.readouterr().err == f"jmp-policy: error: {said}\n"


def test_a_reader_of_stdout_that_left_is_one_line(capsys, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb", 0) as pipe:
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
        assert main(["--version"]) == 2
    assert capsys.readouterr().err == "jmp-policy: error: the reader of stdout left before the report ended\n"


def test_a_closed_stdout_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor"]) == 2
    said = "stdout is closed. For example: jmp-policy --version > report.txt"
    assert capsys.readouterr().err == f"jmp-policy: error: {said}\n"


@pytest.mark.parametrize(("command", "option"), [("numerics", "--html"), ("numerics", "--plot"), ("tune", "--trials")])
def test_a_folder_in_the_place_of_a_file_is_one_line(command, option, capsys):
    assert main([command, "os:getcwd", option, "."]) == 2
    said = f"{option} . is a folder: name a file. For example: {option} report"
    assert capsys.readouterr().err == f"jmp-policy: error: {said}\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="it is a device of Linux")
@pytest.mark.usefixtures("folder")
def test_a_page_that_cannot_be_written_is_one_line(capsys):
    assert main(["numerics", "user:none", "--html", "/dev/full"]) == 2
    said = "--html /dev/full cannot be written: No space left on device"
    assert capsys.readouterr().err == f"jmp-policy: error: {said}\n"
