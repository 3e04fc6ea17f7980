"""Compares a train step with jmp_policy with the same step by hand, with a check and without.

Run from the root of the repository:

    python -m benchmarks.zero_cost [--json PATH] [--quick]

Makes one table of ratios, ours over theirs: below one, ours is cheaper. Operations are counted in the StableHLO. Flops,
bytes accessed and temporaries come from XLA's analysis of the compiled step, and are the same on every run.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from benchmarks._measure import Cost, cost, lowering_seconds
from benchmarks._programs import APIS, MODELS, POLICIES, Case, by_hand, ours, unchecked
from benchmarks._results import ResultTable, run_alone
from examples.gpt.model import GPTConfig

QUICK_GPT = GPTConfig(width=32, depth=2, heads=2, context=16)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Our cost for a case, the costs of the others by name, and our time to trace and lower over the time by hand."""

    case: Case
    ours: Cost
    others: dict[str, Cost]
    lowering: float


def tables(quick: bool) -> Iterator[ResultTable]:
    """Yields the table of steps; a quick run measures an MLP alone, and repeats nothing that is timed."""
    every = list(itertools.product(MODELS, APIS, POLICIES))
    comparisons = []
    for names in [("mlp", "nnx", "mixed_float16")] if quick else every:
        print(f"measuring {', '.join(names)}", flush=True)
        comparisons.append(compare(Case(*names, GPTConfig()), 1 if quick else 5))
    yield steps_table(comparisons)


def compare(case: Case, repeats: int = 5) -> Comparison:
    """Measures a case."""
    others = {"by hand": by_hand(case), "by hand, no check": unchecked(case)}
    mine = ours(case)
    costs = {name: cost(program) for name, program in others.items()}
    our_seconds, hand_seconds = lowering_seconds([mine, others["by hand"]], repeats)
    return Comparison(case, cost(mine), costs, our_seconds / hand_seconds)


def steps_table(comparisons: Sequence[Comparison]) -> ResultTable:
    """Makes the table of our costs over the costs of others."""
    header = ["model", "API", "policy", "ours over", "operations", "flops", "bytes", "temporaries", "lowering time"]
    rows = [row for comparison in comparisons for row in _rows(comparison)]
    title = "A train step, ours over theirs: below one, ours is cheaper"
    return ResultTable.of("steps", title, header, rows, ("lowering time",), NOTES)


NOTES = (
    "Ours is above by hand in operations: calls of functions, and cases that choose the platform's form of the skip. "
    "XLA removes them.",
    "By hand, no check, has no loss scale and no skip, which is what more is paid for here.",
)


def _rows(comparison: Comparison) -> Iterator[list[str]]:
    case = comparison.case
    for name, other in comparison.others.items():
        ratios = [f"{ratio:.2f}" for ratio in dataclasses.astuple(comparison.ours.over(other))]
        lowering = f"{comparison.lowering:.2f}" if name == "by hand" else ""
        yield [case.model, case.api, case.policy, name, *ratios, lowering]


if __name__ == "__main__":
    run_alone(__doc__, tables)
