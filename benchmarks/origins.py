"""Who names the line that made a number infinite or nan, and what `numerics.first_nonfinite` costs while none is.

Run from the root of the repository:

    python -m benchmarks.origins peers [--torch-python PATH]
    python -m benchmarks.origins costs [cpu|tpu|gpu] [--quick]

`peers` plants ten faults in JAX and their twins in PyTorch, and judges the reports by one rule, which is in
`_origins_reports.py`. PyTorch and transformers may be in an environment of their own. `costs` compiles the gradient
of the example's GPT with the search and without, for a TPU v5e or an H100 that need not be there, too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import jax

from benchmarks import _origins_jax
from benchmarks._origins_cost import POLICIES, Cost, check_bits, gradient, make_steps, measure, measure_search
from benchmarks._origins_reports import ARGUMENTS, NAMES_IT, TORCH_CONTESTANTS
from benchmarks._results import ResultTable, print_tables
from benchmarks._targets import TARGETS, Target
from examples.gpt.model import GPTConfig

NOT_INSTALLED = "not installed"
ASKED = Cost(bytes=1.02, temporaries=1.25, peak=float("nan"), compile_time=4, trace_time=2.5)
"""What a good step may cost at most, over the same without a search."""


def judge_peers(torch_python: str) -> dict[str, dict[str, str]]:
    """Returns each contestant's report of each fault. The given Python runs the contestants in PyTorch."""
    verdicts = {contestant: _origins_jax.judge_all(contestant) for contestant in _origins_jax.CONTESTANTS}
    missing = dict.fromkeys(ARGUMENTS, NOT_INSTALLED)
    return {**verdicts, **dict.fromkeys(TORCH_CONTESTANTS, missing), **judge_in_torch(torch_python)}


def judge_in_torch(python: str) -> dict[str, dict[str, str]]:
    """The verdicts on those contestants in PyTorch that this Python has."""
    made = subprocess.run([python, "-m", "benchmarks._origins_torch"], capture_output=True, text=True)
    if made.returncode and "No module named 'torch'" in made.stderr:
        return {}
    if made.returncode:
        raise RuntimeError(f"{python} -m benchmarks._origins_torch failed:\n{made.stderr}")
    return json.loads(made.stdout)


def make_peers_table(verdicts: dict[str, dict[str, str]]) -> ResultTable:
    """A line for each fault, and one that counts."""
    lines = [[name, *(said[name] for said in verdicts.values())] for name in ARGUMENTS]
    rows = [*lines, ["named", *map(_count, verdicts.values())]]
    notes = [
        "Line: the report names the line where the number is made; cause: that where the infinity or zero comes from. "
        "A false alarm names a line whose number harms nothing.",
    ]
    return ResultTable.of("faults", "Who names the line of ten planted faults", ["fault", *verdicts], rows, notes=notes)


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


def fault_tables(quick: bool) -> Iterator[ResultTable]:
    """Who names the line."""
    verdicts = {name: _origins_jax.judge_all(name) for name in list(_origins_jax.CONTESTANTS)[:1]} if quick else None
    yield make_peers_table(judge_peers(sys.executable) if verdicts is None else verdicts)


def _count(said: dict[str, str]) -> str:
    if NOT_INSTALLED in said.values():
        return NOT_INSTALLED
    return f"{sum(verdict in NAMES_IT for verdict in said.values())} of {len(said)}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    peers = commands.add_parser("peers", help="who names the line")
    peers.add_argument("--torch-python", metavar="PATH", default=sys.executable, help="a Python that has PyTorch")
    costs = commands.add_parser("costs", help="what a good step costs")
    costs.add_argument("target", nargs="?", choices=TARGETS, default="cpu", help="what to compile for")
    costs.add_argument("--quick", action="store_true", help="a small model, traced once")
    given = parser.parse_args(argv)
    with jax.numpy_dtype_promotion("standard"):
        if given.command == "peers":
            print(f"jax {jax.__version__}")
            print_tables([make_peers_table(judge_peers(given.torch_python))])
            return
        target = TARGETS[given.target]()
        config = GPTConfig(width=32, depth=1, heads=2, context=16) if given.quick else GPTConfig()
        print(f"jax {jax.__version__}, {target.name}")
        print_tables([make_costs_table(target, config, 1 if given.quick else 5)])


if __name__ == "__main__":
    main()
