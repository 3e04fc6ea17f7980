"""Compares all peers on the same models, weights and batches: by hand, with jmp_policy, and with each peer library.

Run from the root of the repository:

    python -m benchmarks.peers [--quick]

Measures the cost of a compiled float16 and bfloat16 step over the step by hand on this CPU, and the loss after training
over that in float32. A library that is not installed has a row that says so.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from benchmarks import _measure, _peer_problems
from benchmarks._compiled import count_bytes
from benchmarks._measure import Cost, cost_of, median_seconds
from benchmarks._peer_problems import SMALL_GPT, SMALL_MLP, Problem
from benchmarks._peer_steps import BY_HAND, KERAS, KERAS_UNSCALED, UNSCALED, Make, steps
from benchmarks._results import ResultTable, run_alone

MISSING = "not installed"

_ADDED = (
    "The last column has the bytes that a step reads and writes more than one without a scale and without a check, of"
    " the same library if that brings the layers, in multiples of the bytes of the parameters."
)
_KERAS_ADAMW = (
    "Keras has fewer flops: its AdamW divides once for each parameter where optax's divides three times, since it folds"
    " the corrections of both moments into the learning rate."
)
COST_NOTES = {
    "float16": (
        "By hand: float16 layers, a dynamic loss scale, a check of all gradients and a `lax.cond` around AdamW.",
        "`optax.apply_if_finite` scales no loss, so that small gradients are lost in float16, and unscales nothing,"
        " which makes for fewer flops.",
        _ADDED,
        "With gradients of copies all gradients are half. Ours are float32 where the model reads a parameter in"
        " float32, as in a norm, or casts it at two uses, as the table of the embedding: by hand has fewer bytes.",
        _KERAS_ADAMW,
    ),
    "bfloat16": (
        "By hand: bfloat16 layers and AdamW, with no check. jmp, mixed-precision-for-jax and `optax.apply_if_finite`"
        " check, and are to be compared with our `skip_nonfinite`; mixed-precision-for-jax always scales the loss as"
        " well. Keras does neither, and is to be compared with our `optim.minimize`.",
        _ADDED,
        _KERAS_ADAMW,
    ),
}
"""What all steps of a dtype have in common, and why another needs less than ours, where that was measured."""


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the tables in the order in which they are measured.

    With `quick`, all peers train a small MLP for a few steps.
    """
    trained = _peer_problems.mlp(64, 3, steps=4) if quick else _peer_problems.gpt(SMALL_GPT, steps=40)
    stepping = {dtype: _compile_to_run(trained, dtype) for dtype in ("float32", "float16", "bfloat16")}
    compiled = [] if quick else [_peer_problems.mlp(*SMALL_MLP)]
    for dtype in ("float16", "bfloat16"):
        costs = {problem: {name: _cost(problem, make) for name, make in steps(dtype).items()} for problem in compiled}
        costs[trained] = {name: made and made.cost for name, made in stepping[dtype].items()}
        yield cost_table(dtype, costs)
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
    rows = []
    for problem, by_name in costs.items():
        base = by_name[BY_HAND]
        assert base is not None
        for name, cost in by_name.items():
            cells = [MISSING] * 5
            if cost is not None:
                plain = by_name[_without_check(dtype, name)]
                assert plain is not None
                added = (cost.bytes_accessed - plain.bytes_accessed) / count_bytes(problem.params)
                ratios = dataclasses.astuple(cost.over(base))
                cells = [*(f"{ratio:.3f}" for ratio in ratios), f"{round(added, 2) + 0.0:.2f}"]  # no -0.00
            rows.append((problem.name, name, *cells))
    header = ("model", "by", "operations", "flops", "bytes", "temporaries", "bytes of scale and check")
    title = f"A train step in {dtype}, compiled for this CPU, over the step by hand"
    return ResultTable(f"{dtype} step", title, header, tuple(rows), notes=COST_NOTES[dtype])


def _without_check(dtype: str, name: str) -> str:
    """Makes a step with the same forward pass, without a scale or a check."""
    if name.startswith(KERAS):
        return KERAS_UNSCALED if dtype == "float16" else KERAS
    return UNSCALED if dtype == "float16" else BY_HAND


def loss_table(problem: Problem, stepping: dict[str, dict[str, Stepping | None]]) -> ResultTable:
    """Runs the compiled steps, by dtype and contestant: the loss after training, and the process time of a step."""
    takes: dict[tuple[str, str], Callable[[Any], Any]] = {}
    for dtype, by_name in stepping.items():
        takes |= {(dtype, name): made.take for name, made in by_name.items() if made is not None}
    seconds = _take_turns(takes, problem.batches)
    losses = {(dtype, name): None for dtype, by_name in stepping.items() for name in by_name}
    for dtype, name in takes:
        made = stepping[dtype][name]
        assert made is not None
        losses[dtype, name] = problem.loss_in_float32(made.params)
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


if __name__ == "__main__":
    run_alone(__doc__, tables)
