"""Parses the command line, and reports errors in one line with an exit status."""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from .._base import did_you_mean, escape_controls
from ._audit import add_audit
from ._command import UserError, check_device
from ._doctor import add_doctor
from ._numerics import add_numerics
from ._outputs import spell_signs_plainly
from ._tune import add_tune

COMMANDS = {
    "doctor": add_doctor,
    "audit": add_audit,
    "numerics": add_numerics,
    "tune": add_tune,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jmp-policy` with the given arguments, by default the arguments of the process.

    Returns the exit status: 0; 1 if a command found a problem; 2 for errors of the user; 130 after Ctrl-C.

    >>> main(["audit", "no_such_module:function"])
    2
    """
    with spell_signs_plainly():
        try:
            arguments = _parse(sys.argv[1:] if argv is None else argv)
            return _print_versions() if arguments.version else _run_command(arguments)
        except SystemExit as exit:  # argparse has printed its help or an error
            return int(exit.code or 0)
        except KeyboardInterrupt:
            return _fail("interrupted", status=130)


def _run_command(arguments: argparse.Namespace) -> int:
    try:
        check_device()
        return arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "matplotlib":
            raise
        return _fail("matplotlib is not installed: pip install 'jmp-policy[demo]'")
    except UserError as error:
        return _fail(str(error))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; errors suggest the nearest name."""
    parser = _make_parser()
    command = next((word for word in argv if not word.startswith("-")), None)
    if command is not None and command not in COMMANDS:
        parser.error(f"there is no command {command!r}. {did_you_mean(command, COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse_arguments(arguments.parser, unknown)
    if command is None and not arguments.version:
        *others, last = COMMANDS
        parser.error(f"which command? {', '.join(others)} or {last}: jmp-policy --help says what they do")
    return arguments


def _make_parser() -> "_Parser":
    parser = _Parser(prog="jmp-policy", description="Mixed precision for JAX and Flax.")
    parser.add_argument("--version", action="store_true", help="print the versions of what is installed")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for add_command in COMMANDS.values():
        add_command(commands)
    for subparser in commands.choices.values():
        subparser.set_defaults(parser=subparser)
    return parser


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {escape_controls(message)}\n")


def _print_versions() -> int:
    from .doctor import list_versions

    versions = list_versions()
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "jmp_policy")
    print(f"jmp_policy {versions['jmp_policy']} ({others})")
    return 0


def _refuse_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if word.startswith("-"):
        options = ["--help", *re.findall(r"--[\w-]+", parser.format_usage())]
        parser.error(f"there is no option {word!r}. {did_you_mean(word.partition('=')[0], options)}")
    parser.error(f"{word!r} is one word too many. {parser.prog} --help shows what it takes")


def _fail(message: str, *, status: int = 2) -> int:
    print("jmp-policy: error:", escape_controls(" ".join(message.split())), file=sys.stderr)
    return status
