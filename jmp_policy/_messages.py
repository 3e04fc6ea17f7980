"""Warnings at the line that they are about: the user's."""

import inspect
import warnings

_LIBRARIES = ("contextlib", "flax", "jax", "jmp_policy", "optax")


def warn_user(message: str) -> None:
    """Warns at the innermost line that is not of this library, nor of those that call its functions for the user.

    A function that is traced is called by JAX, so that no number of frames says where the user's line is.
    """
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
