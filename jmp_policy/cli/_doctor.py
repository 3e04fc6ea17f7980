"""`jmp-policy doctor`."""

import argparse
from typing import TYPE_CHECKING, Any

from ._console import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from ..demo import Diagnosis, MatmulRate


def add_parser(commands: Any) -> None:
    """Adds the command to the subparsers of argparse."""
    parser = commands.add_parser(
        "doctor",
        help="which dtypes this device computes natively, how fast, and which policy to use",
        description="Measure which dtypes this device computes natively and how fast, and recommend a policy.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what was found."""
    from ..demo import diagnose

    del arguments
    console = make_console()
    diagnosis = diagnose()
    console.print(_matmul_table(diagnosis), soft_wrap=False)
    console.print(_perceptron_table(diagnosis), soft_wrap=False)
    recommendation = diagnosis.recommendation
    console.print(f"Recommended policy: {recommendation.policy}")
    console.print(f"Why: {recommendation.reason}.")
    return 0


def _matmul_table(diagnosis: "Diagnosis") -> "Table":
    from rich.table import Table

    table = Table("matmul", "native", title=f"Device: {diagnosis.device}")
    for column in ("TFLOP/s", "to float32"):
        table.add_column(column, justify="right")
    for rate in diagnosis.matmuls:
        table.add_row(rate.kind.name, "yes" if rate.native else "no", *_rate(rate))
    return table


def _rate(rate: "MatmulRate") -> tuple[str, str]:
    if rate.teraflops is None:
        return "not supported", "-"
    return f"{rate.teraflops:.3g}", f"{rate.speedup:.2f}x"


def _perceptron_table(diagnosis: "Diagnosis") -> "Table":
    from rich.table import Table

    table = Table("perceptron, forward and backward")
    for column in ("time", "to float32"):
        table.add_column(column, justify="right")
    reference = diagnosis.perceptron_seconds["float32"]
    for dtype, seconds in diagnosis.perceptron_seconds.items():
        table.add_row(dtype, f"{seconds * 1e3:.2f} ms", f"{seconds / reference:.2f}x")
    return table
