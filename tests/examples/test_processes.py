"""Two real processes: one error, and one stop."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "examples.gpt", "train", "--data", "text.txt", "--policy", "float32", "--out", "run"]


@pytest.mark.slow
def test_an_error_of_the_first_process_is_the_only_one(folder):
    command = [*COMMAND, "--data", "no/such", "--local-processes", "2"]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if line.startswith("error:")] == [
        "error: --data no/such does not exist: give text files or folders of them"
    ]
    assert not (folder / "run").exists()


def start_locally(folder: Path) -> subprocess.Popen:
    """Starts a long run in two processes, and waits until it has taken some steps."""
    command = [*COMMAND, "--local-processes", "2", "--steps", "100000"]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text(encoding="utf-8").count("\n") < 3):
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.optimized
def test_sigterm_saves_in_all_processes_and_ends_with_status_0(folder):
    process = start_locally(folder)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    saved = re.search(r"stopped and saved at step (\d+): continue with --resume --out run", output)
    assert saved is not None
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == [saved[1]]
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == int(saved[1])  # none is lost
