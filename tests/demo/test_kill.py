"""A process killed in the middle of training leaves a run that goes on where it was, bit for bit."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

PROGRAM = """
import sys
from pathlib import Path
from jmp_policy.demo import _training_run, train
import tiny
_training_run.CHECKPOINT_EVERY = 10
_training_run.EVALUATE_EVERY = 1000
folder, out, resume, api = sys.argv[1:]
options = tiny.options(Path(folder), out=Path(out), steps=150, api=api, policy="mixed_float16", resume=resume == "1")
train(options, tiny.silent_console())
"""


def start(folder: Path, out: Path, api: str, *, resume: bool = False) -> subprocess.Popen:
    path = f"import sys; sys.path[:0] = [{str(Path(tiny.__file__).parent)!r}]"
    return subprocess.Popen([sys.executable, "-c", path + PROGRAM, str(folder), str(out), str(int(resume)), api])


def steps_of(out: Path) -> list[dict]:
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "step_seconds"} for line in lines]


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_killed_run_resumes_bit_exactly(folder, api):
    straight, killed = folder / "straight", folder / "killed"
    uninterrupted = start(folder, straight, api)
    process = start(folder, killed, api)
    wait_for_lines(killed / "metrics.jsonl", 27, process)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    resumed = start(folder, killed, api, resume=True)
    assert resumed.wait(300) == 0
    assert uninterrupted.wait(300) == 0
    assert steps_of(killed) == steps_of(straight)
    assert len(steps_of(killed)) == 151
