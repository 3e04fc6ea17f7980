"""The registry of faults: functions, arguments, and where comments of their source say that the fault is.

A comment names what the line makes, the operation, the pass if it is not the forward one, and the turns of the loops:

    jnp.exp(x)  # origin: inf exp
    x - x  # origin: nan sub backward 2 0

`# cause: ...` likewise is the line that made the infinities of which the origin made a nan. A line may have both.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from oracle import Origin

from jmp_policy.numerics import NonfiniteOrigin


class Expected(NamedTuple):
    """Where something that is not finite must be said to come from."""

    kind: str
    primitive: str
    direction: str
    turns: tuple[int, ...]
    line: int
    code: str


@dataclasses.dataclass(frozen=True)
class Fault:
    """A function of arguments at which a result is not finite.

    Attributes:
      make: makes the function and its arguments, when they are asked for: models are drawn for it.
      file: where its source is.
      origin: the operation that made it so; `None` if it came in with an argument.
      cause: the operation that made the infinities of which `origin` made a nan, or the path of an argument.
      argument: the path of the argument that it came in with, and what that held.
      path: of modules and scopes; `None` if that is not asked for.
      cause_path: the same of the cause.
    """

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    file: str
    origin: Expected | None
    cause: Expected | str | None
    argument: tuple[str, str] | None = None
    path: str | None = None
    cause_path: str | None = None

    @functools.cached_property
    def made(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.make()

    @property
    def fun(self) -> Callable[..., Any]:
        return self.made[0]

    @property
    def args(self) -> tuple[Any, ...]:
        return self.made[1]


FAULTS: dict[str, Fault] = {}

_COMMENT = re.compile(r"# (origin|cause): (nan|inf) (\S+)((?: forward| recomputed| backward)?)((?: \d+)*)")


def fault(
    *args: Any,
    of: Callable[..., Any] = lambda fun: fun,
    argument: tuple[str, str] | None = None,
    cause: str | None = None,
    path: str | None = None,
) -> Callable[..., Any]:
    """Takes in a function that is faulty at these arguments.

    Args:
      *args: the arguments.
      of: a transformation: the fault is in `of(fun)`.
      argument: if it comes in with one, its path, and `"nan"` or `"inf"`.
      cause: if its infinities come in with an argument, its path.
      path: of modules and scopes.
    """

    def take_in(fun: Callable[..., Any]) -> Callable[..., Any]:
        _remember(fun, lambda: (of(fun), args), cause, argument, path)
        return fun

    return take_in


def fault_in_model(
    *,
    argument: tuple[str, str] | None = None,
    cause: str | None = None,
    path: str | None = None,
    cause_path: str | None = None,
) -> Callable[..., Any]:
    """Takes in a function without arguments that defines a model, and makes a function of it and its arguments.

    Args:
      argument: as of `fault`, and so are the others.
      cause: if its infinities come in with an argument, its path.
      path: of modules and scopes.
      cause_path: the same of the cause.
    """

    def take_in(make: Callable[..., Any]) -> Callable[..., Any]:
        _remember(make, make, cause, argument, path, cause_path)
        return make

    return take_in


def _remember(fun: Callable[..., Any], make: Callable[..., Any], cause: str | None, *rest: Any) -> None:
    lines, first = inspect.getsourcelines(fun)
    said = read_comments(lines, first)
    name = fun.__name__.replace("_", " ")
    file = inspect.getfile(fun)
    assert name not in FAULTS or FAULTS[name].file == file, name  # pytest imports it twice, for doctests
    FAULTS[name] = Fault(make, file, said.get("origin"), said.get("cause", cause), *rest)
    assert FAULTS[name].argument or "origin" in said, fun


def read_comments(lines: list[str], first: int = 1) -> dict[str, Expected]:
    """What comments say of the origin and its cause, in lines of which the first has the number `first`."""
    said = {}
    for number, line in enumerate(lines, first):
        for found in _COMMENT.finditer(line):
            role, kind, primitive, direction, turns = found.groups()
            place = direction.strip() or "forward", tuple(map(int, turns.split()))
            said[role] = Expected(kind, primitive, *place, number, line.strip())
    return said


def value_and_grads(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The value of a function of one array, summed, and its gradient."""
    return jax.value_and_grad(lambda *args: jax.numpy.sum(fun(*args)))


def assert_is(found: NonfiniteOrigin, expected: Expected, file: str) -> None:
    """Asserts that an origin is the one that a comment of a file says."""
    place = found.kind, found.primitive, found.direction, found.turns, found.source
    assert place == (*expected[:4], f"{file}:{expected.line}")
    code = found.code.removesuffix("…")
    assert code
    assert expected.code.startswith(code)


def assert_ranges_are(found: NonfiniteOrigin, expected: Origin, has_loops: bool = False) -> None:
    """Asserts that the ranges of operands are those seen on the host, but for the last bits of a compiled program.

    Those of what a loop makes may be of all its turns.
    """
    for mine, other in zip(found.operands, expected.operands, strict=False):
        if mine is not None and other is not None:
            shared = max(mine[0], other[0]), min(mine[1], other[1])
            np.testing.assert_allclose(shared if expected.turns or has_loops else mine, other, rtol=1e-5)
