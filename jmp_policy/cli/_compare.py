"""`jmp-policy compare`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ._command import make_console, positive_int, seed

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from examples.gpt import CompareOptions, VariantResult

    from ._command import Commands

_COLUMNS = """\
final loss: the mean of the last tenth of the steps, in bits per byte. vs float32: how far it is above.
zeroed: the share of the gradient that is zero but is not so in float32, by the parameters and by the logits, where \
the backward pass begins; of one batch, at the parameters that float32 ended with.
skipped steps: overflowed, and changed nothing. activ. MiB: memory of forward and backward, beside the parameters. \
step ms: the median."""


def add_compare(commands: "Commands") -> None:
    """Adds `jmp-policy compare` to the subparsers of argparse."""
    parser = commands.add_parser(
        "compare",
        help="the same short training in float32, bfloat16 and float16 with and without loss scaling",
        description="Run the same short training in float32, in bfloat16, and in float16 without and with a dynamic "
        "loss scale; print one table, and what it shows. Takes some minutes.",
    )
    parser.add_argument("--data", nargs="+", default=(), metavar="PATH", help="text files and folders to train on")
    parser.add_argument("--steps", type=positive_int, default=200, help="of each training (default: %(default)s)")
    parser.add_argument("--seed", type=seed, default=0, help="of parameters and batches (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="the folder for table and plot (default: the next runs/compare-001)")
    parser.set_defaults(run=_run_compare)


def _run_compare(arguments: argparse.Namespace) -> int:
    """Compares, and prints the table and what it shows."""
    from examples.gpt import CompareOptions, compare

    console = make_console()
    options = CompareOptions(tuple(arguments.data), arguments.steps, arguments.seed, arguments.out)
    folder, rows = compare(options, console)
    console.print()
    console.print(_make_comparison_table(rows), soft_wrap=False)
    console.print()
    _print_findings(rows, options, console)
    console.print(f"{folder}/ holds table.json, loss.png")
    return 0


def _make_comparison_table(rows: Sequence["VariantResult"]) -> "Table":
    from rich import box
    from rich.table import Table

    # Fits 80 columns.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("\npolicy", no_wrap=True)
    columns = "final loss", "vs float32", "zeroed, params", "zeroed, logits", "skipped steps", "activ. MiB", "step ms"
    for column in columns:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name.replace(", ", "\n"),
            _format_number(row.final_loss, ".3f"),
            _format_number(row.difference, "+.4f"),
            f"{row.zeroed_gradient_share:.1%}",
            f"{row.zeroed_logits_share:.1%}",
            str(row.skipped_steps),
            f"{row.activation_bytes / 2**20:.1f}",
            f"{row.step_seconds * 1e3:.0f}",
        )
    return table


def _print_findings(rows: Sequence["VariantResult"], options: "CompareOptions", console: "Console") -> None:
    from examples.gpt import explain_underflow, judge

    for paragraph in (_COLUMNS, explain_underflow(rows, options.tokens)):
        console.print(paragraph, soft_wrap=False)
        console.print()
    for line in judge(rows):
        console.print(line, soft_wrap=False)


def _format_number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "nan"
