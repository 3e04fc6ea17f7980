"""What a recorder measures of a program, and the equations that call it."""

import abc
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec

from .._base import PyTree, vary, vary_everywhere
from ._program import Atom, Step, name_stack
from ._source import RECORD


class RecordedOp(NamedTuple):
    """What one row of a record is of.

    Attributes:
      step: the equation, and what is around it.
      result: which of its results was measured.
      turns: the turns of the loops around it, outermost first, without the loops whose turns are one row together.
    """

    step: Step
    result: int
    turns: tuple[int, ...] = ()

    def move_out(self, eqn: JaxprEqn, body: Jaxpr, turn: int | None = None) -> "RecordedOp":
        """The same line, seen from the program in which an equation runs the body that it is in.

        Args:
          eqn: the equation.
          body: its body.
          turn: the turn of the loop, if each has rows of its own.
        """
        step = self.step
        scope = "/".join(filter(None, (name_stack(eqn), step.scope)))
        moved = step._replace(scope=scope, around=((eqn, body), *step.around))
        return RecordedOp(moved, self.result, self.turns if turn is None else (turn, *self.turns))


Order = Literal["forward", "backward", "devices"]
"""What a leading axis of a record is: the turns of a loop that runs from first to last or from last to first, or
devices, which run together."""


class Recorder(abc.ABC):
    """Says which values of a program are measured, and what of them.

    A record is a tree of arrays, whose first axis has a row for each value. Records form a monoid: `merge` is
    associative, and `empty` changes nothing. Recorders are hashable, and equal ones share the programs that they are
    in.

    >>> import jax.numpy as jnp
    >>> class Maxima(Recorder):  # the largest number of each result of a matmul
    ...     def enter(self, outer, eqn): return None
    ...     def choose(self, eqn, context): return [0] if eqn.primitive.name == "dot_general" else []
    ...     def splits(self, turns): return False
    ...     def measure(self, value): return jnp.max(value)
    ...     def gather(self, measured): return jnp.stack(measured)
    ...     def join(self, records): return jnp.concatenate(records)
    ...     def merge(self, one, other): return jnp.maximum(one, other)
    ...     def fold(self, record, order): return jnp.max(record, axis=0)
    ...     def empty(self, rows): return jnp.full(rows, -jnp.inf)
    >>> Maxima().join([Maxima().gather([Maxima().measure(jnp.ones(2))]), Maxima().empty(1)]).tolist()
    [1.0, -inf]
    """

    @abc.abstractmethod
    def enter(self, outer: Any, eqn: JaxprEqn) -> Hashable:
        """The context of an equation in a body whose equation has the context `outer`."""

    @abc.abstractmethod
    def choose(self, eqn: JaxprEqn, context: Any) -> Sequence[int]:
        """Which results of an equation are measured. Of one that runs programs that are entered, none ever is."""

    @abc.abstractmethod
    def splits(self, turns: int) -> bool:
        """Whether each turn of a loop of so many has rows of its own."""

    @abc.abstractmethod
    def measure(self, value: Any) -> PyTree:
        """What is measured of one value where it is made: a tree of arrays of the same shapes for all values."""

    @abc.abstractmethod
    def gather(self, measured: Sequence[PyTree]) -> PyTree:
        """The record of what was measured of several values, a row for each.

        This is done once for all values of a body, so that what it does is compiled once.
        """

    @abc.abstractmethod
    def join(self, records: Sequence[PyTree]) -> PyTree:
        """The rows of several records, one after the other."""

    @abc.abstractmethod
    def merge(self, one: PyTree, other: PyTree) -> PyTree:
        """What two records of the same values are together, row by row: that of some turns of a `while`, and of the
        next turn."""

    @abc.abstractmethod
    def fold(self, record: PyTree, order: Order) -> PyTree:
        """Merges over a leading axis: the turns of a loop, or devices."""

    @abc.abstractmethod
    def empty(self, rows: int) -> PyTree:
        """The record of values that were never made."""


def is_recorded(eqn: JaxprEqn) -> bool:
    """Whether an equation is part of what a recorder measures, and not of the user's program."""
    return RECORD in name_stack(eqn)


class Devices(NamedTuple):
    """The mesh axes that a `shard_map` maps over.

    Attributes:
      mesh: its mesh.
      axes: the axes that it makes manual.
      checks: its `check_vma`: whether types say along which axes a value varies.

    >>> Devices(jax.make_mesh((1,), ("data",)), ("data",), True).map(jnp.sin)(jnp.zeros(2)).shape
    (1, 2)
    """

    mesh: Any
    axes: tuple[str, ...]
    checks: bool

    def map(self, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Maps a function of replicated arrays. Its outputs get a leading axis for the devices."""

        def run(*args: Any) -> PyTree:
            return jax.tree.map(lambda leaf: vary(leaf[None], self.axes), fun(*args))

        specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(self.axes)}
        return jax.shard_map(run, mesh=self.mesh, axis_names=set(self.axes), check_vma=self.checks, **specs)


class RecorderCalls:
    """Makes equations that call a recorder through a jitted function, which calls with equal types share.

    Inlined, each call would be a hundred equations, and shard_map would check along which axes each of their constants
    varies.

    Attributes:
      recorder: the recorder.
      within: the shard_maps around the equations, outermost first.
    """

    def __init__(self, recorder: Recorder):
        self.recorder, self.within = recorder, tuple[Devices, ...]()
        self._templates: dict[Any, JaxprEqn] = {}

    def enter(self, devices: Devices) -> "RecorderCalls":
        """Returns the same for equations inside one more shard_map."""
        inner = RecorderCalls(self.recorder)
        inner.within, inner._templates = (*self.within, devices), self._templates
        return inner

    def call(self, name: str, operands: Sequence[Sequence[Atom]], *statics: Any) -> JaxprEqn:
        """Makes an equation that calls a method of the recorder, or `"split"` or `"add_axis"`."""
        types = tuple([tuple([_read_type(atom) for atom in atoms]) for atoms in operands])
        key = name, statics, types, self.within
        if key not in self._templates:
            function = _make_function(self.recorder, name, statics)
            self._templates[key] = self._trace_call(function, types)
        template = self._templates[key]
        outvars = [Var(var.aval) for var in template.outvars]
        return template.replace(invars=[atom for atoms in operands for atom in atoms], outvars=outvars)

    def join_devices(self, atoms: Sequence[Atom], devices: Devices) -> list[Atom]:
        """Makes the variables outside a shard_map for values inside it whose leading axis is that of the devices."""
        kinds = [_read_type(atom) for atom in atoms]
        make = devices.map(lambda: [jnp.zeros(kind.shape[1:], kind.dtype) for kind in kinds])
        return [Var(var.aval) for var in self._trace(make)[-1].outvars]

    def _trace_call(self, function: Callable[..., list[Any]], types: Any) -> JaxprEqn:
        def call(*groups: list[Any]) -> list[Any]:
            pairs = [zip(group, kinds, strict=True) for group, kinds in zip(groups, types, strict=True)]
            return function(*[[vary(value, kind.varying) for value, kind in pair] for pair in pairs])

        shapes = [[jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds] for kinds in types]
        equations = self._trace(call, *shapes)
        [found] = [eqn for eqn in equations if eqn.params.get("name") == function.__name__]
        return found

    def _trace(self, fun: Callable[..., Any], *shapes: Any) -> list[JaxprEqn]:
        """Returns the equations of a function that is traced inside the shard_maps."""
        for devices in reversed(self.within):
            fun = devices.map(fun)
        with jax.disable_jit(False):  # which a user may have set, to look for a bug
            program = jax.make_jaxpr(fun)(*shapes).jaxpr
        for _ in self.within:
            program = next(eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map")
        return program.eqns


class _Type(NamedTuple):
    """Part of the type of an array. It varies along the manual axes `varying`."""

    shape: tuple[int, ...]
    dtype: Any
    varying: tuple[str, ...]


def _read_type(atom: Atom) -> _Type:
    aval: Any = atom.aval
    return _Type(aval.shape, aval.dtype, tuple(sorted(aval.manual_axis_type.varying)))


@functools.lru_cache(maxsize=1024)
def _make_function(recorder: Recorder, name: str, statics: tuple[Any, ...]) -> Callable[..., list[Any]]:
    """Makes a jitted function of the leaves of values or records that calls a recorder.

    JAX caches its jaxprs by shape and by the context they depend on, such as a mesh.
    """

    def record(*operands: list[Any]) -> list[Any]:
        with jax.named_scope(RECORD):
            # Branches and loops need records of one type.
            return vary_everywhere(_run(recorder, name, operands, statics))

    record.__name__ = f"{RECORD}_{name}"
    return jax.jit(record)


def _run(recorder: Recorder, name: str, operands: Sequence[list[Any]], statics: tuple[Any, ...]) -> list[Any]:
    if name == "measure":
        return jax.tree.leaves(recorder.measure(*operands[0]))
    if name == "split":
        return [leaf.reshape(-1, *leaf.shape[2:]) for leaf in operands[0]]
    if name == "add_axis":
        return [leaf[None] for leaf in operands[0]]
    example = recorder.measure(jnp.float32(0)) if name == "gather" else recorder.empty(1)
    records = [jax.tree.unflatten(jax.tree.structure(example), operand) for operand in operands]
    if name in ("gather", "join"):
        return jax.tree.leaves(getattr(recorder, name)(records))
    return jax.tree.leaves(getattr(recorder, name)(*records, *statics))
