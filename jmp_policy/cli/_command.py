"""What the commands share: the error of a user, types of arguments, and the terminal."""

import argparse
import os
from typing import TYPE_CHECKING, Any

from .._base import escape_controls

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    Commands = argparse._SubParsersAction  # what `add_subparsers` returns


class UserError(ValueError):
    """Says in one line what is wrong with the user's input and what would work.

    The command line prints it without a traceback and exits with status 2. Anything else that is raised is a bug
    of ours and keeps its traceback.
    """


def check_device() -> None:
    """Checks that JAX has a device.

    Raises:
      UserError: it has none, as where JAX_PLATFORMS names one that is not there.
    """
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # an assertion of JAX's own where a plugin is not installed
        chosen = os.environ.get("JAX_PLATFORMS", "")
        said = f": {error}" if str(error) else ", perhaps because jaxlib was installed without it"
        raise UserError(f"JAX finds no device, with JAX_PLATFORMS={chosen!r}{said}") from None


def positive_int(text: str) -> int:
    """Reads an integer of at least one.

    >>> positive_int("20")
    20
    """
    return _int_from(text, 1)


def seed(text: str) -> int:
    """Reads an integer of at least zero and at most 2**32 - 1.

    >>> seed("0")
    0
    """
    return _int_from(text, 0)


def _int_from(text: str, least: int) -> int:
    if not text.isdecimal() or not least <= int(text) < 2**32:
        raise argparse.ArgumentTypeError(f"expected an integer from {least} to {2**32 - 1}, got {text!r}")
    return int(text)


def make_console() -> "Console":
    """A console that prints text as it is: paths may hold brackets, and lines are read by other programs, too.

    It escapes control characters, which names of files and modules may have, in lines and in the cells of tables. In a
    notebook it prints to the output of the cell, too, where rich would make a page of each line.
    """
    from rich.console import Console

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(escape_controls(text), **options)

    return EscapingConsole(markup=False, emoji=False, highlight=False, soft_wrap=True, force_jupyter=False)
