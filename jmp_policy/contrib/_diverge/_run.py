"""Chooses the values of two aligned programs to compare, and runs both programs."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal as OneOf, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import AxisType, PartitionSpec

from ..._base import keep_rounding
from ..._jaxpr import find_real_shape, split_axes, sub_jaxprs, walk
from ._align import Alignment
from ._measure import Measured, compare, stack
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
    positions: int = 0  # the number of positions that are measured one by one
    position_sizes: tuple[int, ...] = ()  # the number of elements of all comparisons at one of them

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.position_sizes or tuple(map(math.prod, self.shapes))


@dataclasses.dataclass(frozen=True, eq=False)
class TableLayout:
    """The static part of a `Divergence`: its rows, outputs with their shapes, and the parts that are not aligned."""

    rows: tuple[RowLayout, ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    unaligned: tuple[str, ...]
    names: tuple[str, str]
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of rules for `g`, by path, if they differ


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


Record = tuple[jax.Array, list["Record"]]
"""The measurements of the comparisons of a plan, `(..., comparisons, len(Measured._fields))`, and of its loops."""


def run_aligned(
    plan: Plan, f_inputs: Sequence[Any], g_inputs: Sequence[Any], *, is_mixed: bool
) -> tuple[Any, Any, Record]:
    """Runs `f` with `g`, or with the scopes of `g` on values of `f`. Returns the outputs of both, and the record.

    In one program, three sets of residuals would wait for the backward pass at once.
    """
    inputs = dict(zip(plan.alignment.g.flat.inputs, g_inputs, strict=True))
    level = _Level(plan, f_inputs, inputs, is_mixed)
    level.run()
    return *level.read_outputs(), level.record()


class _Level:
    """The values of `f`, and of `g` or, if `is_mixed`, of the scopes of `g` on values of `f`."""

    def __init__(self, plan: Plan, f_inputs: Sequence[Any], g_inputs: dict[int, Any], is_mixed: bool):
        self._plan, self._alignment, self._is_mixed = plan, plan.alignment, is_mixed
        f, g = self._alignment.f.flat, self._alignment.g.flat
        self._f = {**f.constants, **dict(zip(f.inputs, f_inputs, strict=True))}
        self._g = {**g.constants, **g_inputs}
        self._records: dict[int, Record] = {}
        self._values = Values()
        self.differing: set[int] = set()  # residuals that loops of `g` made and that differ from those of `f`
        self._loops = dict(zip(self._alignment.bodies, plan.loops, strict=True))

    def run(self) -> None:
        """Runs all equations, those of `f` first, since scopes of `g` read them.

        A loop of `f` that runs in one with a loop of `g` is the exception: equations of `f` that read its results find
        none (a KeyError), and wait for the next sweep.
        """
        f, g = self._alignment.f.flat, self._alignment.g.flat
        looped = {id(mine) for mine, _, _ in self._alignment.bodies.values()}
        tasks = [(self._run_f, node) for node in f.nodes if id(node) not in looped]
        tasks += [(self._run_g, node) for node in g.nodes if node.scope is not None or not self._is_mixed]
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
        operands = [read(self._f, value) for value in node.operands]
        self._f.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))

    def _run_g(self, node: Node) -> None:
        if node.scope is not None and node.scope in self._loops:
            self._run_loop(node.scope)
        else:
            operands = [self._read_g(value, node.scope) for value in node.operands]
            self._g.update(zip(node.results, self._values.run(node.eqn, operands), strict=True))

    def _read_g(self, value: int | Literal, scope: Scope | None) -> Any:
        """Reads an operand of a scope of `g`: its own value, made in this pass or another, or else the value of `f`."""
        if isinstance(value, Literal) or not self._is_mixed:
            return read(self._g, value)
        g = self._alignment.g.flat
        origin = g.find_origin(value)
        if scope is not None and g.find_scope(origin) == scope:
            return self._g[value]
        exit, casts = g.find_exit(value)
        is_residual = scope is not None and self._alignment.g.is_residual(origin, scope)
        is_residual = is_residual and (origin in g.makers or origin in self._g)
        if origin in self._alignment.pairs and not is_residual:
            replaced = self._alignment.replaced.get((scope, origin)) if scope is not None else None
            found = self._f[find_partner(self._alignment, exit) if replaced is None else replaced]
            # A scope in float32 behind one in half precision reads the value of `f` unrounded.
            found = found if casts else self._values.cast(found, g.types[exit])
        else:
            found = self._g[exit]
        for cast in casts:
            [found] = self._values.run(cast.eqn, [found])
        return self._values.cast(found, g.types[value])  # `stop_gradient` keeps the dtype of `f`

    def _run_loop(self, scope: Scope) -> None:
        """Runs two scans in one.

        Operands are constants, carry, xs; results are carry, ys. The bounds of the carry among them:

            of `f`, whole:      f_operands[:f_start]   [f_start:f_end]   [f_end:]
            of `g`, if `used`:  g_operands[:start]     [start:end]       [end:]
        """
        mine, theirs, inner = self._alignment.bodies[scope]
        plan = self._loops[scope]
        f_operands = [read(self._f, value) for value in mine.operands]
        values = inner.g.flat.inputs
        own = {i: x for i, x in enumerate(theirs.operands) if x in self.differing and inner.is_own_residual(values[i])}
        used = [i for i, x in enumerate(values) if not self._is_mixed or x not in inner.pairs or i in own]
        g_operands = {i: read(self._g, own[i]) if i in own else self._read_g(theirs.operands[i], None) for i in used}
        (f_start, f_end), (start, end) = split_loop(mine), split_loop(theirs)
        carried = [i for i in used if start <= i < end]

        def step(carry: Any, xs: Any) -> Any:
            given = {**g_operands, **carry[1], **xs[1]}
            f_inputs = [*f_operands[:f_start], *carry[0], *xs[0]]
            level = _Level(plan, f_inputs, {values[i]: x for i, x in given.items()}, self._is_mixed)
            level.differing |= {values[i] for i in own}
            level.run()
            f, g = level.read_outputs()
            f_count, count = f_end - f_start, end - start
            if self._is_mixed:
                for i in range(count, len(g)):
                    g[i], differs = level.read_own(inner.g.flat.outputs[i], g[i])
                    self.differing.update([theirs.results[i]] if differs else [])
            return (f[:f_count], {i: g[i - start] for i in carried}), (f[f_count:], g[count:], level.record())

        init = f_operands[f_start:f_end], {i: g_operands[i] for i in carried}
        xs = f_operands[f_end:], {i: g_operands[i] for i in used if i >= end}
        (f, g), made = _repeat_step(step, init, xs, mine, theirs)
        self._f.update(zip(mine.results, [*f, *made[0]], strict=True))
        results = {i - start: x for i, x in g.items()} | {end - start + i: y for i, y in enumerate(made[1])}
        self._g.update({theirs.results[i]: x for i, x in results.items()})
        self._records[id(plan)] = made[2]

    def read_outputs(self) -> tuple[list[Any], list[Any]]:
        f = [read(self._f, value) for value in self._alignment.f.flat.outputs]
        g = [self._read_g(value, None) for value in self._alignment.g.flat.outputs]
        make = lambda x: jnp.asarray(x, np.result_type(x)) if not hasattr(x, "aval") else x
        return [*map(make, f)], [*map(make, g)]

    def read_own(self, value: int | Literal, found: Any) -> tuple[Any, bool]:
        """Returns the value that a scope of `g` made for an output, and True if it differs from the one of `f`."""
        alignment, flat = self._alignment, self._alignment.g.flat
        if isinstance(value, Literal):
            return found, False
        exit, casts = flat.find_exit(value)
        if exit not in flat.makers or exit not in self._g or flat.find_origin(exit) not in alignment.pairs:
            return found, False
        own = self._g[exit]
        if own is self._f[find_partner(alignment, exit)]:
            return found, False
        for cast in casts:
            [own] = self._values.run(cast.eqn, [own])
        return own, True

    def record(self) -> Record:
        """Measures the comparisons of this run. Those of the other one are zeros."""
        rows = []
        for kind, reference, value in self._plan.comparisons:
            if (kind == "passed") == self._is_mixed:
                rows.append(jnp.zeros(len(Measured._fields), np.float32))
            else:
                found = self._f[find_partner(self._alignment, value)] if kind == "skipped" else self._g[value]
                rows.append(compare(self._f[reference], found))
        return stack(rows), [self._records[id(plan)] for plan in self._plan.loops]


def _repeat_step(step: Callable[..., Any], init: Any, xs: Any, mine: Node, theirs: Node) -> Any:
    """Runs a step in each iteration of two scans, or on each device of two `shard_map`s."""
    ours, params = mine.eqn.params, theirs.eqn.params
    if theirs.eqn.primitive.name == "scan":
        return lax.scan(step, init, xs, params["length"], reverse=params["reverse"])
    axes = split_axes(params)

    def run(*xs: Any) -> Any:
        f, g, record = step(init, xs)[1]
        return f, g, jax.tree.map(lambda leaf: leaf[None], record)

    in_specs = [*ours["in_specs"]], {i: params["in_specs"][i] for i in xs[1]}
    out_specs = [*ours["out_specs"]], [*params["out_specs"]], PartitionSpec(axes)
    # Values of `f` may vary along other mesh axes than the values of `g` that they replace.
    options = {"mesh": params["mesh"], "axis_names": set(axes), "check_vma": False}
    return init, jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, **options)(*xs)


def read(values: dict[int, Any], value: int | Literal) -> Any:
    return value.val if isinstance(value, Literal) else values[value]


class Values:
    """Runs equations. Equal ones on the same operands share their results, so that equal scopes have no error."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Sequence[Any], Sequence[Any]]] = {}

    def run(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        key = eqn.primitive, tuple(eqn.params.items()), eqn.ctx, tuple(map(_identify, operands))
        try:
            found = self._known.get(key)
        except TypeError:  # an unhashable parameter
            return _bind_rounded(eqn, operands)
        if found is None:
            found = self._known[key] = _bind_rounded(eqn, operands), operands  # which keeps the ids of the operands
        return found[0]

    def cast(self, x: Any, kind: Any) -> Any:
        """Casts `x` to the dtype of an abstract value and, on explicit mesh axes, to its sharding."""
        own, mesh = jax.typeof(x).sharding, kind.sharding.mesh
        is_explicit = AxisType.Explicit in (*own.mesh.axis_types, *mesh.axis_types)
        sharding = kind.sharding if is_explicit and not mesh.empty and own != kind.sharding else None
        if x.dtype == kind.dtype and sharding is None:
            return x
        key = "cast", id(x), kind.dtype, sharding
        if key not in self._known:
            # Code in `jax.sharding.auto_axes` makes values on another mesh than the one in context.
            with contextlib.nullcontext() if mesh.empty else jax.sharding.use_abstract_mesh(mesh):
                same = x if sharding is None else jax.sharding.reshard(x, sharding)
                same = same if x.dtype == kind.dtype else keep_rounding(lax.convert_element_type(same, kind.dtype))
            self._known[key] = [same], [x]
        return self._known[key][0][0]


def _identify(operand: Any) -> Any:
    """Identifies an array, or the bits of a constant, because 0.0 == -0.0."""
    return id(operand) if isinstance(operand, jax.Array) else (np.asarray(operand).tobytes(), np.result_type(operand))


def _bind_rounded(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    with eqn.ctx.manager:
        if eqn.primitive.name == "psum_invariant":  # which only check_vma=True knows
            return [lax.psum(operands[0], eqn.params["axes"])]
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    if eqn.primitive.name == "convert_element_type" and results.dtype.itemsize < operands[0].dtype.itemsize:
        results = keep_rounding(results)
    return results if eqn.primitive.multiple_results else [results]
