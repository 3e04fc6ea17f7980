"""Parsing the command line, and turning errors into one line and an exit status."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ._audit import add_audit
from ._command import UserError
from ._demo import add_compare, add_doctor, add_train

COMMANDS = (add_train, add_compare, add_doctor, add_audit)

# What `pip install 'jmp-policy[demo]'` brings. Anything else that is missing is a broken installation.
_DEMO_PACKAGES = ("rich", "orbax", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jmp-policy`.

    Args:
      argv: the arguments after the name of the program; if `None`, the ones that the process was started with.

    Returns:
      The exit status: 0, 1 if training is stuck, 2 for what the user can mend, 130 after Ctrl-C.

    >>> main(["train", "--data", "no/such/file"])
    2
    """
    try:
        arguments = _make_parser().parse_args(argv)
    except SystemExit as exit:  # argparse's way to say that it has printed the help, or an error
        return int(exit.code or 0)
    try:
        return _run_command(arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)


def _run_command(arguments: argparse.Namespace) -> int:
    try:
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _DEMO_PACKAGES:
            raise
        return _fail(f"{error.name} is not installed: pip install 'jmp-policy[demo]'")
    except UserError as error:
        return _fail(str(error))
    except FloatingPointError as error:
        return _fail(str(error), status=1)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jmp-policy", description="Mixed precision for JAX and Flax, tried on a small GPT.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add_command in COMMANDS:
        add_command(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """argparse prints the usage before each error; one line that says what is wrong is easier to read."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def _fail(message: str, *, status: int = 2) -> int:
    print("jmp-policy: error:", " ".join(message.split()), file=sys.stderr)
    return status
