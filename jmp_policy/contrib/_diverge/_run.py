"""Runs two aligned programs side by side, or the scopes of the second one on the values of the first."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec

from ..._base import keep_rounding
from ..._jaxpr import split_axes
from ._measure import Measured, compare, stack
from ._plan import Plan, find_partner
from ._scopes import Node, Scope, split_loop

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
        """Runs all equations. One that needs a loop of the other program waits for the next sweep."""
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
            found = found if casts else self._values.cast(found, g.types[exit].dtype)
        else:
            found = self._g[exit]
        for cast in casts:
            [found] = self._values.run(cast.eqn, [found])
        return self._values.cast(found, g.types[value].dtype)  # `stop_gradient` keeps the dtype of `f`

    def _run_loop(self, scope: Scope) -> None:
        """Runs two scans in one."""
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

    def cast(self, x: Any, dtype: Any) -> Any:
        if x.dtype == dtype:
            return x
        key = "cast", id(x), dtype
        if key not in self._known:
            self._known[key] = [keep_rounding(lax.convert_element_type(x, dtype))], [x]
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
