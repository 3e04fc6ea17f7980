"""What a user asks `collect` for, read and checked."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from ..._base import Args, describe, did_you_mean, is_array
from ._choice import PASSES
from ._measure import Meter
from ._what_if import parse_format

LOOPS = ("auto", "split", "merge")


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
      meter: what of each tensor.
      where: which operations and paths.
      of: which passes, and whether arguments and results.
      loops: one of `LOOPS`.
      every: how many steps lie between two that are measured.
    """

    meter: Meter
    where: tuple[str, ...]
    of: tuple[str, ...]
    loops: str
    every: int | None


def make_request(
    formats: Any, where: str | Sequence[str], of: str | Sequence[str], histogram: bool, loops: str, every: Any
) -> Request:
    """Reads the arguments of `collect`.

    Raises:
      TypeError: something that is a string is none.
      ValueError: a name or a number is none that `collect` knows.
    """
    names = formats if isinstance(formats, tuple | list | set | frozenset) else [formats]
    meter = Meter(tuple(dict.fromkeys(parse_format(name).name for name in names)), bool(histogram))
    return Request(meter, _list_entries("where", where), _parse_passes(of), _parse_loops(loops), _parse_every(every))


def take_step(every: int | None, args: Args) -> tuple[Any, Args]:
    """Takes the number of the step off the arguments."""
    if every is None:
        return None, args
    step = args[0] if args else None
    is_integer = is_array(step) and jnp.issubdtype(step.dtype, jnp.integer) and not step.shape
    if isinstance(step, bool) or not (isinstance(step, int) or is_integer):
        raise TypeError(
            f"With every={every}, the first argument is the number of the step, an integer, not {describe(step)}. "
            "For example: collect(train_step, every=100)(step, state, batch)."
        )
    return step, args[1:]


def _parse_passes(of: str | Sequence[str]) -> tuple[str, ...]:
    entries = _list_entries("of", of)
    for entry in entries:
        if entry not in PASSES:
            raise ValueError(f"of has {entry!r}. {did_you_mean(entry, PASSES)} For example: of={_EXAMPLES['of']}.")
    return entries


def _parse_loops(loops: str) -> str:
    if loops not in LOOPS:
        raise ValueError(f"Unknown loops {loops!r}. {did_you_mean(loops, LOOPS)} For example: loops='split'.")
    return loops


def _parse_every(every: int | None) -> int | None:
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f"every must be a positive integer or None, got {every!r}. For example: every=100.")
    return every


def _list_entries(name: str, entries: str | Sequence[str]) -> tuple[str, ...]:
    listed = (entries,) if isinstance(entries, str) or not isinstance(entries, Iterable) else tuple(entries)
    for entry in listed:
        if not isinstance(entry, str):
            raise TypeError(f"{name} takes strings, got {entry!r}. For example: {name}={_EXAMPLES[name]}.")
    if not listed:
        raise ValueError(f"{name} is empty, so that nothing would be measured. For example: {name}={_EXAMPLES[name]}.")
    return listed


_EXAMPLES = {"where": "('matmuls', 'blocks/.*')", "of": "('forward', 'backward')"}
