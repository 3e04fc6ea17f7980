"""Costs and learning of AdamW with its moments in 8 bits: `optim.quantize_state`.

Run from the root of the repository:

    python -m benchmarks.small_state [--only TABLE ...] [--quick]

Three tables. `updates`: bytes of state and of temporaries, and process time, of an update; programs take turns.
`sparse`: the largest weight and the loss of a model whose embeddings rarely have a gradient. `gpt`: the losses of the
demo's GPT.
"""

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

from benchmarks._measure import median_seconds
from benchmarks._optimizer_cost import count_bytes, count_parameters, traffic
from benchmarks._results import ResultTable, print_tables
from benchmarks._small_state_gpt import gpt_contestants, train_gpts
from benchmarks._small_state_updates import describe_params, small_state_optimizers, update_program
from benchmarks._sparse_embeddings import sparse_contestants, train_sparse
from examples.gpt.model import GPTConfig

SIZES = 1024, 10
"""Width and depth of 10.5 million parameters."""

REPEATS, SPARSE_STEPS, GPT_STEPS = 20, 600, 1000

GPT_SEEDS = range(6)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="TABLE",
                        help=f"some of: {', '.join(TABLES)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and a few steps: that it runs, no figures")
    options = parser.parse_args(argv)
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax")]
    print(", ".join([*versions, jax.default_backend()]))
    with jax.numpy_dtype_promotion("standard"):
        print_tables(TABLES[name](options.quick) for name in options.only)


def tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the costs of updates."""
    yield updates_table(quick)


def training_tables(quick: bool) -> Iterator[ResultTable]:
    """Returns the losses of trained models."""
    yield sparse_table(quick)
    yield gpt_table(quick)


def updates_table(quick: bool) -> ResultTable:
    """State, temporaries and time of an update."""
    sizes, repeats = ((64, 2), 1) if quick else (SIZES, REPEATS)
    optimizers, params = small_state_optimizers(), describe_params(*sizes)
    seconds = update_seconds(list(optimizers.values()), params, repeats)
    count = count_parameters(params)
    rows = []
    for (name, tx), taken in zip(optimizers.items(), seconds, strict=True):
        state = count_bytes(jax.eval_shape(tx.init, params)) / count
        temporaries = traffic(update_program(tx, params)).temporaries / count
        rows.append([name, f"{state:.3f}", f"{temporaries:.3f}", f"{taken / seconds[0]:.2f}"])
    header = ["optimizer", "state, bytes each", "temporaries, bytes each", "time over adamw"]
    notes = [
        "AdamW alone is the fastest, and keeps four times the state: numbers are read, rounded and written in pieces "
        "here, and no whole float32 moment is ever alive. `cast_state` widens the moments before the optimizer runs, "
        "and XLA:CPU writes them down.",
        "Time is process time, in which all take turns.",
    ]
    return ResultTable.of("updates", f"An update of {count:,} parameters", header, rows, ["time over adamw"], notes)


def update_seconds(optimizers: Sequence[optax.GradientTransformation], params: Any, repeats: int) -> list[float]:
    """The process time of an update by each, a median over repeats in which all take turns."""
    return median_seconds([_runner(tx, params) for tx in optimizers], repeats, time.process_time)


def _runner(tx: optax.GradientTransformation, shapes: Any) -> Callable[[], None]:
    """A function that makes the next update, having made the first, which compiles."""
    params = jax.tree.map(lambda leaf: jax.random.normal(jax.random.key(leaf.size), leaf.shape), shapes)
    carry: list[Any] = [jax.tree.map(lambda leaf: leaf / 100, params), tx.init(params)]
    step = update_program(tx, shapes).step

    def run() -> None:
        carry[:] = jax.block_until_ready(step(*carry, params))  # the updates are the gradients of the next one

    run()
    return run


def sparse_table(quick: bool) -> ResultTable:
    """The largest weight, and the loss, of each seed."""
    seeds, steps, tokens = ((0,), 3, 256) if quick else ((0, 1, 2), SPARSE_STEPS, 4096)
    contestants = list(sparse_contestants().items())
    rows = []
    for name, tx in contestants[:2] if quick else contestants:
        ends = [train_sparse(tx, seed, steps, tokens) for seed in seeds]
        rows.append([name, *(cell for largest, loss in ends for cell in (f"{largest:.3g}", f"{loss:.4f}"))])
    header = [column for seed in seeds for column in (f"largest weight, seed {seed}", f"loss, seed {seed}")]
    title = f"A model whose embeddings rarely have a gradient, after {steps} steps"
    return ResultTable.of("sparse", title, ["optimizer", *header], rows)


def gpt_table(quick: bool) -> ResultTable:
    """Validation losses of the example's GPT: AdamW's, and how far the others are from it on the same seed."""
    seeds, steps = ((0,), 1) if quick else (GPT_SEEDS, GPT_STEPS)
    config = GPTConfig(depth=1, context=16) if quick else GPTConfig()
    names = ["AdamW", "quantize_state"] if quick else list(gpt_contestants())
    losses: dict[str, list[float]] = {}
    state = {}
    for run in train_gpts(names, seeds, steps, config):
        losses.setdefault(run.name, []).append(run.validation)
        state[run.name] = f"{run.state:.2f}"
    first = losses.pop("AdamW")
    rows = [["AdamW", state["AdamW"], *(f"{end:.4f}" for end in first), f"{statistics.mean(first):.4f}"]]
    for name, ends in losses.items():
        above = [end / base - 1 for end, base in zip(ends, first, strict=True)]
        rows.append([name, state[name], *(f"{share:+.2%}" for share in (*above, statistics.mean(above)))])
    columns = [f"seed {seed}" for seed in seeds]
    title = f"Validation losses of the demo's GPT after {steps} steps: AdamW's, and how far others are above it"
    return ResultTable.of("gpt", title, ["optimizer", "state, bytes a parameter", *columns, "mean"], rows)


TABLES: dict[str, Callable[[bool], ResultTable]] = {"updates": updates_table, "sparse": sparse_table, "gpt": gpt_table}


if __name__ == "__main__":
    main()
