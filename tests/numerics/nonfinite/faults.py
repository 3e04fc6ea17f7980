"""The registry of faults: functions, arguments, and where comments of their source say that the fault is.

A comment names what the line makes, the operation, the pass if it is not the forward one, and the turns of the loops:

    jnp.exp(x)  # origin: inf exp
    x - x  # origin: nan sub backward 2 0

`# cause: ...` likewise is the line that made the infinities of which the origin made a nan. A line may have both.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """A function of arguments at which a result is not finite."""

    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    file: str
    origin: Expected | None  # `None` if it came in with an argument
    cause: Expected | str | None  # what made the infinities of which `origin` made a nan, or the path of an argument
    argument: tuple[str, str] | None = None  # its path, and "nan" or "inf"
    path: str | None = None  # of modules and scopes; `None` if that is not asked for
    cause_path: str | None = None

    def assert_found(self, found: NonfiniteOrigin) -> None:
        assert (found.found, found.reproduced) == (True, True)
        if self.origin is None:
            assert (found.argument, found.kind, found.primitive) == (*self.argument, "")
            return
        assert found.argument is None
        assert_is(found, self.origin, self.file)
        assert self.path in (None, found.path)
        assert (found.cause is None) == (self.cause is None)
        if isinstance(self.cause, str):
            assert found.cause.argument == self.cause
        elif self.cause:
            assert_is(found.cause, self.cause, self.file)
            assert self.cause_path in (None, found.cause.path)


FAULTS: dict[str, Fault] = {}

_COMMENT = re.compile(r"# (origin|cause): (nan|inf) (\S+)((?: forward| recomputed| backward)?)((?: \d+)*)")


def fault(*args: Any, of: Callable[..., Any] = lambda fun: fun, **facts: Any) -> Callable[..., Any]:
    """Takes in a function such that `of(function)` is faulty at these arguments; the rest are fields of `Fault`."""
    return lambda fun: _remember(fun, lambda: (of(fun), args), **facts)


def fault_in_model(**facts: Any) -> Callable[..., Any]:
    """Takes in a function without arguments that makes a function of a model, and its arguments."""
    return lambda make: _remember(make, make, **facts)


def _remember(fun: Callable[..., Any], make: Callable[..., Any], cause: str | None = None, **facts: Any) -> Any:
    said = read_comments(*inspect.getsourcelines(fun))
    name, file = fun.__name__.replace("_", " "), inspect.getfile(fun)
    assert name not in FAULTS or FAULTS[name].file == file, name  # pytest imports it twice, for doctests
    FAULTS[name] = Fault(make, file, said.get("origin"), said.get("cause", cause), **facts)
    assert FAULTS[name].argument or "origin" in said, fun
    return fun


def read_comments(lines: list[str], first: int = 1) -> dict[str, Expected]:
    """What comments say of the origin and its cause, in lines of which the first has the number `first`."""
    said = {}
    for number, line in enumerate(lines, first):
        for found in _COMMENT.finditer(line):
            role, kind, primitive, direction, turns = found.groups()
            place = direction.strip() or "forward", tuple(map(int, turns.split()))
            said[role] = Expected(kind, primitive, *place, number, line.strip())
    return said


def assert_is(found: NonfiniteOrigin, expected: Expected, file: str) -> None:
    """Asserts that an origin is the one that a comment of a file says."""
    place = found.kind, found.primitive, found.direction, found.turns, found.source
    assert place == (*expected[:4], f"{file}:{expected.line}")
    code = found.code.removesuffix("…")
    assert code
    assert expected.code.startswith(code)
