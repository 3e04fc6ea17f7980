"""What the rows of statistics are of: static, and so a part of the key of every `jit` that statistics pass through."""

import dataclasses
import itertools
import typing
import weakref
from typing import Literal

from ..._base import did_you_mean
from ._measure import Meter

Direction = Literal["forward", "recomputed", "backward", "argument", "result"]

DIRECTIONS: tuple[Direction, ...] = typing.get_args(Direction)


def check_direction(direction: str | None) -> None:
    """Accepts what a row may have as its direction, and `None`.

    Raises:
      ValueError: it is something else.
    """
    if direction is not None and direction not in DIRECTIONS:
        remedy = did_you_mean(direction, DIRECTIONS)
        raise ValueError(f"Unknown direction {direction!r}. {remedy} For example: direction='backward'.")


@dataclasses.dataclass(frozen=True)
class Site:
    """The tensor that a row is of, as far as tracing knows it.

    Attributes:
      path: the module names and `jax.named_scope`s around it, or the path of an argument or a result in its tree,
        joined by `/`; the root's is the empty string.
      primitive: the name of the operation that made it; the empty string for an argument.
      source: the user's line that it comes from, `"/home/me/train.py:12"`.
      function: the function around that line.
      direction: which pass made it, or that it is an argument or a result of the whole.
      turn: the turn of a loop, several for loops in loops; `None` outside of loops, and where turns are merged.
      dtype: the name of its dtype.
      size: how many numbers it has.
      shape: its shape.
    """

    path: str
    primitive: str
    source: str
    function: str
    direction: Direction
    turn: int | tuple[int, ...] | None
    dtype: str
    size: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        made = f"{self.direction} {self.primitive}".rstrip()
        turn = "" if self.turn is None else f", turn {self.turn}"
        return f"{made} in {self.path!r}{turn}: {self.dtype}{list(self.shape)} of {self.source}"

    @property
    def name(self) -> str:
        """Its place, operation, pass and turn as a path, for loggers; several sites may share it."""
        turns = (self.turn,) if isinstance(self.turn, int) else self.turn or ()
        turn = "_".join(["turn", *map(str, turns)]) if turns else ""
        return "/".join(piece for piece in (self.path, self.primitive, self.direction, turn) if piece)


class Layout:
    """The sites of all rows, and how they are measured.

    Equal layouts are one object, so that `jit` compares them by identity and hashes an address: the rows of a large
    model are looked at once, where the layout is made. Copies and pickles come back as that object.

    Attributes:
      sites: what each row is of.
      meter: what was measured of it.

    >>> from jmp_policy.numerics._stats._layout import Layout, Site
    >>> from jmp_policy.numerics._stats._measure import Meter
    >>> site = Site("head", "dot_general", "train.py:12", "loss", "forward", None, "float32", 8, (2, 4))
    >>> layout = Layout([site], Meter(("float16",)))
    >>> layout is Layout([site], Meter(("float16",))), layout
    (True, Layout(1 row, float16))
    """

    __slots__ = ("__weakref__", "meter", "sites")

    sites: tuple[Site, ...]
    meter: Meter

    def __new__(cls, sites: "tuple[Site, ...] | list[Site]", meter: Meter) -> "Layout":
        """The one layout of these sites and this meter."""
        key = (tuple(sites), meter)
        new = object.__new__(cls)
        object.__setattr__(new, "sites", key[0])
        object.__setattr__(new, "meter", meter)
        return _INTERNED.setdefault(key, new)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A Layout cannot be changed, and its {name!r} is no exception. Make another one.")

    def __reduce__(self) -> tuple:
        return Layout, (self.sites, self.meter)

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        rows = f"{len(self.sites)} row{'' if len(self.sites) == 1 else 's'}"
        return f"Layout({', '.join([rows, *self.meter.formats])})"

    def list_names(self) -> list[str]:
        """A name for each row, and no name twice: the second `"head/dot_general/forward"` ends in `_1`."""
        taken: dict[str, None] = {}
        for name in (site.name for site in self.sites):
            spellings = itertools.chain([name], (f"{name}_{n}" for n in itertools.count(1)))
            taken[next(spelling for spelling in spellings if spelling not in taken)] = None
        return list(taken)

    def describe_difference(self, other: "Layout") -> str:
        """Where two layouts first differ, as an error says it."""
        for name in ("formats", "histogram", "dtype"):
            mine, theirs = getattr(self.meter, name), getattr(other.meter, name)
            if mine != theirs:
                return f"the {name} of one {'are' if name == 'formats' else 'is'} {mine}, and of the other {theirs}"
        for index, (mine, theirs) in enumerate(zip(self.sites, other.sites, strict=False)):
            if mine != theirs:
                return f"row {index} of one is {mine}; of the other it is {theirs}"
        return f"one has {len(self)} rows, and the other has {len(other)}"


# Weak: a layout lives as long as statistics, or a compiled function that returns them.
_INTERNED: weakref.WeakValueDictionary[tuple[tuple[Site, ...], Meter], Layout] = weakref.WeakValueDictionary()
