"""Several processes: what may be asked for, and the children that are watched."""

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jmp_policy.cli import main
from jmp_policy.cli._children import Children, describe_loss

FATAL = "F1123 02:28 1 client.h:80] Terminating process because the JAX distributed service detected fatal errors."


def wait_for(*programs: str) -> int:
    """Runs Python programs as children."""
    return Children([[sys.executable, "-S", "-c", f"import os, sys, time\n{text}"] for text in programs], {}).wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--local-processes", "2", "--process", "1"],
            "--local-processes starts all processes: leave --coordinator, --processes and --process out",
        ),
        (["--local-processes", "2", "--mesh", "data=3"], "--mesh data=3 has 3 devices, which 2 processes cannot share"),
        (["--coordinator", "10.0.0.1:1"], "--coordinator 10.0.0.1:1 needs --processes (or JAX_NUM_PROCESSES), for"),
        (["--coordinator", "h:1", "--processes", "2"], "--coordinator h:1 needs --process (or JAX_PROCESS_ID), for"),
        (
            ["--coordinator", "h:1", "--processes", "2", "--process", "2"],
            "--process 2: 2 processes are numbered from 0 to 1",
        ),
        (
            ["--coordinator", "here", "--processes", "2", "--process", "0"],
            "--coordinator here: expected a host and a port, for example: 10.0.0.1:1234",
        ),
        (
            ["--coordinator", "here:70000", "--processes", "2", "--process", "0"],
            "--coordinator here:70000: expected a host and a port, for example: 10.0.0.1:1234",
        ),
    ],
)
def test_what_does_not_fit_together_is_one_line(arguments, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: {message}")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_several_processes_on_windows_are_refused_in_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["train", "--local-processes", "2"]) == 2
    said = "jmp-policy: error: several processes need Linux or macOS: on Windows JAX has no collectives between CPUs\n"
    assert capsys.readouterr().err == said


def test_a_variable_that_is_no_number_is_one_line(capsys, monkeypatch):
    for name, value in {"COORDINATOR_ADDRESS": "h:1", "NUM_PROCESSES": "two", "PROCESS_ID": "0"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    assert main(["train"]) == 2
    assert "JAX_NUM_PROCESSES='two': expected a number, for example: JAX_NUM_PROCESSES=2" in capsys.readouterr().err


def test_a_port_that_is_not_free_is_one_line(capsys):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert main(["train", "--coordinator", f"localhost:{port}", "--processes", "2", "--process", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jmp-policy: error: --coordinator localhost:{port}: process 0 cannot listen there (")
    assert error.endswith("): choose another port\n")


def test_children_that_end_well_are_status_0(capfd):
    assert wait_for("print('first'); print('a warning', file=sys.stderr)", "print('second')") == 0
    assert capfd.readouterr() == ("first\n", "a warning\n")


def test_an_error_of_all_is_printed_once(capfd):
    failing = "print('jmp-policy: error: no such file', file=sys.stderr); sys.exit(2)"
    assert wait_for(failing, failing) == 2
    assert capfd.readouterr().err == "jmp-policy: error: no such file\n"


def test_a_killed_child_ends_the_others_with_one_line(capfd):
    begin = time.monotonic()
    assert wait_for("time.sleep(60)", "os.kill(os.getpid(), 9)") == 1
    assert time.monotonic() - begin < 10
    assert capfd.readouterr().err == (
        "jmp-policy: error: process 1 was ended by SIGKILL, and the others with it. "
        "What was saved is whole: start all again with --resume.\n"
    )


def test_a_child_that_fails_ends_the_others_after_a_while(capfd, monkeypatch):
    monkeypatch.setattr("jmp_policy.cli._children._GRACE", 0.2)
    begin = time.monotonic()
    assert wait_for("time.sleep(60)", "sys.exit('jmp-policy: error: it is broken')") == 1
    assert time.monotonic() - begin < 10
    assert capfd.readouterr().err == "jmp-policy: error: it is broken\n"


def test_what_jax_says_as_it_ends_a_process_becomes_one_line(capfd):
    said = (
        f"E1123 1 coordination_service.cc:1549] unhealthy (stopped sending heartbeats):\\n1\\n{FATAL}\\n    @ 0x1 stack"
    )
    assert wait_for(f"print('before\\n{said}', file=sys.stderr); sys.stderr.flush(); os.kill(os.getpid(), 6)") == 1
    assert capfd.readouterr().err == (
        "before\njmp-policy: error: process 1 of the run does not answer any more. "
        "What was saved is whole: start all again with --resume.\n"
    )


def test_what_jax_says_of_a_process_that_goes_on_is_passed_on(capfd):
    said = "E1123 1 coordination_service.cc:1549] a word\n"
    assert wait_for(f"print({said!r}, end='', file=sys.stderr)") == 0
    assert capfd.readouterr().err == said


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "DEADLINE_EXCEEDED RPC: /xla.coordination.CoordinationService/RegisterTask",
            "not all processes of the run came",
        ),
        ("Either the leader task was preempted/died", "process 0 of the run does not answer any more"),
        ("Gloo AllReduce failed: Connection closed by peer", "another process of the run does not answer any more"),
    ],
)
def test_a_loss_is_told_by_what_jax_says(said, words):
    assert describe_loss(said).startswith(words)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_go_on_to_all_children(number, capfd):
    waits = (
        f"import signal; signal.signal({int(number)}, lambda *_: sys.exit(7))\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    before = signal.getsignal(number)
    threading.Timer(1.0, lambda: signal.raise_signal(number)).start()
    assert wait_for(waits, waits) == 7
    assert signal.getsignal(number) is before
    assert capfd.readouterr() == ("ready\n", "")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_children_that_a_signal_ends_before_they_begin_are_no_error(number, status, capfd):
    before = signal.getsignal(number)
    sleeps = "import signal; signal.signal(2, signal.SIG_DFL); time.sleep(60)"
    threading.Timer(1.0, lambda: signal.raise_signal(number)).start()
    assert wait_for(sleeps, sleeps) == status
    assert signal.getsignal(number) is before
    assert capfd.readouterr() == ("", "")


PARENT = """
import sys
from jmp_policy.cli._children import Children
child = "import os, threading\\nfrom jmp_policy.cli import _processes\\nprint(os.getpid(), flush=True)\\n"
Children([[sys.executable, "-c", child + "_processes._end_with_parent()"]], {"JAX_PLATFORMS": "cpu"}).wait()
"""


@pytest.mark.slow
def test_a_child_ends_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        assert parent.stdout.read() == ""  # the child had the pipe, too: it is closed when both have ended
