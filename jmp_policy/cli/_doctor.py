"""`jmp-policy doctor`."""

import argparse
import json
from typing import TYPE_CHECKING

from ._command import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from ._command import Commands
    from .doctor import Diagnosis

_BUSY = 0.25  # report more noise than this

_EPILOG = """\
--json prints one document with these keys: versions, by package; device (platform, name, system, half_instructions);
sizes; matmuls, a list (name, dtype, multiplied_in, teraflops, speedup); steps, by dtype (seconds, speedup,
multiplied_in); recommendation (policy, reason). Speed-ups are over float32: larger is better."""


def add_doctor(commands: "Commands") -> None:
    """Adds `jmp-policy doctor` to the subparsers of argparse."""
    parser = commands.add_parser(
        "doctor",
        help="how fast this machine trains in each dtype, and which policy to use",
        description="Measure matmuls, and forward and backward of a perceptron, in each dtype, and recommend a policy.",
        epilog=_EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.set_defaults(run=_run_doctor)


def _run_doctor(arguments: argparse.Namespace) -> int:
    from .doctor import diagnose

    diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
        return 0
    console = make_console()
    console.print(str(diagnosis.machine), soft_wrap=False)
    console.print(_describe_sizes(diagnosis), soft_wrap=False)
    for table in (_make_matmul_table(diagnosis), _make_step_table(diagnosis)):
        console.print()
        console.print(table, soft_wrap=False)
    if diagnosis.noise > _BUSY:
        busy = f"This machine is busy: speed-ups of the perceptron vary by {diagnosis.noise:.0%}."
        console.print(f"\n{busy} Run this again when idle.", soft_wrap=False)
    console.print()
    recommendation = diagnosis.recommendation
    console.print(f"Recommended policy: {recommendation.policy}")
    console.print(f"Why: {recommendation.reason}.", soft_wrap=False)
    return 0


def _describe_sizes(diagnosis: "Diagnosis") -> str:
    sizes = diagnosis.sizes
    matmul = f"a matmul of {sizes.matrix} x {sizes.matrix} matrices"
    return f"Shortest times of {matmul}, and of a perceptron of {sizes.rows} inputs, {sizes.width} x {4 * sizes.width}"


def _make_matmul_table(diagnosis: "Diagnosis") -> "Table":
    table = _make_table("\nmatmul", "XLA\nmultiplies in", "\nTFLOP/s")
    for rate in diagnosis.matmuls:
        if rate.teraflops is None:
            cells = "-", "not supported", "-"
        else:
            cells = rate.multiplied_in or "?", f"{rate.teraflops:.3g}", f"{rate.speedup:.2f}x"
        table.add_row(rate.kind.name, *cells)
    return table


def _make_step_table(diagnosis: "Diagnosis") -> "Table":
    table = _make_table("perceptron,\nforward and backward", "XLA multiplies\nits matmuls in", "\nms")
    for dtype, step in diagnosis.steps.items():
        products = ", ".join(f"{count} {name}" for name, count in step.multiplied_in.items())
        table.add_row(dtype, products or "?", f"{step.seconds * 1e3:.2f}", f"{step.speedup.value:.2f}x")
    return table


def _make_table(*headers: str) -> "Table":
    """Makes a table of two text and two number columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for i, header in enumerate((*headers, "speed-up\nover float32")):
        table.add_column(header, justify="left" if i < 2 else "right", no_wrap=True)
    return table
