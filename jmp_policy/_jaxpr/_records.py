"""Rules that add results: what a recorder measures in a program leaves it as results after its own.

The program is copied, equation by equation, and nothing in it changes but that. `_control_flow.py` writes the same
equations for rules that change dtypes; here each passes records on, in the way that its primitive allows:

| construct | how the record leaves |
|---|---|
| jit, closed_call, remat | as extra results |
| scan | as extra ys, whose turns are rows of their own or folded |
| while | in the carry, merged turn by turn; its test is not measured |
| cond | every branch returns the rows of all branches, empty ones for the others |
| shard_map | with an axis for the devices, folded outside |
| custom_jvp, custom_vjp, kernels, a `while` that vmap gave several tests | not at all: their results are measured |

Mutable references and callbacks were no channel: the first fail under vmap, shard_map and the gradient of a remat, the
second make a training step wait for the host.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from ._program import Atom, Program, Step, body_of, list_live, name_stack, replace_variables
from ._recorder import Devices, Order, RecordedOp, Recorder, RecorderCalls


class Recorded(NamedTuple):
    """A program that returns a record after its own results.

    Attributes:
      program: the program, of the class of the old one; the old one itself where nothing is measured.
      lines: what each row is of, without the rows of arguments and results.
    """

    program: Any
    lines: tuple[RecordedOp, ...]


_RECORDED: weakref.WeakKeyDictionary[Any, dict[Any, Recorded]] = weakref.WeakKeyDictionary()


def record_program(
    program: Program, recorder: Recorder, context: Any, *, arguments: Sequence[int] = (), results: Sequence[int] = ()
) -> Recorded:
    """Makes a program return what a recorder measures in it.

    Args:
      program: the program.
      recorder: says what is measured.
      context: the context of the equation that runs the program.
      arguments: which arguments are measured too. Their rows come first.
      results: which results are. Their rows come last.

    Returns:
      The new program and its lines. The same object for the same arguments, so that JAX, too, traces and compiles one
      body once.

    >>> from ._recorder import Recorder
    >>> class Sizes(Recorder):
    ...     def enter(self, outer, eqn): return None
    ...     def choose(self, eqn, context): return range(len(eqn.outvars))
    ...     def splits(self, turns): return turns < 3
    ...     def measure(self, value): return jnp.array(value.size)
    ...     def gather(self, measured): return jnp.stack(measured)
    ...     def join(self, records): return jnp.concatenate(records)
    ...     def merge(self, one, other): return one + other
    ...     def fold(self, record, order): return jnp.sum(record, axis=0)
    ...     def empty(self, rows): return jnp.zeros(rows, int)
    >>> program = jax.make_jaxpr(lambda xs: lax.scan(lambda c, x: (c * x, -x), jnp.float32(1), xs)[1])(jnp.ones(2))
    >>> recorded = record_program(program, Sizes(), None)
    >>> [(line.step.name, line.turns) for line in recorded.lines]
    [('mul', (0,)), ('neg', (0,)), ('mul', (1,)), ('neg', (1,))]
    >>> len(recorded.program.out_avals), recorded.program.out_avals[1].shape
    (2, (4,))
    """
    return _record(program, context, RecorderCalls(recorder), tuple(arguments), tuple(results))


def _record(
    program: Program,
    context: Any,
    calls: RecorderCalls,
    arguments: tuple[int, ...] = (),
    results: tuple[int, ...] = (),
) -> Recorded:
    key = calls.recorder, calls.within, context, arguments, results
    found = _RECORDED.setdefault(program, {})
    if key not in found:
        found[key] = _Copy(context, calls).copy(program, arguments, results)
    return found[key]


class _Copy:
    """A copy of one body, in which values are measured.

    Args:
      context: the context of the equation that runs the body.
      calls: makes the equations that call the recorder.
    """

    def __init__(self, context: Any, calls: RecorderCalls):
        self._context, self._calls, self._recorder = context, calls, calls.recorder
        self._equations: list[JaxprEqn] = []
        self._records: list[list[Atom]] = []
        self._measured: list[list[Atom]] = []
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
    ) -> Recorded:
        """Copies a body.

        Args:
          program: the body.
          arguments: which arguments are measured.
          results: which results are.
          before: how many rows of other branches come first.
          after: how many come last.
          devices: whether the record gets an axis for the devices that run the body.
        """
        old = body_of(program)
        self._measure([old.invars[i] for i in arguments])
        live = set(map(id, list_live(old)))
        for eqn in old.eqns:
            if id(eqn) in live:
                self._write(eqn)
            else:  # the compiler drops it, and measuring it would make it run
                self._equations.append(eqn)
        self._measure([old.outvars[i] for i in results])
        self._gather()
        if not (self._records or before or after):
            return Recorded(program, ())
        record = self._join(before, after)
        if devices:
            record = self._call("add_axis", [record])
        new = replace_variables(program, old.invars, self._equations, [*old.outvars, *record])
        return Recorded(new, tuple(self._lines))

    def copy_turn(self, program: Program) -> Recorded:
        """Copies the body of a `while`, whose carry ends with the record of the turns before."""
        inner = _record(program, self._context, self._calls)
        if not inner.lines:
            return inner
        old, new = body_of(program), body_of(inner.program)
        count = len(old.outvars)
        self._equations = list(new.eqns)
        carry = [Var(atom.aval) for atom in new.outvars[count:]]
        merged = self._call("merge", [carry, new.outvars[count:]])
        return inner._replace(
            program=replace_variables(program, [*old.invars, *carry], self._equations, [*new.outvars[:count], *merged])
        )

    def _write(self, eqn: JaxprEqn) -> None:
        """Writes an equation, and what is measured of its results."""
        name, context = eqn.primitive.name, self._recorder.enter(self._context, eqn)
        if name in _PARAMETERS:
            self._write_call(eqn, context, _PARAMETERS[name])
        elif name in _WRITERS and not _has_several_tests(eqn):
            _WRITERS[name](self, eqn, context)
        else:
            self._equations.append(eqn)
            for i in self._recorder.choose(eqn, context):
                self._measure([eqn.outvars[i]])
                self._lines.append(RecordedOp(Step(name, eqn.invars, eqn.outvars, eqn, name_stack(eqn)), i))

    def _write_call(self, eqn: JaxprEqn, context: Any, parameter: str) -> None:
        """Writes an equation that runs the body in a parameter once."""
        inner = _record(eqn.params[parameter], context, self._calls)
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
        lines = [
            line
            for turn in (range(length) if splits else [None])
            for line in self._list_moved(inner, eqn, eqn.params["jaxpr"], turn)
        ]
        order = None if splits else "backward" if eqn.params["reverse"] else "forward"
        self._append(eqn, inner, changed, lines, axis=length, order=order)

    def _write_while(self, eqn: JaxprEqn, context: Any) -> None:
        turn = _Copy(context, self._calls).copy_turn(eqn.params["body_jaxpr"])
        if not turn.lines:
            self._equations.append(eqn)
            return
        # The test gets the record too, as an argument that it does not read.
        test, start = eqn.params["cond_jaxpr"], self._call("empty", [], len(turn.lines))
        old = body_of(test)
        unread = replace_variables(test, [*old.invars, *(Var(atom.aval) for atom in start)], old.eqns, old.outvars)
        changed = {"body_jaxpr": turn.program, "cond_jaxpr": unread}
        moved = self._list_moved(turn, eqn, eqn.params["body_jaxpr"])
        self._append(eqn.replace(invars=[*eqn.invars, *start]), turn, changed, moved)

    def _write_cond(self, eqn: JaxprEqn, context: Any) -> None:
        branches = eqn.params["branches"]
        inner = [_record(branch, context, self._calls) for branch in branches]
        counts = [len(recorded.lines) for recorded in inner]
        if not sum(counts):
            self._equations.append(eqn)
            return
        padded = []
        for i, branch in enumerate(branches):
            copy = _Copy(context, self._calls)
            padded.append(copy.copy(branch, before=sum(counts[:i]), after=sum(counts[i + 1 :])))
        lines = [
            line
            for recorded, branch in zip(inner, branches, strict=True)
            for line in self._list_moved(recorded, eqn, branch)
        ]
        self._append(eqn, padded[0], {"branches": tuple(copy.program for copy in padded)}, lines)

    def _write_shard_map(self, eqn: JaxprEqn, context: Any) -> None:
        params = eqn.params
        axes = tuple(axis for axis in params["mesh"].axis_names if axis in params["newly_manual_axes"])
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
        """Writes an equation whose body returns a record.

        Args:
          eqn: the equation as it was traced.
          inner: its body.
          changed: the parameters that change.
          lines: what its rows are of.
          axis: the length of the leading axis that the equation adds to what its body returns, if it does.
          devices: the devices over which the leading axis, of one on each, is split, if it is.
          order: what the leading axis is, if the record is folded over it.
        """
        if not lines:
            self._equations.append(eqn)
            return
        made = body_of(inner.program).outvars[len(eqn.outvars) :]
        record: list[Atom] = [Var(_add_axis(atom.aval, axis)) for atom in made]
        if devices is not None:
            record = self._calls.join_devices(made, devices)
        outvars = [*eqn.outvars, *record]
        self._equations.append(eqn.replace(outvars=outvars, params={**eqn.params, **changed}))
        self._gather()
        if order is not None:
            record = self._call("fold", [record], order)
        elif axis is not None:
            record = self._call("split", [record])
        self._records.append(record)
        self._lines += lines

    def _list_moved(self, inner: Recorded, eqn: JaxprEqn, body: Program, turn: int | None = None) -> list[RecordedOp]:
        return [line.move_out(eqn, body_of(body), turn) for line in inner.lines]

    def _measure(self, atoms: Sequence[Atom]) -> None:
        self._measured += [self._call("measure", [[atom]]) for atom in atoms]

    def _gather(self) -> None:
        """Makes one record of what was measured since the last one."""
        if self._measured:
            self._records.append(self._call("gather", self._measured))
            self._measured = []

    def _join(self, before: int, after: int) -> list[Atom]:
        """The rows of a body in one record."""
        first = [self._call("empty", [], before)] if before else []
        last = [self._call("empty", [], after)] if after else []
        records = [*first, *self._records, *last]
        return records[0] if len(records) == 1 else self._call("join", records)

    def _call(self, name: str, operands: Sequence[Sequence[Atom]], *statics: Any) -> list[Atom]:
        eqn = self._calls.call(name, operands, *statics)
        self._equations.append(eqn)
        return list(eqn.outvars)


_PARAMETERS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "eval_jaxpr": "call_jaxpr", "remat2": "jaxpr"}
"""The parameter in which an equation has the body that it runs once."""

_WRITERS = {
    "scan": _Copy._write_scan,
    "while": _Copy._write_while,
    "cond": _Copy._write_cond,
    "shard_map": _Copy._write_shard_map,
}


def _add_axis(aval: Any, length: int | None) -> Any:
    """The type of an array with another leading axis, if it gets one."""
    return aval if length is None else aval.update(shape=(length, *aval.shape))


def _count_extra(inner: Recorded, eqn: JaxprEqn) -> int:
    return len(body_of(inner.program).outvars) - len(eqn.outvars)


def _has_several_tests(eqn: JaxprEqn) -> bool:
    """Whether an equation is a loop that `vmap` made of several, which end in different turns."""
    if eqn.primitive.name != "while":
        return False
    test: Any = body_of(eqn.params["cond_jaxpr"]).outvars[0].aval
    return bool(test.shape)


def _extend_structure(structure: Any, count: int) -> Any:
    """The structure of the results of a scan with so many more ys, as JAX describes it from 0.11 on."""
    traced = jax.make_jaxpr(lambda xs: lax.scan(lambda carry, x: (carry, [-y for y in x]), (), xs))
    pattern = traced([jnp.zeros(1)] * count).eqns[-1].params["ft_out"]
    pair = type(pattern)
    carry, ys = structure.unpack()
    return pair(carry, pair(ys, pattern.unpack()[1]))


def _trace_jit() -> JaxprEqn:
    with jax.disable_jit(False):  # which a user may have set, to look for a bug
        return jax.make_jaxpr(jax.jit(lambda x: x + x))(1.0).eqns[0]


_UNSPECIFIED = {name: _trace_jit().params[name] for name in ("out_shardings", "out_layouts")}
"""What a jitted function says of a result about which the user said nothing, as tuples of one."""
