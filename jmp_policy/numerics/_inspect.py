"""Making a report of a program: its operations are counted, and its steps are checked one after the other."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from ..interpreter import Step, float_dtype, multiplies_only, walk
from ..interpreter._module_paths import ModulePaths
from ._checks import Suspicion, check, suspect_half_gradient
from ._cost import MATMULS, count_bytes, count_flops
from ._facts import HALF, Fact, derive_facts, describe_argument, describe_constant, find_fact
from ._report import FINDINGS, REMEDIES, AuditReport, AuditRow, Finding, Matmul
from ._source import find_line, find_origin


class Overflow(NamedTuple):
    """A constant that became infinite while the program was traced.

    Attributes:
      source: the user's line.
      scope: the name stack.
    """

    source: str
    scope: str


def inspect(program: ClosedJaxpr, overflows: Iterable[Overflow], paths: ModulePaths) -> AuditReport:
    """The report of a program.

    Args:
      program: the program; it is not run.
      overflows: what happened while it was traced.
      paths: where its equations stand.
    """
    inspector = _Inspector(paths)
    body = program.jaxpr
    inspector.facts.update((var, describe_argument(var)) for var in body.invars)
    inspector.facts.update(zip(body.constvars, map(describe_constant, program.consts), strict=False))
    inspector.has_half = any(float_dtype(var) in HALF for var in (*body.invars, *body.constvars))
    for overflow in overflows:
        inspector.see_overflow(overflow)
    for step in walk(body, live_only=True):
        inspector.see(step)
    inspector.finish(body.outvars)
    return inspector.report()


class _Inspector:
    """Sees one step after the other.

    Attributes:
      facts: what is known of each value.
      has_half: whether anything in the program is half precision.
    """

    def __init__(self, paths: ModulePaths):
        self.facts: dict[Var, Fact] = {}
        self.has_half = False
        self._paths = paths
        self._rows: dict[tuple, list[int]] = {}
        self._matmuls: dict[tuple, list[int]] = {}
        self._findings: dict[tuple, list[Any]] = {}
        self._loops: dict[str, None] = {}
        self._places: dict[str, tuple[str, bool]] = {}

    def see(self, step: Step) -> None:
        if step.name == "constant":
            self.facts[step.results[0]] = describe_constant(step.operands[0])
            return
        backward = self._find_place(step.scope)[1]
        facts = [find_fact(atom, self.facts) for atom in step.operands]
        for suspicion in check(step, facts, backward):
            self._suspect(suspicion, backward)
        self.facts.update(zip(step.results, derive_facts(step, facts, backward), strict=True))
        if step.name in ("link", "carry"):
            if step.eqn.primitive.name == "while":
                self._loops.setdefault(find_line(find_origin(step)))
            return
        self.has_half = self.has_half or any(float_dtype(var) in HALF for var in step.results)
        self._count(step)

    def finish(self, outvars: Sequence[Any]) -> None:
        """Sees what the program returns, which may be gradients."""
        for atom in outvars:
            fact = find_fact(atom, self.facts)
            if fact.summed is not None:
                self._suspect(suspect_half_gradient(fact, atom), backward=True)

    def see_overflow(self, overflow: Overflow) -> None:
        path, backward = self._find_place(overflow.scope)
        key = "infinite-constant", overflow.source, path, backward
        self._findings.setdefault(key, ["when it was cast", (), 0])[2] += 1

    def report(self) -> AuditReport:
        rows = (AuditRow(*key, *counts) for key, counts in self._rows.items())
        matmuls = (Matmul(*key, *counts) for key, counts in self._matmuls.items())
        return AuditReport(tuple(rows), tuple(self._describe_findings()), tuple(matmuls), tuple(self._loops))

    def _describe_findings(self) -> Iterable[Finding]:
        for (name, source, path, backward), (detail, dtypes, count) in self._findings.items():
            if name != "float32-matmul" or self.has_half:
                message = f"{FINDINGS[name]} ({detail}); {REMEDIES[name]}"
                yield Finding(name, message, source, path, dtypes, backward, count)

    def _suspect(self, suspicion: Suspicion, backward: bool) -> None:
        path = self._find_place(suspicion.step.scope)[0]
        key = suspicion.id, find_line(find_origin(suspicion.step)), path, backward
        dtypes = tuple(map(str, dict.fromkeys(suspicion.dtypes)))
        self._findings.setdefault(key, [suspicion.detail, dtypes, 0])[2] += 1

    def _count(self, step: Step) -> None:
        path, backward = self._find_place(step.scope)
        work = step.trips * count_flops(step.eqn)
        key = path, step.name, _name_dtype(step), backward
        _add_amounts(self._rows, key, step.trips, work, step.trips * count_bytes(step.eqn))
        if step.name in MATMULS and not multiplies_only(step.eqn):
            dtypes = tuple(dict.fromkeys(str(float_dtype(atom) or atom.aval.dtype) for atom in step.operands[:2]))
            matmul = step.name, dtypes, key[2], find_line(find_origin(step)), path, backward
            _add_amounts(self._matmuls, matmul, step.trips, work)

    def _find_place(self, scope: str) -> tuple[str, bool]:
        if scope not in self._places:
            self._places[scope] = self._paths.read_stack(scope), "transpose(" in scope
        return self._places[scope]


def _add_amounts(table: dict[tuple, list[int]], key: tuple, *amounts: int) -> None:
    counts = table.setdefault(key, [0] * len(amounts))
    for i, amount in enumerate(amounts):
        counts[i] += amount


def _name_dtype(step: Step) -> str:
    """The dtype that a step runs in: the widest floating one that it reads, or else makes."""
    if step.name == "convert_element_type":
        return f"{step.operands[0].aval.dtype}->{step.results[0].aval.dtype}"
    for atoms in (step.operands, step.results):
        floats = [dtype for dtype in map(float_dtype, atoms) if dtype is not None]
        if floats:
            return str(max(floats, key=_width))
    return next((str(dtype) for atom in step.results if (dtype := getattr(atom.aval, "dtype", None))), "")


def _width(dtype: np.dtype) -> int:
    return dtype.itemsize
