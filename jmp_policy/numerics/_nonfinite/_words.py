"""What is said of an origin, as bytes of a fixed length: a program can choose among them, a state can carry them."""

from typing import NamedTuple

import numpy as np

GUARDED = "where"
"""The role of an operation that a branch of a `jnp.where` uses."""


class Words(NamedTuple):
    """What is said of an equation or an argument.

    Attributes:
      primitive: the name of the operation; the empty string for an argument.
      source: the user's line, `"/home/me/train.py:12"`.
      function: the function around that line.
      code: the text of the line.
      path: the module names and `jax.named_scope`s around it, joined by `/`.
      direction: `"forward"`, `"recomputed"` or `"backward"`.
      dtype: the name of the dtype of its result.
      argument: the argument, `"batch['x']"`; the empty string for an equation.
      role: the primitive whose derivative an equation computes, or `GUARDED`; else the empty string.
    """

    primitive: str = ""
    source: str = ""
    function: str = ""
    code: str = ""
    path: str = ""
    direction: str = "forward"
    dtype: str = ""
    argument: str = ""
    role: str = ""


_WIDTHS = (32, 160, 48, 96, 128, 12, 16, 103, 8)
"""How many bytes each may have. Of a longer one its end is kept, but of code its beginning.

Their sum, with a byte after each, stays: a saved state holds the text. One without a role is read as such.
"""

TEXT_LENGTH = sum(_WIDTHS) + len(_WIDTHS)


def write_words(words: Words) -> np.ndarray:
    """Writes words as uint8 of shape `(TEXT_LENGTH,)`.

    >>> words = Words("log", "train.py:12", "loss_fn", "jnp.log(x)", "head", "forward", "float32")
    >>> read_words(write_words(words)) == words
    True
    >>> read_words(write_words(words._replace(code="x + " * 40))).code[-8:]
    '+ x + x…'
    """
    pieces = []
    for name, word, width in zip(Words._fields, words, _WIDTHS, strict=True):
        data = word.encode()
        if len(data) > width:
            mark = "…".encode()
            kept = width - len(mark)
            data = data[:kept] + mark if name == "code" else mark + data[-kept:]
        pieces.append(data)
    text = b"\0".join(pieces)
    return np.frombuffer(text.ljust(TEXT_LENGTH, b"\0"), np.uint8)


def read_words(text: np.ndarray) -> Words:
    """Reads what `write_words` wrote."""
    pieces = text.tobytes().split(b"\0")[: len(_WIDTHS)]
    return Words(*(piece.decode(errors="ignore") for piece in pieces))
