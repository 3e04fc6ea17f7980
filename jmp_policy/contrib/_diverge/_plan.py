"""Chooses the values of two aligned programs to compare, and describes their rows."""

import dataclasses
from collections.abc import Collection, Iterable
from typing import Any, Literal as OneOf, NamedTuple

from jax.extend.core import Literal

from ..._jaxpr import find_real_shape, sub_jaxprs, walk
from ._align import Alignment
from ._scopes import RESIDUAL, Node, Scope, Side, has_values, split_loop

Kind = OneOf["passed", "introduced", "skipped"]


class ValuePair(NamedTuple):
    """A value of `f`, and the one to compare it with.

    Kinds: `"passed"`, of `g`; `"introduced"`, of a scope of `g` on values of `f`; `"skipped"`, of `f`, before a scope
    that `g` lacks.
    """

    kind: Kind
    reference: int
    value: int


class ScopePlan(NamedTuple):
    """The comparisons of a scope, as positions in `Plan.comparisons`."""

    scope: Scope
    incoming: tuple[int, ...]
    outgoing: tuple[int, ...]
    introduced: tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Plan:
    """The comparisons of two programs, or of an iteration of two loops, and of the loops inside."""

    alignment: Alignment
    comparisons: dict[ValuePair, int] = dataclasses.field(default_factory=dict)  # numbered
    scopes: list["ScopePlan | Plan"] = dataclasses.field(default_factory=list)  # in the order in which they end

    @property
    def loops(self) -> list["Plan"]:
        return [plan for plan in self.scopes if isinstance(plan, Plan)]

    def add(self, kind: Kind, values: Iterable[int], references: Iterable[int] | None = None) -> tuple[int, ...]:
        """Adds comparisons, by default with the values of `f` that are paired with these, and returns their numbers."""
        values = list(values)
        partners = [find_partner(self.alignment, value) for value in values] if references is None else references
        added = [ValuePair(kind, *pair) for pair in zip(partners, values, strict=True)]
        return tuple(self.comparisons.setdefault(comparison, len(self.comparisons)) for comparison in added)


def make_plan(alignment: Alignment, given: Collection[int]) -> Plan:
    """Chooses the values to compare. `given` inputs of `g` are arguments, which have no error."""
    plan = Plan(alignment)
    for scope in dict.fromkeys(alignment.scopes):
        if scope in alignment.bodies:
            _, node, inner = alignment.bodies[scope]
            plan.scopes.append(make_plan(inner, _list_given(alignment, node, inner, given)))
            continue
        if scope in alignment.skipped:
            plan.scopes.append(_plan_skipped(plan, scope))
        if scope in alignment.g.nodes:
            plan.scopes.append(_plan_scope(plan, scope, given))
    return plan


def _list_given(alignment: Alignment, node: Node, inner: Alignment, given: Collection[int]) -> list[int]:
    """Lists the inputs of an iteration that are, or are parts of, arguments or constants."""
    carried = range(*split_loop(node))
    is_given = [isinstance(v, Literal) or alignment.g.flat.find_origin(v) in given for v in node.operands]
    return [v for i, v in enumerate(inner.g.flat.inputs) if is_given[i] and i not in carried]


def _plan_skipped(plan: Plan, scope: Scope) -> ScopePlan:
    """Compares the outputs of a scope that `g` lacks with the values that it has instead."""
    alignment = plan.alignment
    pairs = [(value, alignment.g.exits[other][0]) for value, other in alignment.skipped[scope]]
    pairs = [pair for pair in pairs if has_values(alignment.g.flat.types[pair[1]])]
    outputs, others = [value for value, _ in pairs], [other for _, other in pairs]
    outgoing, introduced = plan.add("passed", others, outputs), plan.add("skipped", others, outputs)
    return ScopePlan(scope, plan.add("passed", others), outgoing, introduced)


def _plan_scope(plan: Plan, scope: Scope, given: Collection[int]) -> ScopePlan:
    alignment, g = plan.alignment, plan.alignment.g
    is_compared = lambda origin: origin in alignment.pairs and has_values(g.flat.types[origin])
    made = [value for value in g.list_shared(scope) if is_compared(value)]
    passed = [value for value in made if g.readers[value] != {RESIDUAL}]
    exits = [exit for value in passed or made for exit in g.exits[value]]
    read = {g.flat.find_exit(value)[0]: g.flat.find_origin(value) for value in g.reads.get(scope, ())}
    read = {exit: origin for exit, origin in sorted(read.items()) if is_compared(origin) and origin not in given}
    makers = {exit: g.flat.find_scope(origin) for exit, origin in read.items()}
    same = [exit for exit, maker in makers.items() if maker is None or maker.direction == scope.direction]
    return ScopePlan(scope, plan.add("passed", same or read), plan.add("passed", exits), plan.add("introduced", exits))


def find_partner(alignment: Alignment, value: int) -> int:
    """Returns the value of `f` for a value that leaves a scope of `g`; of several, one in the same dtype."""
    f, g = alignment.f, alignment.g
    origin = alignment.pairs[g.flat.find_origin(value)]
    exits = f.exits.get(origin, [origin])
    dtype = g.flat.types[value].dtype
    return next((exit for exit in exits if f.flat.types[exit].dtype == dtype), exits[0])


class RowLayout(NamedTuple):
    """The comparisons of one call of a scope."""

    plan: ScopePlan
    loops: tuple[int, ...]  # the positions of the loops around it
    shapes: tuple[tuple[int, ...], ...]  # of all comparisons of its level
    dtypes: tuple[str, str]  # the narrowest dtypes that `f` and `g` compute in


@dataclasses.dataclass(frozen=True, eq=False)
class TableLayout:
    """The static part of a `Divergence`: its rows, outputs with their shapes, and the parts that are not aligned."""

    rows: tuple[RowLayout, ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    unaligned: tuple[str, ...]
    names: tuple[str, str]


def make_layout(
    plan: Plan,
    outputs: Iterable[tuple[str, tuple[int, ...]]],
    names: tuple[str, str],
    unpaired: Iterable[str] = (),
) -> TableLayout:
    unaligned = dict.fromkeys([*plan.alignment.unaligned, *unpaired])
    return TableLayout(tuple(_list_rows(plan, ())), tuple(outputs), tuple(unaligned), names)


def _list_rows(plan: Plan, loops: tuple[int, ...]) -> list[RowLayout]:
    alignment = plan.alignment
    shapes = tuple(find_real_shape(alignment.g.flat.types[comparison.value]) for comparison in plan.comparisons)
    found: list[RowLayout] = []
    numbers = iter(range(len(plan.scopes)))
    for item in plan.scopes:
        if isinstance(item, Plan):
            found += _list_rows(item, (*loops, next(numbers)))
            continue
        own = item.scope if item.scope in alignment.f.nodes else item.scope._replace(direction="forward")
        dtypes = _find_narrowest(alignment.f, own), _find_narrowest(alignment.g, item.scope)
        found.append(RowLayout(item, loops, shapes, dtypes))
    return found


def _find_narrowest(side: Side, scope: Scope) -> str:
    eqns = [node.eqn for node in side.nodes.get(scope, ())]
    eqns += [cast.eqn for value in side.reads.get(scope, ()) for cast in side.flat.find_exit(value)[1]]
    inside = [step.results for eqn in eqns for body in sub_jaxprs(eqn) for step in walk(body.program)]
    return find_narrowest(var.aval for results in (*inside, *(eqn.outvars for eqn in eqns)) for var in results)


def find_narrowest(types: Iterable[Any]) -> str:
    """Returns the narrowest dtype, of floats and of quantized integers, in which a scope computes or reads."""
    dtypes = {str(kind.dtype): kind.dtype for kind in types if hasattr(kind, "dtype")}
    chosen = [name for name in dtypes if "float" in name or name in ("int8", "int4")]
    return min(chosen, key=lambda name: dtypes[name].itemsize, default="")
