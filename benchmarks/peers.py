"""Compares all peers on the same models, weights and batches: by hand, with jmp_policy, and with each peer library.

Run from the root of the repository:

    python -m benchmarks.peers [--quick]

Measures the cost of a compiled float16 and bfloat16 step over the step by hand, on this CPU and, if their compilers are
installed, on a TPU and an H100. Also measures the loss after training over that in float32. A library that is not
installed has a row that says so. PyTorch has no measurements of a compiled program.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import _measure, _peer_problems, _targets
from benchmarks._compiled import Figures, figures
from benchmarks._measure import Cost, cost_of, median_seconds
from benchmarks._optimizer_cost import count_bytes
from benchmarks._peer_notes import COST_NOTES, Setting, compare_with_ours
from benchmarks._peer_problems import LARGE_MLP, SMALL_GPT, SMALL_MLP, Problem
from benchmarks._peer_steps import BY_HAND, KERAS, KERAS_UNSCALED, TORCH, UNSCALED, Make, steps
from benchmarks._results import ResultTable, run_alone

MISSING = "not installed"
UNMEASURED = "not measured"


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables in the order in which they are measured.

    With `quick`, all peers train a small MLP for a few steps, without accelerators.
    """
    trained = _peer_problems.mlp(64, 3, steps=4) if quick else _peer_problems.gpt(SMALL_GPT, steps=40)
    stepping = {dtype: _compile_to_run(trained, dtype) for dtype in ("float32", "float16", "bfloat16")}
    compiled = [] if quick else [_peer_problems.mlp(*SMALL_MLP)]
    for dtype in ("float16", "bfloat16"):
        costs = {problem: {name: _cost(problem, make) for name, make in steps(dtype).items()} for problem in compiled}
        costs[trained] = {name: made and made.cost for name, made in stepping[dtype].items()}
        yield cost_table(dtype, costs)
    if not quick:
        yield accelerator_table(_peer_problems.mlp(*LARGE_MLP))
    yield loss_table(trained, stepping)


@dataclasses.dataclass
class Stepping:
    """A step that is compiled for this machine, with its state, which each step replaces, and its cost."""

    compiled: Any
    state: Any
    cost: Cost

    def take(self, batch: Any) -> None:
        """Runs a step, and waits for it."""
        self.state, loss = self.compiled(self.state, batch)
        jax.block_until_ready((self.state, loss))

    @property
    def params(self) -> Any:
        """Returns the parameters."""
        return self.state.params if hasattr(self.state, "params") else self.state[0]


def cost_table(dtype: str, costs: dict[Problem, dict[str, Cost | None]]) -> ResultTable:
    """Makes the table of costs over the step by hand, and of the bytes that a scale and a check add to a step.

    A contestant that is not installed has `None` as its cost.
    """
    rows, notes = [], list(COST_NOTES[dtype])
    for problem, by_name in costs.items():
        base = by_name[BY_HAND]
        assert base is not None
        found = {}
        for name, cost in by_name.items():
            cells = [MISSING] * 5
            if cost is not None:
                plain = by_name[_without_check(dtype, name)]
                assert plain is not None
                added = (cost.bytes_accessed - plain.bytes_accessed) / count_bytes(problem.params)
                ratios = dataclasses.astuple(cost.over(base))
                found[name] = dict(zip(("flops", "bytes", "temporaries"), ratios[1:], strict=True))
                cells = [*(f"{ratio:.3f}" for ratio in ratios), f"{round(added, 2) + 0.0:.2f}"]  # no -0.00
            rows.append((problem.name, name, *cells))
        rows.append((problem.name, TORCH, *[UNMEASURED] * 5))
        notes += compare_with_ours(Setting("CPU", dtype, problem.name, problem.sizes), found)
    header = ("model", "by", "operations", "flops", "bytes", "temporaries", "bytes of scale and check")
    title = f"A train step in {dtype}, compiled for this CPU, over the step by hand"
    return ResultTable(f"{dtype} step", title, header, tuple(rows), notes=tuple(notes))


def _without_check(dtype: str, name: str) -> str:
    """Makes a step with the same forward pass, without a scale or a check."""
    if name.startswith(KERAS):
        return KERAS_UNSCALED if dtype == "float16" else KERAS
    return UNSCALED if dtype == "float16" else BY_HAND


def accelerator_table(problem: Problem) -> ResultTable:
    """Makes the table of bytes and temporaries of a float16 step, compiled for accelerators without running it."""
    made = {name: _lowerable(problem, make) for name, make in steps("float16").items()}
    header, columns, notes = ["by"], [], [f"An MLP of {problem.sizes[1]} layers of width {problem.sizes[0]}."]
    for name, label in {"tpu": "TPU v5e", "gpu": "H100"}.items():
        header += [f"{label}, {figure} over by hand" for figure in ("bytes", "temporaries")]
        try:
            target = _targets.TARGETS[name]()
        except ModuleNotFoundError as error:
            notes.append(f"{label}: {error}")
            columns.append({contestant: [MISSING] * 2 for contestant in made})
        else:
            found = {by: program and figures(target.compile(program)) for by, program in made.items()}
            columns.append(_accelerator_cells(found))
            setting = Setting(label, "float16", problem.name, problem.sizes)
            notes += [f"{label}, {note}" for note in compare_with_ours(setting, _bytes_and_temporaries(found))]
    rows = tuple((by, *(cell for column in columns for cell in column[by])) for by in made)
    title = "A train step in float16, compiled for a TPU and an H100 that need not be there"
    return ResultTable("accelerators", title, tuple(header), rows, notes=tuple(notes))


def _accelerator_cells(found: dict[str, Figures | None]) -> dict[str, list[str]]:
    ratios = _bytes_and_temporaries(found)
    return {by: [f"{ratio:.3f}" for ratio in ratios[by].values()] if by in ratios else [MISSING] * 2 for by in found}


def _bytes_and_temporaries(found: dict[str, Figures | None]) -> dict[str, dict[str, float]]:
    base = found[BY_HAND]
    assert base is not None
    ratios = {by: its.over(base) for by, its in found.items() if its is not None}
    return {by: {"bytes": its.bytes_accessed, "temporaries": its.temporaries} for by, its in ratios.items()}


def loss_table(problem: Problem, stepping: dict[str, dict[str, Stepping | None]]) -> ResultTable:
    """Runs the compiled steps, by dtype and contestant: the loss after training, and the process time of a step."""
    trainers = {dtype: _torch_trainer(problem, dtype) for dtype in stepping}
    takes: dict[tuple[str, str], Callable[[Any], Any]] = {}
    for dtype, by_name in stepping.items():
        takes |= {(dtype, name): made.take for name, made in by_name.items() if made is not None}
        if (trainer := trainers[dtype]) is not None:
            takes[dtype, TORCH] = trainer.train
    seconds = _take_turns(takes, problem.batches)
    losses = {(dtype, name): None for dtype, by_name in stepping.items() for name in (*by_name, TORCH)}
    for dtype, name in losses:
        if (dtype, name) in takes:
            made, trainer = stepping[dtype].get(name), trainers[dtype]
            params = made.params if made is not None else jax.tree.map(jnp.asarray, trainer.state().params)
            losses[dtype, name] = problem.loss_in_float32(params)
    reference = losses["float32", BY_HAND]
    assert reference is not None
    rows = []
    for (dtype, name), loss in losses.items():
        cells = [MISSING] * 3
        if loss is not None:
            change = round(100 * (loss / reference - 1), 3) + 0.0  # no -0.000
            cells = [f"{loss:.4f}", f"{change:+.3f} %", f"{1000 * seconds[dtype, name]:.1f}"]
        rows.append((dtype, name, *cells))
    header = ("dtype", "by", "loss", "over float32 by hand", "ms of process time a step")
    notes = (
        f"The {problem.name}, after {len(problem.batches)} steps of AdamW from the same weights on the same batches;"
        " the loss of its parameters is computed in float32.",
        "The loss is that of the first batch. So few steps show that all train the same model, not who trains better.",
        "Process time is of this CPU; it says nothing of an accelerator.",
    )
    title = "The loss after the same steps, and the time of one"
    return ResultTable("losses", title, header, tuple(rows), timed=(header[-1],), notes=notes)


def _take_turns(takes: dict[Any, Callable[[Any], Any]], batches: Sequence[Any]) -> dict[Any, float]:
    """Runs all steps in turns, and returns the process time of one of each."""
    taken: dict[Any, Iterator[Any]] = {key: iter(batches) for key in takes}
    runs = [lambda key=key, take=take: take(next(taken[key])) for key, take in takes.items()]
    return dict(zip(takes, median_seconds(runs, len(batches), time.process_time), strict=True))


def _lowerable(problem: Problem, make: Make) -> Any:
    try:
        return make(problem)
    except ImportError:
        return None


def _cost(problem: Problem, make: Make) -> Cost | None:
    program = _lowerable(problem, make)
    return None if program is None else _measure.cost(program)


def _compile_to_run(problem: Problem, dtype: str) -> dict[str, Stepping | None]:
    made: dict[str, Stepping | None] = {}
    for name, make in steps(dtype).items():
        program = _lowerable(problem, make)
        if program is None:
            made[name] = None
            continue
        lowered = program.lower()
        compiled = lowered.compile()
        made[name] = Stepping(compiled, program.args[0], cost_of(lowered, compiled))
    return made


def _torch_trainer(problem: Problem, dtype: str) -> Any:
    try:
        from benchmarks import _peer_torch
    except ImportError:
        return None
    trainer = _peer_torch.Trainer(_peer_torch.GPT_OR_MLP[problem.name](problem.sizes), dtype)
    trainer.init(problem.params)
    return trainer


if __name__ == "__main__":
    run_alone(__doc__, tables)
