"""Runs two aligned programs side by side, and the scopes of the second one on the values of the first."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal as OneOf, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec

from ..._base import is_floating_dtype
from ._align import RESIDUAL, Alignment
from ._measure import Measured, compare
from ._scopes import Node, Scope, split_loop

Kind = OneOf["passed", "introduced", "skipped"]


class Comparison(NamedTuple):
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
    """The comparisons of two programs, or of an iteration of two loops, and of the loops inside.

    Attributes:
      alignment: the programs.
      comparisons: the values to compare, numbered.
      scopes: the scopes in the order in which they end, and for a loop its own plan.
    """

    alignment: Alignment
    comparisons: dict[Comparison, int] = dataclasses.field(default_factory=dict)
    scopes: list["ScopePlan | Plan"] = dataclasses.field(default_factory=list)

    @property
    def loops(self) -> list["Plan"]:
        return [plan for plan in self.scopes if isinstance(plan, Plan)]

    def add(self, kind: Kind, values: Iterable[int], references: Iterable[int] | None = None) -> tuple[int, ...]:
        """Adds comparisons, by default with the values of `f` that are paired with these, and returns their numbers."""
        values = list(values)
        partners = [find_partner(self.alignment, value) for value in values] if references is None else references
        added = [Comparison(kind, *pair) for pair in zip(partners, values, strict=True)]
        return tuple(self.comparisons.setdefault(comparison, len(self.comparisons)) for comparison in added)


def make_plan(alignment: Alignment, given: Collection[int]) -> Plan:
    """Chooses the values to compare. `given` inputs of `g` are arguments, which have no error."""
    plan = Plan(alignment)
    for scope in alignment.scopes:
        if scope in alignment.bodies:
            _, node, inner = alignment.bodies[scope]
            plan.scopes.append(make_plan(inner, _list_given(alignment, node, inner, given)))
        elif scope in alignment.skipped:
            plan.scopes.append(_plan_skipped(plan, scope))
        else:
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
    pairs = [pair for pair in pairs if _is_float(alignment, pair[1])]
    outputs, others = [value for value, _ in pairs], [other for _, other in pairs]
    outgoing, introduced = plan.add("passed", others, outputs), plan.add("skipped", others, outputs)
    return ScopePlan(scope, plan.add("passed", others), outgoing, introduced)


def _plan_scope(plan: Plan, scope: Scope, given: Collection[int]) -> ScopePlan:
    alignment, g = plan.alignment, plan.alignment.g
    is_compared = lambda origin: origin in alignment.pairs and _is_float(alignment, origin)
    made = [value for value in g.list_shared(scope) if is_compared(value)]
    passed = [value for value in made if g.readers[value] != {RESIDUAL}]
    exits = [exit for value in passed or made for exit in g.exits[value]]
    read = {g.flat.find_exit(value)[0]: g.flat.find_origin(value) for value in g.reads.get(scope, ())}
    read = {exit: origin for exit, origin in sorted(read.items()) if is_compared(origin) and origin not in given}
    makers = {exit: g.flat.find_scope(origin) for exit, origin in read.items()}
    same = [exit for exit, maker in makers.items() if maker is None or maker.direction == scope.direction]
    return ScopePlan(scope, plan.add("passed", same or read), plan.add("passed", exits), plan.add("introduced", exits))


def _is_float(alignment: Alignment, value: int) -> bool:
    dtype = getattr(alignment.g.flat.types[value], "dtype", None)
    return dtype is not None and is_floating_dtype(dtype) and alignment.g.flat.types[value].size > 0


def find_partner(alignment: Alignment, value: int) -> int:
    """Returns the value of `f` for a value that leaves a scope of `g`; of several, one in the same dtype."""
    f, g = alignment.f, alignment.g
    origin = alignment.pairs[g.flat.find_origin(value)]
    exits = f.exits.get(origin, [origin])
    dtype = g.flat.types[value].dtype
    return next((exit for exit in exits if f.flat.types[exit].dtype == dtype), exits[0])


Record = tuple[jax.Array, list["Record"]]
"""The measurements of the comparisons of a plan, `(..., comparisons, len(Measured._fields))`, and of its loops."""


def run(plan: Plan, f_inputs: Sequence[Any], g_inputs: Sequence[Any]) -> tuple[list[Any], list[Any], Record]:
    """Runs both programs. Returns their outputs, and the record."""
    level = _Level(plan, f_inputs, g_inputs, {})
    level.run()
    f, g, _ = level.read_outputs()
    return f, g, level.record()


class _Level:
    """The values of two programs, `f` and `g`, and of the scopes of `g` on values of `f`: the mixed ones."""

    def __init__(self, plan: Plan, f_inputs: Sequence[Any], g_inputs: Sequence[Any], mixed: dict[int, Any]):
        self._plan, self._alignment = plan, plan.alignment
        f, g = self._alignment.f.flat, self._alignment.g.flat
        self._f = {**f.constants, **dict(zip(f.inputs, f_inputs, strict=True))}
        self._g = {**g.constants, **dict(zip(g.inputs, g_inputs, strict=True))}
        self._mixed = {**g.constants, **mixed}
        self._records: dict[int, Record] = {}
        self._values = _Values()
        self._loops = dict(zip(self._alignment.bodies, plan.loops, strict=True))

    def run(self) -> None:
        """Runs all equations. One that needs a loop of the other program waits for the next sweep."""
        f, g = self._alignment.f.flat, self._alignment.g.flat
        looped = {id(mine) for mine, _, _ in self._alignment.bodies.values()}
        tasks = [(self._run_f, node) for node in f.nodes if id(node) not in looped]
        tasks += [(self._run_g, node) for node in g.nodes]
        tasks += [
            (self._run_mixed, node) for node in g.nodes if node.scope is not None and node.scope not in self._loops
        ]
        while tasks:
            waiting = []
            for task, node in tasks:
                try:
                    task(node)
                except KeyError:
                    waiting.append((task, node))
            assert len(waiting) < len(tasks), "two loops wait for each other"
            tasks = waiting

    def _run_f(self, node: Node) -> None:
        operands = [_read(self._f, value) for value in node.operands]
        self._f.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))

    def _run_g(self, node: Node) -> None:
        operands = [_read(self._g, value) for value in node.operands]
        if node.scope is not None and node.scope in self._loops:
            self._run_loop(node.scope, operands)
        else:
            self._g.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))

    def _run_mixed(self, node: Node) -> None:
        operands = [self._read_mixed(value, node.scope) for value in node.operands]
        self._mixed.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))

    def _read_mixed(self, value: int | Literal, scope: Scope | None) -> Any:
        """Reads an operand of a scope of `g`: its own value, made in this pass or another, or else the value of `f`."""
        if isinstance(value, Literal):
            return value.val
        g = self._alignment.g.flat
        origin = g.find_origin(value)
        if scope is not None and g.find_scope(origin) == scope:
            return self._mixed[value]
        exit, casts = g.find_exit(value)
        is_residual = scope is not None and self._alignment.g.is_residual(origin, scope)
        if origin in self._alignment.pairs and not is_residual:
            replaced = self._alignment.replaced.get((scope, origin)) if scope is not None else None
            found = self._f[find_partner(self._alignment, exit) if replaced is None else replaced]
            # A scope in float32 behind one in half precision reads the value of `f` unrounded.
            found = found if casts else self._values.cast(found, g.types[exit].dtype)
        else:
            found = self._mixed[exit]
        for cast in casts:
            [found] = self._values.run(cast.eqn, [found])
        return self._values.cast(found, g.types[value].dtype)  # `stop_gradient` keeps the dtype of `f`

    def _run_loop(self, scope: Scope, g_operands: list[Any]) -> None:
        """Runs two scans in one."""
        mine, theirs, inner = self._alignment.bodies[scope]
        plan = self._loops[scope]
        f_operands = [_read(self._f, value) for value in mine.operands]
        values = inner.g.flat.inputs
        unpaired = [i for i, value in enumerate(values) if value not in inner.pairs]
        mixed = {i: self._read_mixed(theirs.operands[i], None) for i in unpaired}
        (f_start, f_end), (start, end) = split_loop(mine), split_loop(theirs)
        carried = [i for i in unpaired if start <= i < end]

        def step(carry: Any, xs: Any) -> Any:
            f_inputs = [*f_operands[:f_start], *carry[0], *xs[0]]
            g_inputs = [*g_operands[:start], *carry[1], *xs[1]]
            given = {**mixed, **carry[2], **xs[2]}
            level = _Level(plan, f_inputs, g_inputs, {values[i]: x for i, x in given.items()})
            level.run()
            f, g, h = level.read_outputs()
            f_count, count = f_end - f_start, end - start
            next_carry = f[:f_count], g[:count], {i: h[i - start] for i in carried}
            return next_carry, (f[f_count:], g[count:], h[count:], level.record())

        init = f_operands[f_start:f_end], g_operands[start:end], {i: mixed[i] for i in carried}
        xs = f_operands[f_end:], g_operands[end:], {i: mixed[i] for i in unpaired if i >= end}
        (f, g, h), made = _repeat(step, init, xs, mine, theirs)
        self._f.update(zip(mine.results, [*f, *made[0]], strict=True))
        self._g.update(zip(theirs.results, [*g, *made[1]], strict=True))
        last = {i - start: x for i, x in h.items()} | {end - start + i: y for i, y in enumerate(made[2])}
        self._mixed.update({theirs.results[i]: x for i, x in last.items()})
        self._records[id(plan)] = made[3]

    def read_outputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        f, g = self._alignment.f.flat, self._alignment.g.flat
        mixed = [self._read_mixed(value, None) for value in g.outputs]
        make = lambda x: jnp.asarray(x, np.result_type(x)) if not hasattr(x, "aval") else x
        return (
            [make(_read(self._f, v)) for v in f.outputs],
            [make(_read(self._g, v)) for v in g.outputs],
            [*map(make, mixed)],
        )

    def record(self) -> Record:
        """Measures the comparisons."""
        rows = []
        for kind, reference, value in self._plan.comparisons:
            if kind == "skipped":
                found = self._f[find_partner(self._alignment, value)]
            else:
                found = (self._g if kind == "passed" else self._mixed)[value]
            rows.append(compare(self._f[reference], found))
        dtype = np.result_type(np.float32, *(row.dtype for row in rows))
        measured = jnp.stack([row.astype(dtype) for row in rows]) if rows else jnp.zeros((0, len(Measured._fields)))
        return measured, [self._records[id(plan)] for plan in self._plan.loops]


def _repeat(step: Callable[..., Any], init: Any, xs: Any, mine: Node, theirs: Node) -> Any:
    """Runs a step in each iteration of two scans, or on each device of two `shard_map`s."""
    ours, params = mine.eqn.params, theirs.eqn.params
    if theirs.eqn.primitive.name == "scan":
        return lax.scan(step, init, xs, params["length"], reverse=params["reverse"])
    axes = tuple(axis for axis in params["mesh"].axis_names if axis in params["newly_manual_axes"])

    def run(*xs: Any) -> Any:
        f, g, mixed, record = step(init, xs)[1]
        return f, g, mixed, jax.tree.map(lambda leaf: leaf[None], record)

    in_specs = [*ours["in_specs"]], [*params["in_specs"]], {i: params["in_specs"][i] for i in xs[2]}
    out_specs = [*ours["out_specs"]], [*params["out_specs"]], [*params["out_specs"]], PartitionSpec(axes)
    # Values of `f` may vary along other axes than those of `g` in their place.
    options = {"mesh": params["mesh"], "axis_names": set(axes), "check_vma": False}
    return init, jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, **options)(*xs)


def _read(values: dict[int, Any], value: int | Literal) -> Any:
    return value.val if isinstance(value, Literal) else values[value]


class _Values:
    """Runs equations. Equal ones on the same operands share their results, so that equal scopes have no error."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Sequence[Any], Sequence[Any]]] = {}

    def run(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        key = eqn.primitive, tuple(eqn.params.items()), eqn.ctx, tuple(map(_identify, operands))
        try:
            found = self._known.get(key)
        except TypeError:  # an unhashable parameter
            return _bind(eqn, operands)
        if found is None:
            found = self._known[key] = _bind(eqn, operands), operands  # which keeps the ids of the operands
        return found[0]

    def cast(self, x: Any, dtype: Any) -> Any:
        if x.dtype == dtype:
            return x
        key = "cast", id(x), dtype
        if key not in self._known:
            self._known[key] = [lax.convert_element_type(x, dtype)], [x]
        return self._known[key][0][0]


def _identify(operand: Any) -> Any:
    """Identifies an array, or the bits of a constant, because 0.0 == -0.0."""
    return id(operand) if isinstance(operand, jax.Array) else (np.asarray(operand).tobytes(), np.result_type(operand))


def _bind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    with eqn.ctx.manager:
        if eqn.primitive.name == "psum_invariant":  # which only check_vma=True knows
            return [lax.psum(operands[0], eqn.params["axes"])]
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]
