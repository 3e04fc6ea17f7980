"""Shared by the commands: user errors, argument types, and the console."""

import argparse
import os
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


def positive_int(text: str) -> int:
    """Reads an integer of at least one."""
    return _int_from(text, 1)


def seed(text: str) -> int:
    """Reads an integer from zero to 2**32 - 1."""
    return _int_from(text, 0)


def _int_from(text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"expected an integer from {least} to {2**32 - 1}, got {text!r}")
    return int(text)


def make_console() -> "Console":
    """Makes a console that prints text unchanged, except that it escapes control characters.

    Paths may contain brackets, and names of files and modules control characters. In a notebook it prints plain output.
    """
    from rich.console import Console

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(escape_controls(text), **options)

    return EscapingConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, force_jupyter=False)
