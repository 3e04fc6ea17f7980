"""Two and four real processes: the losses of one, one decision, the same parameters, and one error."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

from examples.gpt import _processes

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
    assert [result["figures"] for result in results] == [{"loss_scale": 2.0**14, "skipped_steps": 1.0}] * 2
    assert [np.isfinite(result["losses"]).tolist() for result in results] == [[True, True, False, True]] * 2
    check_replicas(results)


COMMAND = [sys.executable, "-m", "jmp_policy", "train", "--coordinator"]


@pytest.mark.slow
def test_processes_find_each_other_where_jax_knows_the_cluster(folder):
    """Slurm says to each process who it is; JAX makes a port of the number of the job."""
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    command = [*COMMAND, "auto", "--mesh", "data=2", "--data", "text.txt", "--steps", "1", "--policy", "float32"]
    processes = [
        subprocess.Popen(
            [*command, "--out", "run"],
            cwd=folder,
            env={**os.environ, **job, "SLURM_PROCID": index, "SLURM_LOCALID": index, "JAX_NUM_CPU_DEVICES": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in "01"
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert "0 of 1" in first  # steps that were skipped
    assert "validation loss" not in second
    assert len((folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_never_comes_is_one_line(index, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [*COMMAND, address, "--processes", "2", "--process", str(index), "--timeout", "5"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == (
        "jmp-policy: error: not all processes of the run came in time: start each with its own --process, from 0, and "
        "with the address of process 0, or wait longer with --timeout\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_an_error_of_the_first_process_is_the_only_one(tmp_path):
    command = [*COMMAND[:-1], "--local-processes", "2", "--data", "no/such"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (
        2,
        "jmp-policy: error: --data no/such does not exist: give text files or folders of them\n",
    )
    assert not list(tmp_path.iterdir())


def test_one_process_agrees_with_itself():
    assert _processes.agree(lambda: 3) == 3
    assert _processes.share("word") == "word"
    assert _processes.is_first()
    with pytest.raises(ZeroDivisionError):
        _processes.agree(lambda: 1 // 0)


@pytest.fixture
def of_three(monkeypatch):
    """Stands for process 1 of three, where process 2 has failed, too."""
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    gather = lambda mine: np.array([False, mine, True])
    monkeypatch.setattr(_processes.multihost_utils, "process_allgather", gather)


@pytest.mark.usefixtures("of_three")
def test_the_first_process_that_failed_tells_why():
    with pytest.raises(ZeroDivisionError):
        _processes.agree(lambda: 1 // 0)
    with pytest.raises(_processes.ToldElsewhere, match="process 2 says what is wrong"):
        _processes.agree(lambda: 3)
