"""Kills trainings at random moments, resumes them, and measures the lost steps.

    python -m benchmarks.drill

A run in one or two processes is killed by SIGKILL, or told to stop by SIGTERM: while it starts, between steps, or while
a checkpoint is being written. Then it is resumed, on its mesh or another. Every resume must continue from the newest
checkpoint. On its own mesh, the final state of a run must be bit for bit the state of an undisturbed run.
"""

import argparse
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks._drill_run import CHECKPOINT_EVERY
from benchmarks._results import ResultTable, print_tables

STEPS = 60
MOMENTS = "start", "step", "write"
LOSS_BOUND = 1e-3
"""By how much the loss may differ that a run ends with, over that of a run that nothing happens to.

How much it is where meshes change, whose sums have other orders, depends on when kills strike.
"""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """A run: its number of processes, and its meshes in turn."""

    name: str
    processes: int
    meshes: tuple[str | None, ...]


SCENARIOS = (
    Scenario("1 process, no mesh", 1, (None,)),
    Scenario("1 process, its mesh", 1, ("data=2,fsdp=2",)),
    Scenario("2 processes, their mesh", 2, ("data=2,fsdp=2",)),
    Scenario("2 processes, other meshes", 2, ("data=2,fsdp=2", "fsdp=2,tensor=2", "data=4")),
)


@dataclasses.dataclass
class Kill:
    """Record of a kill: the signal, the moment, and the numbers of done, saved and lost steps."""

    number: signal.Signals
    moment: str
    done: int = 0
    saved: int = 0
    status: int = 0

    @property
    def lost(self) -> int:
        return self.done - self.saved


@dataclasses.dataclass
class Result:
    """Result of a scenario."""

    kills: list[Kill]
    resumes: int
    is_same: bool | None
    loss: float


def drill(scenario: Scenario, kills: int, folder: Path, seed: int) -> Result:
    """Kills a run several times, and lets it end."""
    rng, out, done = random.Random(seed), folder / "killed", []
    for turn in range(kills):
        kill = Kill(choose_signal(rng), MOMENTS[turn % len(MOMENTS)])
        mesh = scenario.meshes[turn % len(scenario.meshes)]
        before = count_steps(out)
        kill.status = run(scenario, mesh, out, kill=kill, rng=rng)
        after, kill.saved = count_steps(out), find_saved_step(out)
        kill.done = after if after != before else kill.saved  # steps that an earlier kill lost do not count again
        done.append(kill)
        print(f"{scenario.name}: {kill.number.name} at {kill.moment}, {kill}", file=sys.stderr, flush=True)
        check_kill(kill)
    mesh = scenario.meshes[0]
    assert run(scenario, mesh, out) == 0, "the last resume failed"
    straight = folder / "straight"
    assert run(scenario, mesh, straight) == 0, "the undisturbed run failed"
    is_same = read_digests(out) == read_digests(straight) if len(scenario.meshes) == 1 else None
    loss = abs(read_loss(out) / read_loss(straight) - 1)
    assert is_same is not None or loss <= LOSS_BOUND, f"over other meshes, the loss differs by {loss:.1e}"
    return Result(done, len(done), is_same, loss)


def choose_signal(rng: random.Random) -> signal.Signals:
    return rng.choice((signal.SIGKILL, signal.SIGTERM))


def check_kill(kill: Kill) -> None:
    """Raises an AssertionError if more steps were lost than allowed."""
    if kill.number == signal.SIGTERM and kill.moment != "start":
        assert kill.status == 0, f"SIGTERM ended with status {kill.status}"
        assert kill.lost == 0, f"SIGTERM lost {kill.lost} steps"
    # A checkpoint is written while training goes on, until the next is due: so long the one before is the newest.
    assert kill.lost <= 2 * CHECKPOINT_EVERY, f"{kill.lost} steps were lost"


def run(
    scenario: Scenario, mesh: str | None, out: Path, *, kill: Kill | None = None, rng: random.Random | None = None
) -> int:
    """Begins a run or goes on with it, until it ends or is killed; returns the exit status."""
    environment = make_environment(scenario, mesh)
    children = [subprocess.Popen(command, env=environment) for command in list_commands(scenario, mesh, out)]
    if kill is not None and rng is not None:
        threading.Thread(target=strike, args=(scenario, kill, children, out, rng), daemon=True).start()
    return wait(children)


def wait(children: Sequence[subprocess.Popen]) -> int:
    """Waits for all processes, and ends the others once a signal has ended one; returns 0 if all ended well, else 1."""
    while any(child.poll() is None for child in children):
        if any((child.poll() or 0) < 0 for child in children):
            for child in children:
                child.kill()
        time.sleep(0.05)
    return int(any(child.returncode for child in children))


def find_free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def list_commands(scenario: Scenario, mesh: str | None, out: Path) -> list[list[str]]:
    command = [sys.executable, "-m", "benchmarks._drill_run", "--out", str(out), "--steps", str(STEPS)]
    command += ["--data", __file__, str(Path(__file__).parent), "--policy", "mixed_float16"]
    command += ["--resume"] if (out / "config.json").exists() else []
    command += [] if mesh is None else ["--mesh", mesh]
    if scenario.processes == 1:
        return [command]
    command += ["--coordinator", f"127.0.0.1:{find_free_port()}", "--processes", str(scenario.processes)]
    return [[*command, "--process", str(index)] for index in range(scenario.processes)]


def make_environment(scenario: Scenario, mesh: str | None) -> dict[str, str]:
    devices = 1 if mesh is None else 4 // scenario.processes
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}


def strike(scenario: Scenario, kill: Kill, children: Sequence[subprocess.Popen], out: Path, rng: random.Random) -> None:
    """Sends the signal to one of the processes, when its moment has come."""
    index, before = rng.randrange(scenario.processes), find_writes(out)
    if kill.moment == "start":
        time.sleep(rng.uniform(0.5, 8.0))
    else:
        target = min(count_steps(out) + rng.randint(1, 2 * CHECKPOINT_EVERY), STEPS - 1)
        while count_steps(out) < target and any(child.poll() is None for child in children):
            time.sleep(0.005)
    if kill.moment == "step":
        time.sleep(rng.uniform(0, 0.1))
    elif kill.moment == "write":
        while not find_writes(out) - before and any(child.poll() is None for child in children):
            time.sleep(0.001)
    children[index].send_signal(kill.number)


def find_writes(out: Path) -> set[str]:
    """Finds checkpoints that are incomplete. Orbax renames a checkpoint when it is complete."""
    return {path.name for path in (out / "checkpoints").glob("*tmp*")}


def count_steps(out: Path) -> int:
    """Returns the last step of the metrics."""
    file = out / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def find_saved_step(out: Path) -> int:
    """Returns the step of the newest complete checkpoint."""
    return max((int(path.name) for path in (out / "checkpoints").glob("*") if path.name.isdecimal()), default=0)


def read_digests(out: Path) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(out.glob("digest-*"))]


def read_loss(out: Path) -> float:
    return json.loads((out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])["validation_loss"]


def draw_results(results: Sequence[tuple[Scenario, Result]]) -> ResultTable:
    rows = []
    for scenario, result in results:
        numbers = [
            [kill for kill in result.kills if kill.number == number] for number in (signal.SIGKILL, signal.SIGTERM)
        ]
        lost = [str(max((kill.lost for kill in kills), default=0)) for kills in numbers]
        same = {True: "yes", False: "no", None: f"loss same to {LOSS_BOUND:.0e}"}[result.is_same]
        counts = [str(len(kills)) for kills in numbers]
        rows.append([scenario.name, *counts, f"{result.resumes} of {len(result.kills)}", *lost, same])
    header = [
        "run",
        "SIGKILL",
        "SIGTERM",
        "resumed",
        "most steps lost, SIGKILL",
        "most steps lost, SIGTERM",
        "same bits at the end",
    ]
    notes = ["A kill strikes when it strikes: steps that are lost differ from run to run."]
    return ResultTable.of("kills", "Runs that are killed, and resumed", header, rows, header[1:-1], notes)


def tables(quick: bool, kills: int = 20, seed: int = 0) -> Iterator[ResultTable]:
    """Yields the table of all kills; a quick run kills one run of the first scenario."""
    results = []
    for index, scenario in enumerate(SCENARIOS[:1] if quick else SCENARIOS):
        own = 1 if quick else len(range(index, kills, len(SCENARIOS)))
        with tempfile.TemporaryDirectory() as folder:
            results.append((scenario, drill(scenario, own, Path(folder), seed + index)))
    yield draw_results(results)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description="Kill trainings at random moments, and resume them.")
    parser.add_argument("--kills", type=int, default=20, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    options, begin = parser.parse_args(argv), time.monotonic()
    print_tables(tables(False, options.kills, options.seed))
    print(f"{options.kills} kills in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
