"""A process killed in the middle of training leaves a run that goes on where it was, bit for bit."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

# A process that kills itself at a chosen step dies exactly as one that is killed from outside, and never too late.
PROGRAM = """
import os, signal, sys
from pathlib import Path
folder, out, api, resume, last_step = sys.argv[2:]
sys.path.insert(0, sys.argv[1])
import tiny
from examples.gpt import _train, train

_train.CHECKPOINT_EVERY = 10
sample_batch = _train.sample_batch

def sample_or_die(*args, **kwargs):
    if kwargs["step"] == int(last_step):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample_batch(*args, **kwargs)

_train.sample_batch = sample_or_die
wishes = {"steps": 40, "api": api, "policy": "mixed_float16", "resume": resume == "resume"}
train(tiny.options(Path(folder), out=Path(out), **wishes), tiny.silent_console())
"""


def start(folder: Path, out: Path, api: str, *, resume: bool = False, last_step: int = -1) -> subprocess.Popen:
    arguments = [Path(tiny.__file__).parent, folder, out, api, "resume" if resume else "begin", last_step]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)])


def steps_of(out: Path) -> list[dict]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "step_seconds"} for line in lines]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_killed_run_resumes_bit_exactly(folder, api):
    straight, killed = folder / "straight", folder / "killed"
    assert start(folder, killed, api, last_step=27).wait() == -signal.SIGKILL
    uninterrupted = start(folder, straight, api)  # not before: it takes the programs that the killed one compiled
    assert [record["step"] for record in steps_of(killed)] == list(range(1, 28))
    assert start(folder, killed, api, resume=True).wait() == 0
    assert uninterrupted.wait() == 0
    assert steps_of(killed) == steps_of(straight)
    assert steps_of(killed)[-1].keys() == {"step", "validation_loss"}
