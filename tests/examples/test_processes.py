"""Two and four real processes: the losses of one, one decision, the same parameters, one error, and one stop."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny

WORKER = Path(tiny.__file__).with_name("worker.py")


def run_processes(
    folder: Path, count: int, devices: int, *, out: str, planted: int | None = None, **wishes
) -> list[dict]:
    """Trains in real processes; returns what each holds in the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"folder": str(folder), "out": str(folder / out), "wishes": wishes, "planted": planted, "devices": devices}
    shared |= {"coordinator": f"127.0.0.1:{port}", "count": count}
    commands = [[sys.executable, str(WORKER), json.dumps({**shared, "index": index})] for index in range(count)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def check_replicas(results: list[dict]) -> None:
    """Checks that whoever has a part of an array has the same bits of it."""
    known: dict[tuple[str, str], str] = {}
    for path, index, digest in (part for result in results for part in result["parts"]):
        assert known.setdefault((path, index), digest) == digest, path


@pytest.mark.exhaustive
def test_two_and_four_processes_have_the_losses_of_one(folder):
    wishes = {"steps": 3, "batch_size": 4}
    (alone,) = run_processes(folder, 1, 1, out="one", mesh="data=1", **wishes)
    for count, mesh in ((2, "data=2,fsdp=2"), (4, "fsdp=2,tensor=2")):
        results = run_processes(folder, count, 4 // count, out=f"of-{count}", mesh=mesh, **wishes)
        for result in results:
            np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-6)
        check_replicas(results)
        lines = (folder / f"of-{count}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert len(lines) == 4  # of the first process alone


@pytest.mark.exhaustive
def test_an_infinity_in_one_process_skips_the_step_in_all(folder):
    wishes = {"steps": 4, "batch_size": 4, "policy": "mixed_float16", "api": "linen", "mesh": "data=2,fsdp=2"}
    results = run_processes(folder, 2, 2, out="run", planted=2, **wishes)
    assert [result["scaling"] for result in results] == [{"loss_scale": 2.0**14, "skipped_steps": 1}] * 2
    assert [np.isfinite(result["losses"]).tolist() for result in results] == [[True, True, False, True]] * 2
    check_replicas(results)


COMMAND = [sys.executable, "-m", "examples.gpt", "train", "--data", "text.txt", "--policy", "float32", "--out", "run"]


@pytest.mark.exhaustive  # starts a cluster of its own
def test_processes_find_each_other_where_jax_knows_the_cluster(folder):
    """Slurm says to each process who it is; JAX makes a port of the number of the job."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    processes = [
        subprocess.Popen(
            [*COMMAND, "--coordinator", "auto", "--mesh", "data=2", "--steps", "1"],
            cwd=folder,
            env={**os.environ, **job, "SLURM_PROCID": index, "SLURM_LOCALID": index, "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in "01"
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert "skipped steps  0 of 1" in first
    assert "skipped steps" not in second
    assert len((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2


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


@pytest.mark.slow
@pytest.mark.optimized
def test_processes_end_with_the_one_that_started_them_and_leave_no_lock(folder):
    process = start_locally(folder)
    process.kill()
    process.communicate()  # the children have its pipes, too: it returns when they have ended
    resumed = subprocess.run([*COMMAND, "--resume", "--steps", "1"], cwd=folder, capture_output=True, text=True)
    assert "in use" not in resumed.stderr
    assert (folder / "run" / "config.json").exists()
