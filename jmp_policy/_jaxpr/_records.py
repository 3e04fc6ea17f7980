"""Copies a jaxpr with a recorder, which measures values and returns a record after the outputs.

The copy has the same equations. The record leaves each construct as its primitive allows:

| construct | how the record leaves |
|---|---|
| jit, closed_call, remat | as extra outputs, measurements ungathered: the jaxpr around gathers them with its own |
| scan | as extra ys, with a row per iteration or folded |
| while | in the carry, merged in each iteration; the condition is not measured |
| cond | each branch returns the rows of all branches, empty ones for the others |
| shard_map | with an axis for the devices, folded outside |
| custom rules, kernels, a `while` that vmap gave several conditions | not at all: their outputs are measured |

Mutable references do not work here: they fail under vmap, shard_map and the gradient of a remat. Callbacks would make a
training step wait for the host.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from ._evaluate import trace_jit
from ._primitives import CALLED
from ._program import (
    Atom,
    Program,
    Step,
    body_of,
    list_live,
    name_stack,
    remember_by_jaxpr,
    replace_variables,
    split_axes,
)
from ._recorder import Devices, Order, RecordedOp, Recorder, RecorderCalls


class Recorded(NamedTuple):
    """A jaxpr that returns a record after its outputs."""

    program: Any  # the new jaxpr, of the class of the old one; the old one itself if nothing is measured
    lines: tuple[RecordedOp, ...]  # the recorded operation of each row, without the rows of arguments and outputs
    parts: tuple["_Part", ...] = ()  # of a jaxpr that does not gather its measurements


class _Part(NamedTuple):
    """Arrays of one row that was measured, or of a record."""

    is_measured: bool
    atoms: list[Atom]


def record_program(
    program: Program, recorder: Recorder, context: Any, *, arguments: Sequence[int] = (), results: Sequence[int] = ()
) -> Recorded:
    """Makes a jaxpr return the measurements of a recorder, first of `arguments` and last of `results`, in a new output.

    `context` belongs to the equation that runs the jaxpr. Equal arguments give the same jaxpr, which JAX traces once.
    """
    return _record(program, context, RecorderCalls(recorder), tuple(arguments), tuple(results))


def _record(program: Program, context: Any, calls: RecorderCalls, *ends: Any, gathers: bool = True) -> Recorded:
    return _make_copy(program, context, calls, ends, gathers) or Recorded(program, ())


@remember_by_jaxpr  # else the time doubles with each level of nested branches
def _make_copy(program: Program, context: Any, calls: RecorderCalls, ends: Any, gathers: bool) -> Recorded | None:
    copy = _Copy(context, calls).copy(program, *ends, gathers=gathers)
    return None if copy.program is program else copy  # the result would keep the jaxpr alive


class _Copy:
    """A copy of one jaxpr in which values are measured. `context` belongs to the equation that runs it."""

    def __init__(self, context: Any, calls: RecorderCalls):
        self._context, self._calls, self._recorder = context, calls, calls.recorder
        self._equations: list[JaxprEqn] = []
        self._parts: list[_Part] = []
        self._measured: dict[int, list[Atom]] = {}
        self._twins: dict[int, Atom] = {}  # by the id of a value, an earlier one that has the same measurements
        self._lines: list[RecordedOp] = []

    def copy(
        self,
        program: Program,
        arguments: Sequence[int] = (),
        results: Sequence[int] = (),
        *,
        before: int = 0,
        after: int = 0,
        devices: bool = False,
        gathers: bool = True,
    ) -> Recorded:
        """Copies a jaxpr, and measures some of its arguments and outputs. `devices` adds a leading axis.

        The record starts with `before` and ends with `after` empty rows, for the other branches of a cond.
        """
        old = body_of(program)
        self._measure([old.invars[i] for i in arguments])
        live = set(map(id, list_live(old)))
        for eqn in old.eqns:
            if id(eqn) in live:
                self._write(eqn)
            else:  # the compiler drops an unused equation; a measurement would keep it
                self._equations.append(eqn)
        self._measure([old.outvars[i] for i in results])
        if not (self._parts or before or after):
            return Recorded(program, ())
        if not gathers:
            made = [atom for part in self._parts for atom in part.atoms]
            new = replace_variables(program, old.invars, self._equations, [*old.outvars, *made])
            return Recorded(new, tuple(self._lines), tuple(self._parts))
        first = [self._call("empty", [], before)] if before else []
        last = [self._call("empty", [], after)] if after else []
        records = [*first, *self._gather(), *last]
        record = records[0] if len(records) == 1 else self._call("join", records)
        if devices:
            record = self._call("add_axis", [record])
        new = replace_variables(program, old.invars, self._equations, [*old.outvars, *record])
        return Recorded(new, tuple(self._lines))

    def copy_iteration(self, program: Program) -> Recorded:
        """Copies the body of a `while`, with the record of earlier iterations at the end of the carry."""
        inner = _record(program, self._context, self._calls)
        if not inner.lines:
            return inner
        old, new = body_of(program), body_of(inner.program)
        count = len(old.outvars)
        self._equations = list(new.eqns)
        carry = [Var(atom.aval) for atom in new.outvars[count:]]
        merged = self._call("merge", [carry, new.outvars[count:]])
        outvars = [*new.outvars[:count], *merged]
        return inner._replace(program=replace_variables(program, [*old.invars, *carry], self._equations, outvars))

    def _write(self, eqn: JaxprEqn) -> None:
        """Writes an equation, and measures its outputs."""
        name, context = eqn.primitive.name, self._recorder.enter(self._context, eqn)
        if name in _WRITERS and not _has_several_conditions(eqn):
            _WRITERS[name](self, eqn, context)
        else:
            self._equations.append(eqn)
            for i, var in enumerate(eqn.outvars):
                twin = self._recorder.find_twin(eqn, i)
                if twin is not None:
                    self._twins[id(var)] = self._twins.get(id(eqn.invars[twin]), eqn.invars[twin])
            for i in self._recorder.choose(eqn, context):
                self._measure([eqn.outvars[i]])
                self._lines.append(RecordedOp(Step(name, eqn.invars, eqn.outvars, eqn, name_stack(eqn)), i))

    def _write_call(self, eqn: JaxprEqn, context: Any) -> None:
        parameter = CALLED[eqn.primitive.name]
        inner = _record(eqn.params[parameter], context, self._calls, gathers=False)
        changed = {parameter: inner.program}
        extra = _count_extra(inner, eqn)
        if eqn.primitive.name == "jit":
            changed |= {name: eqn.params[name] + _UNSPECIFIED[name] * extra for name in _UNSPECIFIED}
        self._append(eqn, inner, changed, self._list_moved(inner, eqn, eqn.params[parameter]))

    def _write_scan(self, eqn: JaxprEqn, context: Any) -> None:
        inner = _record(eqn.params["jaxpr"], context, self._calls)
        length, extra = eqn.params["length"], _count_extra(inner, eqn)
        changed = {"jaxpr": inner.program}
        if extra and "ft_out" in eqn.params:
            changed["ft_out"] = _extend_structure(eqn.params["ft_out"], extra)
        splits = self._recorder.splits(length)
        iterations = range(length) if splits else [None]
        lines = [line for i in iterations for line in self._list_moved(inner, eqn, eqn.params["jaxpr"], i)]
        order = None if splits else "backward" if eqn.params["reverse"] else "forward"
        self._append(eqn, inner, changed, lines, axis=length, order=order)

    def _write_while(self, eqn: JaxprEqn, context: Any) -> None:
        iteration = _Copy(context, self._calls).copy_iteration(eqn.params["body_jaxpr"])
        if not iteration.lines:
            self._equations.append(eqn)
            return
        # The condition gets the record, too, as an argument that it does not read.
        test, start = eqn.params["cond_jaxpr"], self._call("empty", [], len(iteration.lines))
        old = body_of(test)
        unread = replace_variables(test, [*old.invars, *(Var(atom.aval) for atom in start)], old.eqns, old.outvars)
        changed = {"body_jaxpr": iteration.program, "cond_jaxpr": unread}
        moved = self._list_moved(iteration, eqn, eqn.params["body_jaxpr"])
        self._append(eqn.replace(invars=[*eqn.invars, *start]), iteration, changed, moved)

    def _write_cond(self, eqn: JaxprEqn, context: Any) -> None:
        branches = eqn.params["branches"]
        inner = [_record(branch, context, self._calls) for branch in branches]
        counts = [len(recorded.lines) for recorded in inner]
        if not sum(counts):
            self._equations.append(eqn)
            return
        padded = [
            _Copy(context, self._calls).copy(branch, before=sum(counts[:i]), after=sum(counts[i + 1 :]))
            for i, branch in enumerate(branches)
        ]
        pairs = zip(inner, branches, strict=True)
        lines = [line for recorded, branch in pairs for line in self._list_moved(recorded, eqn, branch)]
        self._append(eqn, padded[0], {"branches": tuple(copy.program for copy in padded)}, lines)

    def _write_shard_map(self, eqn: JaxprEqn, context: Any) -> None:
        params = eqn.params
        axes = split_axes(params)
        devices = Devices(params["mesh"], axes, params["check_vma"])
        inner = _Copy(context, self._calls.enter(devices)).copy(params["jaxpr"], devices=True)
        extra = _count_extra(inner, eqn)
        changed = {"jaxpr": inner.program, "out_specs": params["out_specs"] + (PartitionSpec(axes),) * extra}
        lines = self._list_moved(inner, eqn, params["jaxpr"])
        self._append(eqn, inner, changed, lines, devices=devices, order="devices")

    def _append(
        self,
        eqn: JaxprEqn,
        inner: Recorded,
        changed: dict[str, Any],
        lines: Sequence[RecordedOp],
        *,
        axis: int | None = None,
        devices: Devices | None = None,
        order: Order | None = None,
    ) -> None:
        """Writes an equation whose sub-jaxpr `inner` returns a record with the rows `lines`, or its parts.

        Its leading axis, of length `axis` or for `devices`, is folded if `order` is given, else split into rows.
        """
        if not lines:
            self._equations.append(eqn)
            return
        made = body_of(inner.program).outvars[len(eqn.outvars) :]
        types: list[Any] = [atom.aval for atom in made]
        record: list[Atom] = [Var(kind if axis is None else kind.update(shape=(axis, *kind.shape))) for kind in types]
        if devices is not None:
            record = self._calls.join_devices(made, devices)
        outvars = [*eqn.outvars, *record]
        self._equations.append(eqn.replace(outvars=outvars, params={**eqn.params, **changed}))
        if order is not None:
            record = self._call("fold", [record], order)
        elif axis is not None:
            record = self._call("split", [record])
        atoms, whole = iter(record), _Part(False, record)
        for part in inner.parts or (whole,):
            self._parts.append(_Part(part.is_measured, list(itertools.islice(atoms, len(part.atoms)))))
        self._lines += lines

    def _list_moved(self, inner: Recorded, eqn: JaxprEqn, body: Program, i: int | None = None) -> list[RecordedOp]:
        return [line.move_out(eqn, body_of(body), i) for line in inner.lines]

    def _measure(self, atoms: Sequence[Atom]) -> None:
        for atom in atoms:
            first = id(self._twins.get(id(atom), atom))
            if first not in self._measured:
                self._measured[first] = self._call("measure", [[atom]])
            self._parts.append(_Part(True, self._measured[first]))

    def _gather(self) -> list[list[Atom]]:
        """Returns records. Measurements that follow each other become one record."""
        records = []
        for is_measured, parts in itertools.groupby(self._parts, lambda part: part.is_measured):
            atoms = [part.atoms for part in parts]
            records += [self._call("gather", atoms)] if is_measured else atoms
        return records

    def _call(self, name: str, operands: Sequence[Sequence[Atom]], *statics: Any) -> list[Atom]:
        eqn = self._calls.call(name, operands, *statics)
        self._equations.append(eqn)
        return list(eqn.outvars)


_WRITERS = {
    **dict.fromkeys(CALLED, _Copy._write_call),
    "scan": _Copy._write_scan,
    "while": _Copy._write_while,
    "cond": _Copy._write_cond,
    "shard_map": _Copy._write_shard_map,
}


def _count_extra(inner: Recorded, eqn: JaxprEqn) -> int:
    return len(body_of(inner.program).outvars) - len(eqn.outvars)


def _has_several_conditions(eqn: JaxprEqn) -> bool:
    """True for a `while` that `vmap` made of several, which stop after different numbers of iterations."""
    if eqn.primitive.name != "while":
        return False
    condition: Any = body_of(eqn.params["cond_jaxpr"]).outvars[0].aval
    return bool(condition.shape)


def _extend_structure(structure: Any, count: int) -> Any:
    """Adds `count` ys to the structure of a scan's outputs, a parameter from JAX 0.11 on."""
    traced = jax.make_jaxpr(lambda xs: lax.scan(lambda carry, x: (carry, [-y for y in x]), (), xs))
    pattern = traced([jnp.zeros(1)] * count).eqns[-1].params["ft_out"]
    pair = type(pattern)
    carry, ys = structure.unpack()
    return pair(carry, pair(ys, pattern.unpack()[1]))


_UNSPECIFIED = {name: trace_jit().params[name] for name in ("out_shardings", "out_layouts")}
"""The parameters of `jit` for one output without a sharding or layout."""
