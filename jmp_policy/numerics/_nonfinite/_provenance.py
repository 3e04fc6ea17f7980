"""Where a number that is not finite came from: arrays of fixed shapes, which a state can carry, and what they say."""

import os
from typing import Literal, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from ..._base import escape_controls
from ._remedies import TEXT_LENGTH, Words, find_remedy, read_words

MOST_TURNS = 4
"""How many of the loops around an equation are told apart."""

MOST_OPERANDS = 4
"""Of how many of its operands the ranges are kept."""

UNUSED = -1
"""What stands for a turn or a range that there is not: no turn, and as a float32 a nan."""

NOTHING, FOUND, NOT_REPRODUCED = range(3)
"""What is known: that all was finite, an origin, or that the second run of the program was finite."""

FINITE, NAN, INFINITE = range(3)
"""What a value holds at worst."""

_KINDS: tuple[Literal["", "nan", "inf"], ...] = ("", "nan", "inf")


class _Fields(NamedTuple):
    status: jax.Array
    texts: jax.Array
    kinds: jax.Array
    loop_turns: jax.Array
    ranges: jax.Array


class Provenance(_Fields):
    """Where the first number that is not finite came from: what `numerics.first_nonfinite` returns.

    A `NamedTuple` of five small arrays of integers, whose shapes are the same for all programs. So the state of an
    optimizer can carry it, through `jit`, `scan`, `lax.cond` and checkpoints. What it says is read on the host; of
    several, as of `vmap` or `scan`, the first one that was found.

    Attributes:
      found: whether the origin is known, an operation or an argument.
      reproduced: false where a result was not finite, and the second run, which looks for the origin, was.
      kind: `"nan"` or `"inf"`; the empty string where nothing was found.
      primitive: the name of the operation; the empty string for an argument.
      source: the user's line that it comes from, `"/home/me/train.py:12"`.
      function: the function around that line.
      code: the text of the line.
      path: the module names and `jax.named_scope`s around it, joined by `/`.
      direction: `"forward"`, `"recomputed"` (by a remat) or `"backward"`.
      dtype: the name of the dtype of its result.
      turns: the turns of the loops around it, outermost first. Of a `scan`, the index into its `xs`.
      operands: the smallest and the largest number of each operand; `None` for one that is empty or was not measured.
        In a loop of more than 64 turns they are those of all turns without a nan.
      argument: where it came in, as `"batch['x']"`; `None` for an operation.
      cause: where the infinities came from that an operation made a nan of, or whose reciprocal is the zero at which it
        made an infinity; else `None`.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> def loss(w, x):
    ...     with jax.named_scope("head"):
    ...         return jnp.sum(jnp.log(x - w))
    >>> _, origin = jax.jit(jmp.numerics.first_nonfinite(jax.grad(loss)))(jnp.ones(2), jnp.array([1.0, 3.0]))
    >>> origin.kind, origin.primitive, origin.path, origin.direction, origin.operands
    ('inf', 'div', 'head', 'backward', ((1.0, 1.0), (0.0, 2.0)))
    """

    __slots__ = ()

    @classmethod
    def empty(cls) -> "Provenance":
        """Nothing was found: what a state starts from.

        >>> from jmp_policy.numerics import Provenance
        >>> Provenance.empty().found, str(Provenance.empty())
        (False, 'every result is finite')
        """
        return cls(
            jnp.zeros((), jnp.int32),
            jnp.zeros((2, TEXT_LENGTH), jnp.uint8),
            jnp.zeros(2, jnp.int32),
            jnp.full((2, MOST_TURNS), UNUSED, jnp.int32),
            jnp.full((2, MOST_OPERANDS, 2), UNUSED, jnp.int32),
        )

    @property
    def found(self) -> bool:
        return bool(_read(self).status == FOUND)

    @property
    def reproduced(self) -> bool:
        return bool(_read(self).status != NOT_REPRODUCED)

    @property
    def kind(self) -> Literal["", "nan", "inf"]:
        return _KINDS[int(_read(self).kinds[0])]

    @property
    def primitive(self) -> str:
        return _read_words(self).primitive

    @property
    def source(self) -> str:
        return _read_words(self).source

    @property
    def function(self) -> str:
        return _read_words(self).function

    @property
    def code(self) -> str:
        return _read_words(self).code

    @property
    def path(self) -> str:
        return _read_words(self).path

    @property
    def direction(self) -> str:
        return _read_words(self).direction

    @property
    def dtype(self) -> str:
        return _read_words(self).dtype

    @property
    def turns(self) -> tuple[int, ...]:
        return tuple(int(turn) for turn in _read(self).loop_turns[0] if turn >= 0)

    @property
    def operands(self) -> tuple[tuple[float, float] | None, ...]:
        bits = _read(self).ranges[0]
        pairs = [(float(low), float(high)) for low, high in bits[bits[:, 0] != UNUSED].view(np.float32)]
        return tuple(None if low > high else (low, high) for low, high in pairs)

    @property
    def argument(self) -> str | None:
        return _read_words(self).argument or None

    @property
    def cause(self) -> Optional["Provenance"]:
        one = _read(self)
        if not one.kinds[1]:
            return None
        empty = map(np.asarray, Provenance.empty()[1:])
        fields = [np.stack([field[1], none[1]]) for field, none in zip(one[1:], empty, strict=True)]
        return Provenance(one.status, *fields)  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        """One line: what it is, where, and in which pass."""
        one = _read(self)
        if one.status == NOTHING:
            return "every result is finite"
        if one.status == NOT_REPRODUCED:
            return "a result was not finite; run again, all were"
        if self.argument:
            return escape_controls(f"{self.kind} in argument `{self.argument}`", keep="")
        place = [f"{self.kind} in {_name_place(self)}", _shorten(self.source), f"`{self.code}`" if self.code else ""]
        turns = f"turn {', '.join(map(str, self.turns))}" if self.turns else ""
        return escape_controls(", ".join(filter(None, [*place, turns, self.direction])), keep="")

    def __repr__(self) -> str:
        return f"<Provenance: {'inside of a program' if isinstance(self.status, Tracer) else self}>"

    def describe(self) -> str:
        """A paragraph: what happened, to which numbers, and what helps, where that is known.

        >>> import jax.numpy as jnp, jmp_policy as jmp
        >>> _, origin = jmp.numerics.first_nonfinite(lambda x: 1 / x)(jnp.array([0.0, 2.0]))
        >>> "Its operands range from 1 to 1 and 0 to 2. Keep the divisor away from zero" in origin.describe()
        True
        """
        one = _read(self)
        if one.status == NOTHING:
            return "Every result is finite."
        if one.status == NOT_REPRODUCED:
            return (
                "A result was not finite, but when the program ran again to find out why, all were. What a compiler "
                "fuses may keep more digits the second time, and what GPUs add up in any order differs from run to run."
            )
        sentences = [_say_what_happened(self)]
        cause = self.cause
        if cause is not None:
            is_nan = self.kind == "nan"
            how = "It was made of infinities." if is_nan else "Its zero is the reciprocal of an earlier infinity."
            sentences.append(f"{how} {_say_what_happened(cause)}")
        root = cause or self
        remedy = find_remedy(_read_words(root), root.kind, root.operands, is_cause=cause is not None)
        return escape_controls(" ".join(filter(None, [*sentences, remedy])))


def _say_what_happened(one: Provenance) -> str:
    kind = {"nan": "A nan", "inf": "An infinity"}[one.kind]
    if one.argument:
        return f"{kind} came in with argument `{one.argument}`."
    passes = {"forward": "the forward pass", "recomputed": "what a remat recomputed", "backward": "the backward pass"}
    place = [f"`{one.path}`" if one.path else "", f"{one.source} ({one.function})" if one.source else ""]
    if one.turns:
        place.append(f"turn {', '.join(map(str, one.turns))}")
    code = f": `{one.code}`" if one.code else ""
    where = ", ".join(filter(None, place))
    sentence = f"{kind} was made by {one.primitive} ({one.dtype}) in {passes[one.direction]}"
    return f"{sentence}{', ' if where else ''}{where}{code}.{_say_ranges(one)}"


def _say_ranges(one: Provenance) -> str:
    ranges = [f"{pair[0]:.4g} to {pair[1]:.4g}" for pair in one.operands if pair is not None]
    if not ranges:
        return ""
    return f" Its operand{' ranges' if len(one.operands) == 1 else 's range'} from {' and '.join(ranges)}."


def _read(provenance: Provenance) -> Provenance:
    """The same on the host; of several, the first one that was found."""
    if isinstance(provenance.status, Tracer):
        raise TypeError(
            "What a Provenance says is read on the host, and here it is traced: return it from the jitted function, "
            "and read it there. For example: (out, origin) = jax.jit(first_nonfinite(fun))(x); origin.describe()."
        )
    arrays = [np.asarray(field) for field in provenance]
    status = arrays[0]
    if status.ndim:
        index = np.unravel_index(np.argmax(status == FOUND if (status == FOUND).any() else status), status.shape)
        arrays = [field[index] for field in arrays]
    return Provenance(*arrays)  # type: ignore[arg-type]


def _read_words(provenance: Provenance) -> Words:
    return read_words(np.asarray(_read(provenance).texts[0]))


def _name_place(provenance: Provenance) -> str:
    return f"`{provenance.path}`" if provenance.path else f"`{provenance.primitive}`"


def _shorten(source: str) -> str:
    return os.path.basename(source)
