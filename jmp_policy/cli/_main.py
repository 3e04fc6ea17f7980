"""Parses the command line, and reports errors in one line with an exit status."""

import argparse
import codecs
import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from .._base import did_you_mean, escape_controls
from ._commands import COMMANDS
from ._user_code import UserError, print_out


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `jmp-policy` with the given arguments, by default the arguments of the process.

    Returns the exit status: 0; 1 if a command found a problem; 2 for errors of the user; 130 after Ctrl-C.

    >>> main(["audit", "no_such_module:function"])
    2
    """
    with spell_signs_plainly():
        try:
            print_out()  # raises if there is no stdout, before a command runs
            arguments = _parse_command(sys.argv[1:] if argv is None else argv)
            if arguments.version:
                return _print_versions()
            _check_device()
            return arguments.run(arguments)
        except SystemExit as exit:  # argparse has printed its help or an error
            return int(exit.code or 0)
        except KeyboardInterrupt:
            return _report_error("interrupted", status=130)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "matplotlib":
                raise
            return _report_error("matplotlib is not installed: pip install 'jmp-policy[demo]'")
        except UserError as error:
            return _report_error(str(error))


# ASCII replacements, of one column each, for streams that cannot encode these characters.
_PLAIN = str.maketrans({"─": "-", "↑": "^", "↓": "v", "→": ">", "±": "~", "…": "~"})


@contextlib.contextmanager
def spell_signs_plainly() -> Iterator[None]:
    """Prints ASCII replacements where stdout or stderr cannot encode a character, such as a pipe on Windows."""
    codecs.register_error("jmp_policy.plain", _spell_plainly)
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="jmp_policy.plain")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            stream.reconfigure(errors=errors)


def _spell_plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    signs = error.object[error.start : error.end].translate(_PLAIN)
    return "".join(sign if sign.isascii() else "?" for sign in signs), error.end


def _check_device() -> None:
    """Raises `UserError` if JAX finds no device."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts if a plugin is not installed
        chosen = os.environ.get("JAX_PLATFORMS", "")
        said = f": {error}" if str(error) else ", perhaps because jaxlib was installed without it"
        raise UserError(f"JAX finds no device, with JAX_PLATFORMS={chosen!r}{said}") from None


def _parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; errors suggest the nearest name."""
    parser = _Parser(prog="jmp-policy", description="Mixed precision for JAX and Flax.")
    parser.add_argument("--version", action="store_true", help="print the versions of what is installed")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (help, description, epilog, add_arguments, run) in COMMANDS.items():
        subparser = commands.add_parser(name, help=help, description=description, epilog=epilog)
        add_arguments(subparser)
        subparser.set_defaults(parser=subparser, command=name, run=run)
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


class _Parser(argparse.ArgumentParser):
    """Parser with one-line errors; argparse would print the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {escape_controls(message)}\n")

    def print_help(self, file: Any = None) -> None:
        print_out(self.format_help().rstrip())  # argparse ignores a full disk


def _print_versions() -> int:
    from ._doctor import list_versions

    versions = list_versions()
    others = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "jmp_policy")
    print_out(f"jmp_policy {versions['jmp_policy']} ({others})")
    return 0


def _refuse_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    if word.startswith("-"):
        options = ["--help", *re.findall(r"--[\w-]+", parser.format_usage())]
        parser.error(f"there is no option {word!r}. {did_you_mean(word.partition('=')[0], options)}")
    parser.error(f"{word!r} is one word too many. {parser.prog} --help shows what it takes")


def _report_error(message: str, *, status: int = 2) -> int:
    print("jmp-policy: error:", escape_controls(" ".join(message.split())), file=sys.stderr)
    return status
