"""Which function of the tables an equation was traced in, from the frames of its traceback."""

import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn


class Function(NamedTuple):
    """A function of the tables, and how what is inside of it is treated."""

    name: str
    treatment: str


class Functions:
    """Functions by name, found in tracebacks.

    A dotted name is that of a public function or method, and means that very function, or of a module, and means each
    of its public functions that has no name here; a name without dots is that of any function. What is not loaded is
    passed over until it is.
    """

    def __init__(self, treatments: Mapping[str, str]):
        found = [Function(*item) for item in treatments.items()]
        self._by_name = {function.name: function for function in found if "." not in function.name}
        self._dotted = [function for function in found if "." in function.name]
        self._by_code: dict[int, Function] = {}
        self._codes: list[CodeType] = []
        self._loaded = 0

    def find(self, eqn: JaxprEqn) -> Function | None:
        """The outermost function of the table that `eqn` was traced in."""
        traceback = eqn.source_info.traceback
        found = None
        self._look_up()
        for code in () if traceback is None else traceback.raw_frames()[0]:
            function = self._by_name.get(code.co_name) or self._by_code.get(id(code))
            if function is not None:
                found = function
        return found

    def _look_up(self) -> None:
        """Finds the code of each function: again, if there are modules that were not loaded the last time.

        By identity: the hash of a code object costs more than the search. The codes are kept, and so their identity.
        """
        if len(sys.modules) == self._loaded:
            return
        self._loaded = len(sys.modules)
        targets = [(function, _target(function.name)) for function in self._dotted]
        for function, target in sorted(targets, key=lambda row: not inspect.ismodule(row[1])):  # functions go over it
            for code in _codes_of_module(target) if inspect.ismodule(target) else _codes(target):
                self._by_code[id(code)] = function
                self._codes.append(code)


def _target(name: str) -> Any:
    """The object of a dotted name; `None` if its package is not loaded, or does not have it."""
    parts = name.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), None)
    if module is None:
        return None
    target: Any = sys.modules[module]
    for part in parts[len(module.split(".")) :]:
        target = getattr(target, part, None)
    return target


def _codes_of_module(module: ModuleType) -> Iterator[CodeType]:
    """Those of its public functions, and of the functions that those make and return."""
    for name in dir(module):
        if not name.startswith("_"):
            for code in _codes(getattr(module, name)):
                yield code
                yield from (inner for inner in code.co_consts if isinstance(inner, CodeType))


def _codes(target: Any) -> list[CodeType]:
    code = getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
    return [] if code is None else [code]
