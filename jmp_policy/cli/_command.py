"""Shared by the commands: user errors, argument types, and the console."""

import argparse
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .._base import escape_controls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    Commands = argparse._SubParsersAction  # what `add_subparsers` returns


class UserError(ValueError):
    """Error of the user, printed in one line without a traceback; the exit status is 2.

    Any other exception is a bug and keeps its traceback.
    """


def check_device() -> None:
    """Raises `UserError` if JAX finds no device."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts if a plugin is not installed
        chosen = os.environ.get("JAX_PLATFORMS", "")
        said = f": {error}" if str(error) else ", perhaps because jaxlib was installed without it"
        raise UserError(f"JAX finds no device, with JAX_PLATFORMS={chosen!r}{said}") from None


def add_call(parser: argparse.ArgumentParser, example: str, note: str = "") -> None:
    """Adds the function of a command and `--args`."""
    returned = f"a function that returns the arguments: a tuple of them, or a single one{note} (default: no arguments)"
    parser.add_argument("function", metavar="MODULE:FUNCTION", help=f"such as {example}, in this folder")
    parser.add_argument("--args", metavar="MODULE:FUNCTION", help=returned)


def integer_from(least: int) -> Callable[[str], int]:
    """Makes the type of an argument that is an integer from `least` to 2**32 - 1."""

    def read(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**32:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} to {2**32 - 1}, got {text!r}")
        return int(text)

    return read


def make_console() -> "Console":
    """Makes a console that prints text unchanged, except that it escapes control characters.

    Paths may contain brackets, and names of files and modules control characters. In a notebook it prints plain output.
    """
    from rich.console import Console

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(escape_controls(text), **options)

    return EscapingConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, force_jupyter=False)
