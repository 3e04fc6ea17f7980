"""One row of a report: the collectives of one kind, line and place."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

Direction = Literal["forward", "recomputed", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "recomputed", "backward")
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
REDUCING = ("all-reduce", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The collectives of one kind and dtype over the same axes, of one line of the source, in one place.

    Attributes:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`, `"collective-permute"` or
        `"collective-broadcast"`.
      reduction: how a reduction combines numbers, `"sum"`, `"max"`, `"min"`, `"and"`, `"or"` or `"product"`; the
        empty string for what only moves them.
      dtype: the dtype that is sent, and reduced in.
      axes: the names of the mesh axes along which devices communicate; none, where they are no axes of the mesh.
      devices: how many devices communicate with each other.
      shape: what each device gets of a gather, and puts into any other collective.
      direction: `"forward"`, `"recomputed"` or `"backward"`, as in the rows of `collect`. What follows the gradients,
        such as the check whether they are finite, is `"forward"`; a sum of the gradients themselves is `"backward"`.
      is_gradient: whether it is a sum of gradients that nothing else of the backward pass reads but casts and
        additions: those of parameters. A sum of what flows on through the layers is one of activations.
      inserted: whether XLA's partitioner inserted it; otherwise the program says so, in a `shard_map`.
      source: the user's line that it comes from, `"train.py:12 (loss)"`.
      path: the module names and `jax.named_scope`s around it, joined by `/`; the root's is the empty string.
      count: how many there are, one for each array; in a loop, for all its turns.
      bytes: the bytes of arrays of `shape`, of all of them: on one device, what it has after gathers, and before
        reductions and other collectives.

    >>> from jmp_policy.numerics import Collective
    >>> fields = {"direction": "backward", "is_gradient": True, "inserted": False, "source": "train.py:12", "path": ""}
    >>> row = Collective("all-reduce", "sum", "float32", ("data",), 4, (256,), count=2, bytes=2048, **fields)
    >>> row.moved_bytes
    3072
    """

    kind: str
    reduction: str
    dtype: str
    axes: tuple[str, ...]
    devices: int
    shape: tuple[int, ...]
    direction: Direction
    is_gradient: bool
    inserted: bool
    source: str
    path: str
    count: int
    bytes: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that each device sends, where neighbours in a ring pass them on.

        With n devices, `bytes * (n - 1) / n`, and twice that for an all-reduce; a permute or broadcast sends `bytes`.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        rounds = 2 if self.kind == "all-reduce" else 1
        return rounds * self.bytes * (self.devices - 1) // self.devices


class Group(NamedTuple):
    """The devices that communicate.

    Attributes:
      axes: the names of their axes; none, where they are no axes of the mesh.
      devices: how many there are.
    """

    axes: tuple[str, ...]
    devices: int


class Place(NamedTuple):
    """Where an operation stands.

    Attributes:
      path: the names of modules and scopes.
      direction: the pass.
    """

    path: str
    direction: Direction


def add_up(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Makes one of the rows that differ in nothing but their counts, in the order of the first of each."""
    table: dict[Collective, list[int]] = {}
    for row in rows:
        amounts = table.setdefault(dataclasses.replace(row, count=0, bytes=0), [0, 0])
        amounts[0] += row.count
        amounts[1] += row.bytes
    return tuple(dataclasses.replace(row, count=count, bytes=bytes) for row, (count, bytes) in table.items())


def count_elements(shape: Iterable[int]) -> int:
    """How many numbers an array has."""
    return math.prod(shape)
