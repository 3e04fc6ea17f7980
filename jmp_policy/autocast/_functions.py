"""Which function of the tables an equation was traced in, from the frames of its traceback."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn


class Function(NamedTuple):
    """A function of the tables, and how what is inside of it is treated."""

    name: str
    treatment: str


class Functions:
    """Functions by name, found in tracebacks.

    A dotted name is that of a public function or method, and means that very function; a name without dots is that of
    any function. Functions of packages that are not loaded are passed over.
    """

    def __init__(self, treatments: Mapping[str, str]):
        found = [Function(*item) for item in treatments.items()]
        self._by_name = {function.name: function for function in found if "." not in function.name}
        # By identity: the hash of a code object costs more than the search. The codes are kept, and so their identity.
        codes = {function: _code(function.name) for function in found if "." in function.name}
        self._codes = [code for code in codes.values() if code is not None]
        self._by_code = {id(code): function for function, code in codes.items() if code is not None}

    def find(self, eqn: JaxprEqn) -> Function | None:
        """The outermost function of the table that `eqn` was traced in."""
        traceback = eqn.source_info.traceback
        found = None
        for code in () if traceback is None else traceback.raw_frames()[0]:
            function = self._by_code.get(id(code)) or self._by_name.get(code.co_name)
            if function is not None:
                found = function
        return found


def _code(name: str) -> Any:
    """The code of the function of a dotted name; `None` if its package is not loaded, or does not have it."""
    parts = name.split(".")
    module = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules), None)
    if module is None:
        return None
    target: Any = sys.modules[module]
    for part in parts[len(module.split(".")) :]:
        target = getattr(target, part, None)
    return getattr(inspect.unwrap(target), "__code__", None) if callable(target) else None
