"""`NonfiniteOrigin`: the origin of a non-finite value, as arrays of fixed shapes that a state can carry."""

import os
from typing import Literal, NamedTuple, Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._base import escape_controls
from ._remedies import A_CONSTANT, TEXT_LENGTH, Words, find_remedy, read_words, write_words

MOST_TURNS = 4
"""Maximum number of nested loops with a recorded iteration."""

MOST_OPERANDS = 4
"""Maximum number of operands with a recorded range."""

UNUSED = -1
"""Padding of iterations and ranges; as float32 bits it is a nan."""

NOTHING, FOUND, NOT_REPRODUCED = range(3)
"""Values of `status`: all results were finite, an origin was found, or the second run was finite."""

FINITE, NAN, INFINITE = range(3)
"""Values of `kinds`: the worst element of a value."""

_KINDS: tuple[Literal["", "nan", "inf"], ...] = ("", "nan", "inf")


class _OriginFields(NamedTuple):
    status: jax.Array
    texts: jax.Array
    kinds: jax.Array
    loop_turns: jax.Array
    ranges: jax.Array


class _Word:
    """An attribute that is read from `NonfiniteOrigin.texts`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, origin: "NonfiniteOrigin", owner: type) -> str:
        return getattr(_read_words(origin), self._name)


class NonfiniteOrigin(_OriginFields):
    """Origin of the first non-finite value, as returned by `numerics.first_nonfinite`.

    A `NamedTuple` of five small integer arrays with the same shapes for all programs, so a state can carry it through
    `jit`, `scan`, `lax.cond` and checkpoints. The attributes are read on the host. If `vmap` or `scan` stacked
    several, they describe the first one found.

    Attributes:
      found: True if the origin is known: an op or an argument.
      reproduced: False if a result was not finite but the second run, which looks for the origin, was.
      kind: `"nan"` or `"inf"`; empty if nothing was found.
      primitive: the name of the op; empty for an argument.
      source: the user's line of the op, `"/home/me/train.py:12"`.
      function: the function around that line.
      code: the text of the line.
      path: the module names and `jax.named_scope`s around it, joined by `/`.
      direction: `"forward"`, `"recomputed"` (by a remat) or `"backward"`.
      dtype: the name of the dtype of its output.
      turns: the iterations of the loops around it, outermost first. For a `scan`, the index into its `xs`.
      operands: the smallest and largest element of each operand; `None` if it is empty or was not measured. In a loop
        of more than 64 iterations, over all iterations without a nan.
      argument: the argument that contained the value, as `"batch['x']"`, or `"a constant"` for a number or array in the
        program; `None` for an op.
      cause: the origin of the infinities from which an op made a nan, or whose reciprocal is the zero from which it
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
    def of_constant(cls, number: complex, path: str) -> "NonfiniteOrigin":
        """Returns the origin of a result that is a Python number, and not finite."""
        words, kind = Words(argument=A_CONSTANT, path=path), NAN if np.isnan(number) else INFINITE
        texts = np.stack([write_words(words), np.zeros(TEXT_LENGTH, np.uint8)])
        kinds = jnp.array([kind, FINITE], jnp.int32)
        return cls.empty()._replace(status=jnp.int32(FOUND), texts=jnp.asarray(texts), kinds=kinds)

    @classmethod
    def empty(cls) -> "NonfiniteOrigin":
        """Returns the initial value for a state: nothing was found.

        >>> from jmp_policy.numerics import NonfiniteOrigin
        >>> NonfiniteOrigin.empty().found, str(NonfiniteOrigin.empty())
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

    primitive = _Word()
    source = _Word()
    function = _Word()
    code = _Word()
    path = _Word()
    direction = _Word()
    dtype = _Word()

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
    def cause(self) -> Optional["NonfiniteOrigin"]:
        one = _read(self)
        if not one.kinds[1]:
            return None
        empty = map(np.asarray, NonfiniteOrigin.empty()[1:])
        fields = [np.stack([field[1], none[1]]) for field, none in zip(one[1:], empty, strict=True)]
        return NonfiniteOrigin(one.status, *fields)  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        """Returns one line: the kind, the place and the pass."""
        one = _read(self)
        if one.status == NOTHING:
            return "every result is finite"
        if one.status == NOT_REPRODUCED:
            return "a result was not finite, but all were in a second run"
        if self.argument and self.argument != A_CONSTANT:
            return escape_controls(f"{self.kind} in argument `{self.argument}`", keep="")
        code = f"`{self.code}`" if self.code else ""
        name, rest = f"`{self.path or self.primitive}`", self.direction
        if self.argument:
            name, rest = self.argument, f"`{self.path}`" if self.path else ""
        place = [f"{self.kind} in {name}", os.path.basename(self.source), code]
        turns = f"turn {', '.join(map(str, self.turns))}" if self.turns else ""
        return escape_controls(", ".join(filter(None, [*place, turns, rest])), keep="")

    def __repr__(self) -> str:
        return f"<NonfiniteOrigin: {'inside of a program' if isinstance(self.status, Tracer) else self}>"

    def describe(self) -> str:
        """Returns a paragraph: the fault, the ranges of the operands, and a suggested fix if there is one.

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
                "A result was not finite, but all were when the program ran again to find the origin. The second "
                "run is compiled separately and may round differently, and GPUs do not sum in a fixed order."
            )
        sentences = [say_what_happened(self)]
        cause = self.cause
        if cause is not None:
            is_nan = self.kind == "nan"
            how = "It was made of infinities." if is_nan else "Its zero is the reciprocal of an earlier infinity."
            sentences.append(f"{how} {say_what_happened(cause)}")
        root = cause or self
        made_nan_in = "" if cause is None else self.direction
        remedy = find_remedy(_read_words(root), root.kind, root.operands, made_nan_in, in_loop=bool(root.turns))
        return escape_controls(" ".join(filter(None, [*sentences, remedy])))


def say_what_happened(one: NonfiniteOrigin) -> str:
    kind = {"nan": "A nan", "inf": "An infinity"}[one.kind]
    if one.argument and one.argument != A_CONSTANT:
        return f"{kind} came in with argument `{one.argument}`."
    passes = {"forward": "the forward pass", "recomputed": "the recompute of a remat", "backward": "the backward pass"}
    place = [f"`{one.path}`" if one.path else "", f"{one.source} ({one.function})" if one.source else ""]
    if one.turns:
        place.append(f"turn {', '.join(map(str, one.turns))}")
    code = f": `{one.code}`" if one.code else ""
    where = ", ".join(filter(None, place))
    if one.argument:
        return f"{kind} is {one.argument} of the program{', ' if where else ''}{where}{code}."
    sentence = f"{kind} was made by {one.primitive} ({one.dtype}) in {passes[one.direction]}"
    sentence += f"{', ' if where else ''}{where}{code}."
    ranges = [f"{pair[0]:.4g} to {pair[1]:.4g}" for pair in one.operands if pair is not None]
    subject = "Its operand ranges" if len(one.operands) == 1 else "Its operands range"
    return f"{sentence} {subject} from {' and '.join(ranges)}." if ranges else sentence


def _read(origin: NonfiniteOrigin) -> NonfiniteOrigin:
    """Copies to the host. Of several stacked ones, takes the first one found."""
    if isinstance(origin.status, Tracer):
        raise TypeError(
            "A NonfiniteOrigin is read on the host, but this one is traced. Return it from the jitted function and "
            "read it outside. For example: (out, origin) = jax.jit(first_nonfinite(fun))(x); origin.describe()."
        )
    arrays = [np.asarray(field) for field in origin]
    status = arrays[0]
    if status.ndim:
        index = np.unravel_index(np.argmax(status == FOUND if (status == FOUND).any() else status), status.shape)
        arrays = [field[index] for field in arrays]
    return NonfiniteOrigin(*arrays)  # type: ignore[arg-type]


def _read_words(origin: NonfiniteOrigin) -> Words:
    return read_words(np.asarray(_read(origin).texts[0]))
