"""What non-finite gradients do to the state of a training run: a count of corrupted numbers, library by library.

Run from the root of the repository:

    python -m benchmarks.faults [--steps 1000] [--seed 0] [--json PATH]

The same infinities and nans are put into one number of a random gradient, at random steps and once eight times in a
row. A number is corrupted if its bits differ, after the last step, from a run of the same library in which
each bad step left everything but the loss scale as it was.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from benchmarks._fault_contestants import CLASSES, FEATURES, Contestant, contestants
from benchmarks._faults import Fault, fault_tree, plan_faults
from benchmarks._markdown import table

RATE = 0.03


@dataclasses.dataclass(frozen=True)
class Count:
    """How many of some numbers are corrupted."""

    corrupted: int
    total: int

    def __str__(self) -> str:
        return f"{self.corrupted} / {self.total}"


def corruption(contestant: Contestant, plan: Sequence[Fault | None]) -> dict[str, Count]:
    """Trains through the faults of a plan, and counts what they corrupted, part by part."""
    state = reference = contestant.state
    for seed, fault in enumerate(plan):
        batch = _batch(seed, contestant.state.params, fault)
        state, _ = contestant.step(state, batch)
        after, _ = contestant.step(reference, batch)
        reference = after if fault is None else contestant.scale_of(reference, after)
    expected = _parts(reference)
    return {name: _differing(part, expected[name]) for name, part in _parts(state).items()}


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="how long to train")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--json", metavar="PATH", help="also write the counts to this file")
    options = parser.parse_args(argv)
    all_contestants = contestants()
    plan = plan_faults(all_contestants[0].state.params, options.steps, RATE, options.seed)
    counts = {contestant.name: corruption(contestant, plan) for contestant in all_contestants}
    print(f"{sum(fault is not None for fault in plan)} faults in {options.steps} steps\n\n{report(counts)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({n: {part: dataclasses.asdict(c) for part, c in row.items()} for n, row in counts.items()}, file)


def report(counts: dict[str, dict[str, Count]]) -> str:
    """The table, in Markdown: corrupted numbers of all."""
    parts = next(iter(counts.values()))
    return table(["library", *parts], [[name, *map(str, row.values())] for name, row in counts.items()])


def _batch(seed: int, params: Any, fault: Fault | None) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, FEATURES)).astype(np.float32)
    return (x, fault_tree(params, fault)), rng.integers(0, CLASSES, 16).astype(np.int32)


def _parts(state: Any) -> dict[str, Any]:
    def named(*names: str) -> list[Any]:
        found = [optax.tree_utils.tree_get_all_with_path(state.opt_state, name) for name in names]
        return [value for values in found for _, value in values]

    return {
        "parameters": state.params,
        "moments": named("mu", "nu"),
        "schedule counts": named("count"),
        "batch statistics": state.variables,
        "step counter": state.step,
    }


def _differing(got: Any, expected: Any) -> Count:
    corrupted = total = 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        bits = [np.atleast_1d(np.asarray(x)).view(np.uint32) for x in (a, b)]
        corrupted += int((bits[0] != bits[1]).sum())
        total += bits[0].size
    return Count(corrupted, total)


if __name__ == "__main__":
    main()
