"""What a train step with jmp_policy costs, against the same step by hand, without a check, with jmp and with Flax.

Run from the root of the repository:

    python -m benchmarks.zero_cost [--json PATH] [--quick]

One table of ratios, ours over theirs: below one, ours is cheaper. Operations are counted in the StableHLO; flops, bytes
accessed and temporaries are what XLA says of the compiled step, and the same on every run.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Sequence

import jax

from benchmarks._dispatch import dispatch_microseconds
from benchmarks._markdown import table
from benchmarks._measure import Cost, cost, lowering_seconds, step_seconds
from benchmarks._programs import (
    APIS,
    MODELS,
    POLICIES,
    Case,
    by_hand,
    ours,
    unchecked,
    with_dynamic_scale,
    with_jmp,
)
from jmp_policy.demo._gpt import GPTConfig

QUICK_GPT = GPTConfig(width=32, depth=2, heads=2, context=16)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was measured of a case.

    Attributes:
      case: the case.
      ours: our cost.
      others: the costs of the others, by name.
      lowering: our time to trace and lower over that by hand.
      step_times: seconds of a step by name, ours included; empty but on an accelerator.
    """

    case: Case
    ours: Cost
    others: dict[str, Cost]
    lowering: float
    step_times: dict[str, float]


def compare(case: Case, repeats: int = 10) -> Comparison:
    """Measures a case."""
    others = {"by hand": by_hand(case), "by hand, no check": unchecked(case), "jmp": with_jmp(case)}
    if case.scaled:
        others["DynamicScale"] = with_dynamic_scale(case)
    mine = ours(case)
    costs = {name: cost(program) for name, program in others.items()}
    our_seconds, hand_seconds = lowering_seconds([mine, others["by hand"]], repeats)
    programs = {"ours": mine, **others}
    times = {}
    if jax.default_backend() == "gpu":
        times = dict(zip(programs, step_seconds(list(programs.values())), strict=True))
    return Comparison(case, cost(mine), costs, our_seconds / hand_seconds, times)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="PATH", help="also write what was measured to this file")
    parser.add_argument("--quick", action="store_true", help="a small GPT, and three repeats of what is timed")
    options = parser.parse_args(argv)
    gpt, repeats = (QUICK_GPT, 3) if options.quick else (GPTConfig(), 10)
    cases = [Case(*names, gpt) for names in itertools.product(MODELS, APIS, POLICIES)]
    comparisons = []
    for case in cases:
        print(f"measuring {case.model}, {case.api}, {case.policy}", flush=True)
        comparisons.append(compare(case, repeats))
    dispatch = dispatch_microseconds()
    print(report(comparisons, dispatch))
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"comparisons": [_as_json(c) for c in comparisons], "dispatch": dispatch}, file, indent=2)


def report(comparisons: Sequence[Comparison], dispatch: dict[str, float]) -> str:
    """The tables, in Markdown."""
    rows = [row for comparison in comparisons for row in _rows(comparison)]
    header = ["model", "API", "policy", "ours over", "operations", "flops", "bytes", "temporaries", "lowering time"]
    timed = any(c.step_times for c in comparisons)
    ratios = table([*header, *(["step time"] if timed else [])], [row if timed else row[:-1] for row in rows])
    added = table(["argument", "added µs"], [[name, f"{added:.1f}"] for name, added in dispatch.items()])
    return f"{_environment()}\n\n{ratios}\n\nDispatch, over a tuple of the same arrays:\n\n{added}"


def _rows(comparison: Comparison) -> list[list[str]]:
    case, times = comparison.case, comparison.step_times
    rows = []
    for name, other in comparison.others.items():
        ratios = [f"{ratio:.2f}" for ratio in dataclasses.astuple(comparison.ours.over(other))]
        lowering = f"{comparison.lowering:.2f}" if name == "by hand" else ""
        step_time = f"{times['ours'] / times[name]:.2f}" if times else ""
        rows.append([case.model, case.api, case.policy, name, *ratios, lowering, step_time])
    return rows


def _environment() -> str:
    device = jax.devices()[0].device_kind
    times = "" if jax.default_backend() == "gpu" else " Step times: not measured."
    return f"jax {jax.__version__}, {jax.default_backend()} ({device}).{times}"


def _as_json(comparison: Comparison) -> dict:
    return dataclasses.asdict(comparison)


if __name__ == "__main__":
    main()
