"""Shared by the commands: user errors and arguments."""

import argparse
import os
from collections.abc import Callable
from typing import Any

Commands = Any
"""Result of `add_subparsers`."""


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
