"""Measures the cost of `numerics.collect` and `first_nonfinite` around the gradient of the example's GPT.

Run from the root of the repository:

    python -m benchmarks.numerics [cpu|tpu|gpu] [--quick]

Makes a table of XLA's analysis of the programs, by the measured tensors. With `tpu` or `gpu` they are
compiled for a TPU v5e or an H100, and not run.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jmp_policy as jmp
from benchmarks._compiled import figures
from benchmarks._measure import count_operations
from benchmarks._programs import Program
from benchmarks._results import ResultTable, print_tables
from benchmarks._targets import TARGETS, Target
from benchmarks.architectures._programs import shapes
from benchmarks.autocast import gpt
from examples.gpt.model import GPTConfig

MEASURED: dict[str, dict[str, Any]] = {
    "matmuls, four formats, histogram": {},
    "matmuls, float16": {"formats": ("float16",), "histogram": False},
    "matmuls, four formats, histogram, `sample=None`": {"sample": None},
    "matmuls, float16, `sample=None`": {"formats": ("float16",), "histogram": False, "sample": None},
    "all, four formats, histogram": {"where": "all"},
    "matmuls, four formats, histogram, `every=100`": {"every": 100},
}
"""What is asked of `collect`."""

MATMULS_ONLY = {"of": ("forward", "backward")}


class Cost(NamedTuple):
    """Cost of a program."""

    operations: float
    bytes: float
    temporaries: float
    compile_seconds: float
    trace_seconds: float
    run_seconds: float

    def over(self, other: "Cost") -> "Cost":
        """Returns the ratios to another cost."""
        return Cost(*(mine / its for mine, its in zip(self, other, strict=True)))


def gradient(config: GPTConfig) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes the loss and the gradients of the example's GPT in float32, and the shapes of their arguments."""
    architecture = gpt(config)
    model = architecture.without_policy()

    def loss_and_grads(params: Any, variables: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda params: model.loss(params, variables, batch)[0])(params)

    return loss_and_grads, (*shapes(model), architecture.batch)


def observe(fun: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Program:
    """Adds statistics to a function."""
    observed = jax.jit(jmp.numerics.collect(fun, **MATMULS_ONLY, **options))
    return Program(observed, ((jnp.int32(0), *args) if "every" in options else args))


def cost(program: Program, target: Target) -> Cost:
    """Measures the cost on a target; seconds are of this process."""
    jax.clear_caches()
    start = time.process_time()
    lowered = program.step.lower(*target.put(program.args))
    traced = time.process_time()
    compiled = lowered.compile(compiler_options={} if target.name == "CPU" else target.options)
    end = time.process_time()
    found = figures(compiled)
    operations = count_operations(lowered.as_text())
    ran = run(compiled, program.args) if target.name == "CPU" else math.nan
    return Cost(operations, found.bytes_accessed, found.temporaries, end - traced, traced - start, ran)


def run(compiled: Any, args: tuple[Any, ...]) -> float:
    """Runs a compiled program on small numbers, and returns the least of four process times."""
    given, times = jax.tree.map(_fill, args), []
    for _ in range(5):
        start = time.process_time()
        jax.block_until_ready(compiled(*given))
        times.append(time.process_time() - start)
    return min(times[1:])


def _fill(arg: Any) -> jax.Array:
    return jnp.full(arg.shape, 0.01, jax.dtypes.canonicalize_dtype(arg.dtype))


def cost_rows(config: GPTConfig, target: Target, measured: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Makes a row for each way to measure, and for the search for nans."""
    fun, args = gradient(config)
    plain = cost(Program(jax.jit(fun), args), target)
    programs = {name: observe(fun, args, options) for name, options in measured.items()}
    programs["`first_nonfinite`"] = Program(jax.jit(jmp.numerics.first_nonfinite(fun)), args)
    rows = []
    for name, program in programs.items():
        ratios = cost(program, target).over(plain)
        rows.append([name, *("not run" if math.isnan(ratio) else f"{ratio:.2f}" for ratio in ratios)])
    return rows


_TIMED = ["compile time", "trace time", "run time"]
_COST_HEADER = ["measured", "operations", "bytes", "temporaries", *_TIMED]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=TARGETS, default="cpu", help="what to compile for")
    parser.add_argument("--quick", action="store_true", help="a small model, and few ways to measure it")
    given = parser.parse_args(argv)
    target = TARGETS[given.target]()
    with jax.numpy_dtype_promotion("standard"):
        print(f"jax {jax.__version__}, {target.name}")
        print_tables(tables(given.quick, target))


def tables(quick: bool, target: Target | None = None) -> Iterator[ResultTable]:
    """Yields the table of costs on a target, this machine's CPU by default."""
    target = TARGETS["cpu"]() if target is None else target
    config = GPTConfig(width=32, depth=1, heads=2, context=16) if quick else GPTConfig()
    measured = {"matmuls, float16": MEASURED["matmuls, float16"]} if quick else MEASURED
    rows = cost_rows(config, target, measured)
    title = f"Gradients of the example's GPT with statistics or a search, over those without, for {target.name}"
    notes = ["The program without them is cheaper in every row: this is their price. No search has anything to find."]
    yield ResultTable.of("costs", title, _COST_HEADER, rows, _TIMED, notes)


if __name__ == "__main__":
    main()
