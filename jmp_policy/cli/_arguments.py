"""Types of command-line arguments, with errors that say what would be accepted."""

import argparse


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
