"""Compares a train step with jmp_policy with the same step by hand, with a check and without.

Run from the root of the repository:

    python -m benchmarks.zero_cost [--quick]

Makes one table of ratios, ours over theirs: below one, ours is cheaper. Operations are counted in the StableHLO. Flops,
bytes accessed and temporaries come from XLA's analysis of the compiled step, and are the same on every run.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from benchmarks._measure import cost, lowering_seconds
from benchmarks._programs import APIS, MODELS, POLICIES, Case, by_hand, ours, unchecked
from benchmarks._results import ResultTable, run_alone
from examples.gpt.model import GPTConfig

QUICK_GPT = GPTConfig(width=32, depth=2, heads=2, context=16)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the table of steps; a quick run measures an MLP alone, and repeats nothing that is timed."""
    every = list(itertools.product(MODELS, APIS, POLICIES))
    cases = [("mlp", "nnx", "mixed_float16")] if quick else every
    rows = [[*names, *row] for names in cases for row in compare(Case(*names), 1 if quick else 5)]
    header = ["model", "API", "policy", "ours over", "operations", "flops", "bytes", "temporaries", "lowering time"]
    title = "A train step, ours over theirs: below one, ours is cheaper"
    yield ResultTable.of("steps", title, header, rows, ["lowering time"], NOTES)


def compare(case: Case, repeats: int) -> Iterator[list[str]]:
    """Yields for each other step its name, our costs over its, and our time to trace and lower over that by hand."""
    mine, others = ours(case), {"by hand": by_hand(case), "by hand, no check": unchecked(case)}
    our_cost, costs = cost(mine), {name: cost(other) for name, other in others.items()}
    our_seconds, seconds = lowering_seconds([mine, others["by hand"]], repeats)  # clears JAX's caches
    lowering = {"by hand": f"{our_seconds / seconds:.2f}"}
    for name, its in costs.items():
        ratios = dataclasses.astuple(our_cost.over(its))
        yield [name, *(f"{ratio:.2f}" for ratio in ratios), lowering.get(name, "")]


NOTES = (
    "Ours is above by hand in operations: calls of functions, and cases that choose the platform's form of the skip. "
    "XLA removes them.",
    "By hand, no check, has no loss scale and no skip, which is what more is paid for here.",
)


if __name__ == "__main__":
    run_alone(__doc__, tables)
