"""`jmp-policy audit`."""

import argparse
import contextlib
import sys

from ._command import Commands, add_call
from ._outputs import print_report
from ._user_code import load_call

_EPILOG = """\
For example, where train.py has train_step(state, batch): write in it
`def make_args(): return make_state(), jax.ShapeDtypeStruct((8, 128), jnp.float32)`, and run
`jmp-policy audit train:train_step --args train:make_args`. --json prints one document with these keys: versions, by
package; device (platform, name, system, half_instructions); function; findings, a list (id, message, source, path,
dtypes, backward, count); rows (path, operation, dtype, backward, count, flops, bytes); matmuls (operation, dtypes,
dtype, source, path, backward, count, flops); uncounted_loops; flops; bytes."""


def add_audit(commands: Commands) -> None:
    """Adds `jmp-policy audit` to the subparsers of argparse."""
    parser = commands.add_parser(
        "audit",
        help="which operations of a function run in which dtype, and where that loses numbers",
        description="Trace a function without running it. Print the dtype of each operation, and the lines that are "
        "likely to lose precision or time.",
        epilog=_EPILOG,
    )
    add_call(parser, "train:train_step", "; jax.ShapeDtypeStructs suffice")
    parser.add_argument("--strict", action="store_true", help="exit with status 1 if anything is found")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.set_defaults(run=_run_audit)


def _run_audit(arguments: argparse.Namespace) -> int:
    from ..numerics import audit

    with contextlib.redirect_stdout(sys.stderr):  # prints of user code are not part of the report
        fun, args = load_call(arguments, audit, example="jax.ShapeDtypeStruct((8, 128), jnp.float32)")
        report = audit(fun)(*args)
    print_report(report, arguments)
    return 1 if arguments.strict and report.findings else 0
