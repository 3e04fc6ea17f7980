"""The processes of a run stop together: told to, they save; where one is killed, the others end with one line."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.optimized]


def start(folder: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jmp_policy", "train", "--data", "text.txt", "--out", "run", "--mesh", "data=2"]
    command += ["--steps", "100000", "--policy", "float32", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=pipe, stdout=pipe, text=True)


def wait_for_steps(folder: Path, process: subprocess.Popen) -> None:
    """Waits until a run has taken some steps."""
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3):
        time.sleep(0.05)


def test_sigterm_saves_in_all_processes_and_ends_with_status_0(folder):
    process = start(folder, "--local-processes", "2")
    wait_for_steps(folder, process)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    saved = re.search(r"stopped and saved at step (\d+); continue with: jmp-policy train --resume", output)
    assert saved is not None
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == [saved[1]]
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == int(saved[1])  # none is lost
    assert "error" not in errors


@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_is_killed_ends_the_other_with_one_line(folder, lost):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    options = ["--coordinator", address, "--processes", "2", "--timeout", "30"]
    processes = [start(folder, *options, "--process", str(index)) for index in range(2)]
    wait_for_steps(folder, processes[0])
    processes[lost].kill()  # and its child with it, which trains
    begin = time.monotonic()
    _, errors = processes[1 - lost].communicate()
    assert time.monotonic() - begin < 60
    assert processes[1 - lost].returncode == 1
    said = [line for line in errors.splitlines() if line.startswith("jmp-policy: error: ")]
    assert len(said) == 1
    assert re.search(
        "process .* does not answer any more.* What was saved is whole: start all again with --resume", said[0]
    )
    assert "stack trace" not in errors
    processes[lost].communicate()
