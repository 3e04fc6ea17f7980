"""A process killed in the middle of training leaves a run that goes on where it was, bit for bit."""

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
tests, folder, out, api, resume, last_step = sys.argv[1:]
sys.path.insert(0, tests)
import tiny
from examples.gpt import train

train.CHECKPOINT_EVERY = 10
sample_batch = train.sample_batch

def sample_or_die(*args, **kwargs):
    if kwargs["step"] == int(last_step):
        os.kill(os.getpid(), signal.SIGKILL)
    return sample_batch(*args, **kwargs)

train.sample_batch = sample_or_die
wishes = {"steps": 40, "api": api, "policy": "mixed_float16", "resume": resume == "resume"}
tiny.run(Path(folder), out=Path(out), **wishes)
"""


def start(folder: Path, out: Path, api: str, *, resume: bool = False, last_step: int = -1) -> subprocess.Popen:
    arguments = [Path(tiny.__file__).parent, folder, out, api, "resume" if resume else "begin", last_step]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_a_killed_run_resumes_bit_exactly(folder, api):
    straight, killed = folder / "straight", folder / "killed"
    assert start(folder, killed, api, last_step=27).wait() == -signal.SIGKILL
    uninterrupted = start(folder, straight, api)  # not before: it takes the programs that the killed one compiled
    assert [record["step"] for record in tiny.read_records(killed)] == list(range(1, 28))
    assert start(folder, killed, api, resume=True).wait() == 0
    assert uninterrupted.wait() == 0
    assert tiny.read_records(killed) == tiny.read_records(straight)
    assert tiny.read_records(killed)[-1].keys() == {"step", "validation_loss"}
