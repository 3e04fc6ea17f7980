"""`jmp-policy train`."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ._command import check_device, make_console, positive_int, seed
from ._processes import add_process_options, end_after_errors, join_processes, should_start_processes, start_processes

if TYPE_CHECKING:
    from rich.console import Console

    from examples.gpt import RunSummary, TrainResult

    from ._command import Commands


def add_train(commands: "Commands") -> None:
    """Adds `jmp-policy train` to the subparsers of argparse."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level GPT in mixed precision on real text",
        description="Train a byte-level GPT in mixed precision, by default on the sources of the Python standard "
        "library. Ctrl-C and SIGTERM save first; --resume continues bit-exactly.",
    )
    parser.add_argument("--api", choices=("nnx", "linen"), help="the Flax API of the model (default: nnx)")
    parser.add_argument("--data", nargs="+", default=(), metavar="PATH", help="text files and folders to train on")
    parser.add_argument(
        "--policy",
        help="such as float8_from_mixed_bfloat16, or auto: float32 where 20 steps in it say that half would lose "
        "numbers (default: half precision, by the doctor)",
    )
    parser.add_argument("--steps", type=positive_int, help="where to stop (default: 1500)")
    parser.add_argument("--seed", type=seed, help="of the parameters and batches (default: 0)")
    parser.add_argument("--out", type=Path, help="the folder of the run (default: the next of runs/001, runs/002, ...)")
    parser.add_argument(
        "--numerics",
        type=positive_int,
        metavar="N",
        help="on every Nth step, and the first, measure what its tensors look like and what other formats would do to "
        "them: numerics.jsonl, and a report and plots at the end. Training stays the same (default: never)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or the last one in runs/")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="train on several devices, such as data=2,fsdp=2,tensor=2: along data only the batch is split, along fsdp "
        "parameters, too, along tensor heads and wide layers. A run may be resumed on another mesh (default: one "
        "device, or data over all of several processes). On a CPU, JAX_NUM_CPU_DEVICES says how many there are",
    )
    add_process_options(parser)
    parser.set_defaults(run=_train, prepare=lambda: None)  # processes meet before JAX looks for devices


def _train(arguments: argparse.Namespace) -> int:
    """Trains, and prints how it ended; or starts the processes that do."""
    if should_start_processes(arguments):
        return start_processes(arguments)
    is_first = join_processes(arguments)
    check_device()
    from examples.gpt import TrainOptions, train

    names = ("api", "policy", "steps", "seed", "out", "resume", "numerics", "mesh")
    options = TrainOptions(data=tuple(arguments.data), **{name: getattr(arguments, name) for name in names})
    console = make_console(quiet=not is_first)
    with end_after_errors():
        result = train(options, console)
    _print_summary(result.summary, console)
    if result.finished:
        _print_losses(result, console)
        return 0
    resume = f"jmp-policy train --resume --out {result.folder}"
    console.print(f"stopped and saved at step {result.step}; continue with: {resume}")
    return 130 if result.interrupted else 0  # SIGTERM is how machines are taken back: nothing has failed


def _print_summary(summary: "RunSummary", console: "Console") -> None:
    from rich.table import Table

    table = Table("what the policy did", "")
    for row in summary.list_rows():
        table.add_row(*row)
    console.print(table, soft_wrap=False)


def _print_losses(result: "TrainResult", console: "Console") -> None:
    from rich.table import Table

    table = Table("validation loss", "bits per byte")
    table.columns[1].justify = "right"
    losses = {"this model": result.validation, "bigram baseline": result.bigram, "unigram baseline": result.unigram}
    for name, loss in losses.items():
        table.add_row(name, "not finite" if math.isnan(loss) else f"{loss:.3f}")
    console.print(table, soft_wrap=False)
    verdict = "beats" if result.validation < result.bigram else "does not beat"
    files = ", ".join(result.files)
    console.print(f"The model {verdict} the bigram baseline. {result.folder}/ holds {files}")
