"""The interface of a recorder, and the equations that call it."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import PartitionSpec

from .._base import PyTree, vary
from ._program import Atom, Step, name_stack
from ._source import RECORD


class RecordedOp(NamedTuple):
    """The operation of one row of a record."""

    step: Step  # the equation, and the equations around it
    result: int  # the position of the measured output
    # The iterations of the enclosing loops, outermost first, without loops whose iterations share a row.
    turns: tuple[int, ...] = ()

    def move_out(self, eqn: JaxprEqn, body: Jaxpr, iteration: int | None = None) -> "RecordedOp":
        """Returns the same operation as seen outside `eqn`, which runs it in `body`."""
        step = self.step
        scope = "/".join(filter(None, (name_stack(eqn), step.scope)))
        moved = step._replace(scope=scope, around=((eqn, body), *step.around))
        return RecordedOp(moved, self.result, self.turns if iteration is None else (iteration, *self.turns))


Order = Literal["forward", "backward", "devices"]
"""The leading axis of a record: the iterations of a loop, first to last or last to first, or devices."""


class Recorder(abc.ABC):
    """Chooses values of a jaxpr and measures them.

    A record is a tree of arrays whose first axis has a row per value. Records form a monoid: `merge` is associative,
    and `empty` is its identity. Recorders are hashable, and equal ones share jaxprs.
    """

    @abc.abstractmethod
    def enter(self, outer: Any, eqn: JaxprEqn) -> Hashable:
        """Returns the context of an equation in a sub-jaxpr whose equation has the context `outer`."""

    @abc.abstractmethod
    def choose(self, eqn: JaxprEqn, context: Any) -> Sequence[int]:
        """Returns the positions of the outputs to measure. It is not called for equations that are entered."""

    def find_twin(self, eqn: JaxprEqn, result: int) -> int | None:
        """Returns the position of an operand that has the same measurements as an output, which then shares them."""
        return None

    @abc.abstractmethod
    def splits(self, turns: int) -> bool:
        """True if each iteration of a loop of length `turns` has rows of its own."""

    @abc.abstractmethod
    def measure(self, value: Any) -> PyTree:
        """Measures one value where it is computed. All values give arrays of the same shapes."""

    @abc.abstractmethod
    def gather(self, measured: PyTree) -> PyTree:
        """Makes one record of the measurements of several values, stacked; called once per jaxpr, so compiled once."""

    @abc.abstractmethod
    def join(self, records: Sequence[PyTree]) -> PyTree:
        """Concatenates the rows of several records."""

    @abc.abstractmethod
    def merge(self, one: PyTree, other: PyTree) -> PyTree:
        """Merges two records of the same values, row by row, such as two iterations of a `while`."""

    @abc.abstractmethod
    def fold(self, record: PyTree, order: Order) -> PyTree:
        """Merges over a leading axis of iterations or devices."""

    @abc.abstractmethod
    def empty(self, rows: int) -> PyTree:
        """Returns the record of values that were never computed."""


def is_recorded(eqn: JaxprEqn) -> bool:
    """True if an equation belongs to a recorder's measurements."""
    return RECORD in name_stack(eqn)


class Devices(NamedTuple):
    """The manual mesh axes of a `shard_map`, and its `check_vma`."""

    mesh: Any
    axes: tuple[str, ...]
    checks: bool

    def map(self, fun: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """Maps a function of replicated arrays. Its outputs get a leading axis for the devices."""

        def run(*args: Any) -> PyTree:
            return jax.tree.map(lambda leaf: vary(leaf[None], self.axes), fun(*args))

        specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(self.axes)}
        return jax.shard_map(run, mesh=self.mesh, axis_names=set(self.axes), check_vma=self.checks, **specs)


@dataclasses.dataclass(frozen=True)
class RecorderCalls:
    """Makes equations that call a recorder inside the shard_maps `within`, by jitted functions that they share."""

    recorder: Recorder
    within: tuple[Devices, ...] = ()
    _templates: dict[Any, JaxprEqn] = dataclasses.field(default_factory=dict, compare=False)

    def enter(self, devices: Devices) -> "RecorderCalls":
        """Returns the same for equations inside one more shard_map."""
        return RecorderCalls(self.recorder, (*self.within, devices), self._templates)

    def call(self, name: str, operands: Sequence[Sequence[Atom]], *statics: Any) -> JaxprEqn:
        """Makes an equation that calls a method of the recorder, or `"split"` or `"add_axis"`."""
        types = tuple([tuple([_read_manual_type(atom) for atom in atoms]) for atoms in operands])
        key = name, statics, types, self.within
        if key not in self._templates:
            unchecked = tuple(axis for devices in self.within if not devices.checks for axis in devices.axes)
            function = _make_function(self.recorder, name, statics, unchecked)
            self._templates[key] = self._trace_call(function, types)
        template = self._templates[key]
        outvars = [Var(var.aval) for var in template.outvars]
        return template.replace(invars=[atom for atoms in operands for atom in atoms], outvars=outvars)

    def join_devices(self, atoms: Sequence[Atom], devices: Devices) -> list[Atom]:
        """Makes variables outside a shard_map for values inside it, with a leading axis for the devices."""
        types = [_read_manual_type(atom) for atom in atoms]
        # Inside another shard_map, the values vary along its axes too.
        make = devices.map(lambda: [vary(jnp.zeros(kind.shape[1:], kind.dtype), kind.varying) for kind in types])
        mapped = next(eqn for eqn in self._trace(make) if eqn.primitive.name == "shard_map")
        return [Var(var.aval) for var in mapped.outvars]

    def _trace_call(self, function: Callable[..., list[Any]], types: Any) -> JaxprEqn:
        def call(*groups: list[Any]) -> list[Any]:
            pairs = [zip(group, kinds, strict=True) for group, kinds in zip(groups, types, strict=True)]
            return function(*[[_give_type(value, kind) for value, kind in pair] for pair in pairs])

        shapes = [[jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in kinds] for kinds in types]
        equations = self._trace(call, *shapes)
        [found] = [eqn for eqn in equations if eqn.params.get("name") == function.__name__]
        return found

    def _trace(self, fun: Callable[..., Any], *shapes: Any) -> list[JaxprEqn]:
        """Traces a function inside the shard_maps, and returns its equations."""
        for devices in reversed(self.within):
            fun = devices.map(fun)
        with jax.disable_jit(False):  # which a user may have set while debugging
            program = jax.make_jaxpr(fun)(*shapes).jaxpr
        for _ in self.within:
            program = next(eqn.params["jaxpr"] for eqn in program.eqns if eqn.primitive.name == "shard_map")
        return program.eqns


class _Type(NamedTuple):
    """Type of an array, with the manual mesh axes over which it is varying, reduced or unreduced."""

    shape: tuple[int, ...]
    dtype: Any
    varying: tuple[str, ...]
    reduced: tuple[str, ...]
    unreduced: tuple[str, ...]
    spec: PartitionSpec | None


def _read_manual_type(atom: Atom) -> _Type:
    aval: Any = atom.aval
    kind, sharding = aval.manual_axis_type, aval.sharding
    varying, reduced, unreduced = (tuple(sorted(axes)) for axes in (kind.varying, kind.reduced, kind.unreduced))
    spec = sharding.spec if _is_partly_manual(sharding.mesh) else None
    return _Type(aval.shape, aval.dtype, varying, reduced, unreduced, spec)


def _is_partly_manual(mesh: Any) -> bool:
    """True inside a `shard_map` that leaves some mesh axes explicit."""
    return bool(mesh.manual_axes and mesh.explicit_axes)


def _give_type(value: jax.Array, kind: _Type) -> jax.Array:
    if kind.spec is not None:
        value = jax.sharding.reshard(value, kind.spec)
    value = lax.pcast(vary(value, (*kind.varying, *kind.unreduced)), kind.reduced, to="reduced")
    return lax.pcast(value, kind.unreduced, to="unreduced")


def _drop_type(value: jax.Array) -> jax.Array:
    """Turns an array that is reduced or unreduced over manual mesh axes into one that every op accepts."""
    kind = jax.typeof(value).manual_axis_type
    value = lax.pcast(value, tuple(kind.reduced), to="varying")
    return lax.psum(value, tuple(kind.unreduced)) if kind.unreduced else value


@functools.lru_cache(maxsize=1024)
def _make_function(
    recorder: Recorder, name: str, statics: tuple[Any, ...], unchecked: tuple[str, ...]
) -> Callable[..., list[Any]]:
    """Makes a jitted function of leaves that calls a recorder. JAX caches its jaxprs by shape and mesh."""

    def record(*operands: list[Any]) -> list[Any]:
        mesh = jax.sharding.get_abstract_mesh()
        run: Any = lambda *operands: _run(recorder, name, operands, statics)
        if _is_partly_manual(mesh):  # explicit axes would restrict the ops of the recorder
            run = jax.sharding.auto_axes(run, axes=mesh.explicit_axes, out_sharding=PartitionSpec())
        with jax.named_scope(RECORD):
            # Branches and iterations must return records of one type. An axis of a shard_map with check_vma=False
            # would stay in the types of its outputs.
            axes = [axis for axis in mesh.manual_axes if axis not in unchecked]
            return [vary(leaf, axes) for leaf in run(*jax.tree.map(_drop_type, operands))]

    record.__name__ = f"{RECORD}_{name}"
    return jax.jit(record)


def _run(recorder: Recorder, name: str, operands: Sequence[list[Any]], statics: tuple[Any, ...]) -> list[Any]:
    if name == "measure":  # as rows, in the function that all values of a type share
        return [jnp.expand_dims(leaf, 0) for leaf in jax.tree.leaves(recorder.measure(*operands[0]))]
    if name == "split":
        return [leaf.reshape(-1, *leaf.shape[2:]) for leaf in operands[0]]
    if name == "add_axis":
        return [leaf[None] for leaf in operands[0]]
    if name == "gather":
        rows = [lax.concatenate(column, 0) for column in zip(*operands, strict=True)]
        return jax.tree.leaves(recorder.gather(jax.tree.unflatten(_find_structure(recorder), rows)))
    structure = jax.tree.structure(recorder.empty(1))
    records = [jax.tree.unflatten(structure, operand) for operand in operands]
    if name == "join":
        return jax.tree.leaves(recorder.join(records))
    return jax.tree.leaves(getattr(recorder, name)(*records, *statics))


@functools.lru_cache(maxsize=1024)
def _find_structure(recorder: Recorder) -> Any:
    return jax.tree.structure(jax.eval_shape(recorder.measure, jax.ShapeDtypeStruct((), np.float32)))
