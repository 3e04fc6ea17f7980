"""Real architectures, trained under each policy, and the costs of their steps against the same steps by hand.

Run from the root of the repository:

    python -m benchmarks.architectures [--only NAME] [--seeds N]

Two tables: the final losses over the seeds, and the ratios of costs.
"""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence

import jax

import jmp_policy as jmp
from benchmarks._measure import cost
from benchmarks._results import ResultTable, print_tables
from benchmarks.architectures._programs import by_hand, ours
from benchmarks.architectures._registry import ARCHITECTURES, SMALL_SCALE
from benchmarks.architectures._training import Run, initialize, train

POLICIES = ("mixed_bfloat16", "mixed_float16")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ARCHITECTURES, metavar="NAME", help="one architecture, for example 'VAE'")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="how many runs there are of each")
    options = parser.parse_args(argv)
    print(f"jax {jax.__version__}, {jax.default_backend()}")
    print_tables(tables(False, [options.only] if options.only else list(ARCHITECTURES), options.seeds))


def tables(quick: bool, names: Sequence[str] = tuple(ARCHITECTURES), seeds: int = 5) -> Iterator[ResultTable]:
    """The final losses, and the costs."""
    if quick:
        names, seeds = ("mixture of experts",), 2
    losses, costs = [], []
    for name in names:
        print(f"training {name}", flush=True)
        losses += loss_rows(name, seeds)
        costs += [cost_row(name, policy) for policy in POLICIES]
    header = ["architecture", "API", "policy"]
    title = f"Training for fifty steps: losses, and distances from float32 in deviations of its {seeds} seeds"
    yield ResultTable.of("losses", title, [*header, "first loss", "final loss", "distance", "skipped"], losses)
    title = "A step over the same step with dtypes, scaling and skipping by hand"
    yield ResultTable.of("costs", title, [*header, "operations", "flops", "bytes", "temporaries"], costs)


def loss_rows(name: str, seeds: int) -> list[list[str]]:
    """Returns the results of training an architecture, policy by policy."""
    architecture = ARCHITECTURES[name]
    initial = initialize(architecture, seeds)
    runs = {policy: train(architecture, jmp.get_policy(policy), initial) for policy in ("float32", *POLICIES)}
    if runs["mixed_float16"].skipped_steps.any():
        label = f"mixed_float16, scale from {SMALL_SCALE.loss_scale:.0f}"
        runs[label] = train(architecture, jmp.get_policy("mixed_float16"), initial, SMALL_SCALE)
    return [[name, architecture.api, policy, *figures(run, runs["float32"])] for policy, run in runs.items()]


def figures(run: Run, reference: Run) -> list[str]:
    """The first loss, the final one and its deviation, its distance from `reference` in deviations, and the skips."""
    spread = f"{run.final.mean():.4f} ± {run.final.std(ddof=1):.4f}"
    distance = "" if run is reference else f"{run.distance(reference):+.2f}"
    return [f"{run.losses[:, 0].mean():.3f}", spread, distance, f"{run.skipped_steps.mean():.1f}"]


def cost_row(name: str, policy: str) -> list[str]:
    """The costs of a step under a policy over the step by hand."""
    architecture = ARCHITECTURES[name]
    ratios = cost(ours(architecture, jmp.get_policy(policy))).over(cost(by_hand(architecture, jmp.get_policy(policy))))
    return [name, architecture.api, policy, *[f"{ratio:.2f}" for ratio in dataclasses.astuple(ratios)]]


if __name__ == "__main__":
    main()
