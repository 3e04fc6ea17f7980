"""`jmp-policy compare`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ._arguments import positive_int, seed
from ._console import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from ..demo import VariantResult


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser(
        "compare",
        help="the same short training in float32, bfloat16 and float16 with and without loss scaling",
        description="Run the same short training in float32, in bfloat16, and in float16 without and with a dynamic "
        "loss scale, and print one table.",
    )
    parser.add_argument("--data", nargs="+", default=(), metavar="PATH", help="text files and folders to train on")
    parser.add_argument("--steps", type=positive_int, default=200, help="of each training (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of parameters and batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the folder for table and plot (default: the next runs/compare-001)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compares, and prints the table."""
    from ..demo import CompareOptions, compare

    console = make_console()
    options = CompareOptions(tuple(arguments.data), arguments.steps, arguments.seed, arguments.out)
    folder, rows = compare(options, console)
    console.print(_table(rows), soft_wrap=False)
    console.print(f"{folder}/ holds table.json, loss.png")
    return 0


def _table(rows: Sequence["VariantResult"]) -> "Table":
    from rich import box
    from rich.table import Table

    title = "Losses in bits per byte, memory in MiB, time in ms"
    table = Table("policy", title=title, box=box.SIMPLE_HEAD, show_edge=False)  # fits 80 columns
    for column in ("final\nloss", "vs\nfloat32", "zeroed\ngrads", "skipped\nsteps", "params", "activa-\ntions", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name.replace(", ", "\n"),
            _number(row.final_loss, ".3f"),
            _number(row.difference, "+.4f"),
            f"{row.zeroed_gradient_share:.2%}",
            str(row.skipped_steps),
            f"{row.parameter_bytes / 2**20:.2f}",
            f"{row.activation_bytes / 2**20:.2f}",
            f"{row.step_seconds * 1e3:.1f}",
        )
    return table


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "nan"
