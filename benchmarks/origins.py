"""Measures the cost of `numerics.first_nonfinite` in a finite step, and of `optim.find_origin`.

Run from the root of the repository:

    python -m benchmarks.origins [cpu|tpu|gpu] [--quick]

Compiles the gradient of the example's GPT with the search and without it. TPU v5e and H100 need not be present.
"""

import argparse
from collections.abc import Iterator, Sequence

import jax

from benchmarks._origins_cost import POLICIES, Cost, check_bits, gradient, make_steps, measure, measure_search
from benchmarks._results import ResultTable, print_tables
from benchmarks._targets import TARGETS, Target
from examples.gpt.model import GPTConfig

ASKED = Cost(bytes=1.02, temporaries=1.25, peak=float("nan"), compile_time=4, trace_time=2.5)
"""What a good step may cost at most, over the same without a search."""


def make_costs_table(
    target: Target, config: GPTConfig, repeats: int, policies: Sequence[str] = tuple(POLICIES)
) -> ResultTable:
    """A line for each policy. On a CPU it runs a good step, too."""
    lines = []
    for name in policies:
        fun, args = gradient(config, POLICIES[name])
        ratios = measure(make_steps(fun, args), target, repeats)
        params = jax.tree.map(lambda shape: 0.02 * jax.random.normal(jax.random.key(0), shape.shape), args[:2])
        bits = str(check_bits(fun, (*params, *args[2:]))) if target.name == "CPU" else "not run"
        lines.append([name, *(f"{ratio:.2f}" for ratio in ratios), bits])
    asked = ["asked", *("" if limit != limit else f"{limit:.2f}" for limit in ASKED), "0"]
    timed = ["compile time", "trace time"]
    header = ["policy", *(name.replace("_", " ") for name in Cost._fields), "other bytes"]
    title = f"A good step of the demo's GPT with the search over one without, for {target.name}"
    notes = [
        "The step without the search is cheaper in every row: this is its price. asked: the most that it may be.",
        "other bytes: of the results of a good step, those that differ from the step without.",
    ]
    return ResultTable.of("costs", title, header, [*lines, asked], timed, notes)


def make_search_table(target: Target, config: GPTConfig, policies: Sequence[str] = tuple(POLICIES)) -> ResultTable:
    """Measures the search on the host, with a row for each policy."""
    rows = []
    for name in policies:
        ratios = measure_search(*gradient(config, POLICIES[name]), target)
        rows.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    title = f"The program of `optim.find_origin` over a step of the demo's GPT, for {target.name}"
    notes = ["It is compiled at the first skipped step. The training step costs nothing more."]
    return ResultTable.of("search", title, ["policy", "compile time", "temporaries"], rows, ["compile time"], notes)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the costs of a finite step, and of a search on the host, on this machine's CPU."""
    config = GPTConfig(width=32, depth=1, heads=2, context=16) if quick else GPTConfig()
    policies = list(POLICIES)[:1] if quick else list(POLICIES)
    yield make_search_table(TARGETS["cpu"](), config, policies)
    yield make_costs_table(TARGETS["cpu"](), config, 1 if quick else 5, policies)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS, default="cpu", help="what to compile for")
    parser.add_argument("--quick", action="store_true", help="a small model, traced once")
    given = parser.parse_args(argv)
    with jax.numpy_dtype_promotion("standard"):
        target = TARGETS[given.target]()
        config = GPTConfig(width=32, depth=1, heads=2, context=16) if given.quick else GPTConfig()
        print(f"jax {jax.__version__}, {target.name}")
        print_tables([make_costs_table(target, config, 1 if given.quick else 5)])


if __name__ == "__main__":
    main()
