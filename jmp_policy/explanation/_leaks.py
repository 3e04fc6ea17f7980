"""What the operations of a traced model say of its modules: what each computes in and sums in half precision, and
which ones leak a wide dtype."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from ._module import ModuleInfo
from ._observation import path_of
from ._operations import Operation, Value

Marks = dict[int | None, frozenset[str]]
"""By value: the named modules whose wide results it is made of."""


def compute_dtypes(program: Iterable[Operation]) -> dict[str, tuple[str, ...]]:
    """The dtypes that the operations in each module's own code read, by path; conversions are none of them."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = path_of(operation.scope)
        if path is not None and operation.computes:
            found[path].update(dict.fromkeys(str(v.dtype) for v in operation.operands if v.dtype is not None))
    return {path: tuple(dtypes) for path, dtypes in found.items()}


def made_dtypes(program: Iterable[Operation]) -> dict[str, set[str]]:
    """The dtypes of what the operations in each module's own code make, by path; conversions are among them."""
    found: dict[str, set[str]] = defaultdict(set)
    for operation in program:
        path = path_of(operation.scope)
        if path is not None:
            found[path].update(str(value.dtype) for value in operation.results if value.dtype is not None)
    return found


def half_sums(program: Iterable[Operation]) -> dict[str, tuple[str, ...]]:
    """The sums and products of many numbers that each module's own code takes in half precision, by path."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = path_of(operation.scope)
        if path is not None and operation.half_sum is not None:
            found[path][str(operation.half_sum)] = None
    return {path: tuple(sums) for path, sums in found.items()}


def leaks(program: Iterable[Operation], modules: Mapping[str, ModuleInfo]) -> dict[str, tuple[str, ...]]:
    """The modules into whose code others leak a dtype wider than the one meant there, by the path of the leaking one.

    A rule such as `"norm": "float32"` makes a module return float32. A layer of Flax's that takes it narrows it, but
    in code of the user's own, such as a residual sum, promotion makes everything that follows float32. So a mark goes
    with what a module that a rule names returns, through every operation that keeps its dtype, and a marked operand
    of arithmetic in the code of a module that is meant to compute in a narrower dtype is a leak. A conversion that
    the author wrote takes the mark away.

    Args:
      program: the operations in order.
      modules: what holds at each path.
    """
    marks: Marks = {}
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for operation in program:
        path = path_of(operation.scope)
        if operation.computes and path is not None:
            for value in operation.operands:
                for source in _leaking(marks.get(value.key, frozenset()), path, value, modules[path]):
                    found[source][path] = None
        sources = _named_around(path, modules)
        for value in operation.results:
            marks[value.key] = _passed_on(operation, value, marks) | sources
    return {source: tuple(paths) for source, paths in found.items()}


def _leaking(marks: frozenset[str], path: str, value: Value, module: ModuleInfo) -> Iterable[str]:
    """The modules whose wide result is arithmetic's operand in the code of a module that they are not around."""
    if module.is_layer or module.compute_dtype is None or value.dtype is None:
        return ()
    if np.dtype(module.compute_dtype).itemsize >= value.dtype.itemsize:
        return ()
    return sorted(source for source in marks if not _is_inside(path, source))


def _passed_on(operation: Operation, result: Value, marks: Marks) -> frozenset[str]:
    same_dtype = [v for v in operation.operands if v.dtype is not None and v.dtype == result.dtype]
    return frozenset().union(*(marks.get(v.key, frozenset()) for v in same_dtype))


def _named_around(path: str | None, modules: Mapping[str, ModuleInfo]) -> frozenset[str]:
    """The modules around an operation that a rule, a policy or an author's dtype names; the root leaks nowhere."""
    if not path:
        return frozenset()
    names = path.split("/")
    around = ("/".join(names[: n + 1]) for n in range(len(names)))
    return frozenset(outer for outer in around if outer in modules and modules[outer].is_named)


def _is_inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + "/")
