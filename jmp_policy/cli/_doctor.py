"""`jmp-policy doctor`."""

import argparse
import json

from ._command import Commands
from ._outputs import print_text

_EPILOG = """\
--json prints one document with these keys: versions, by package; device (platform, name, system, half_instructions);
sizes; matmuls, a list (name, dtype, multiplied_in, teraflops, speedup); steps, by dtype (seconds, speedup,
multiplied_in); recommendation (policy, reason). Speed-ups are over float32: larger is better."""


def add_doctor(commands: Commands) -> None:
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
    else:
        print_text(diagnosis)
    return 0
