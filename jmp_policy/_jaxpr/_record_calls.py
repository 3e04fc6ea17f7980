"""Equations that call a recorder. Each is traced once per program, with the types of the values that it reads."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var
from jax.sharding import PartitionSpec

from .._base import PyTree
from .._base.mesh import vary, vary_everywhere
from ._module_paths import RECORD
from ._program import Atom
from ._recorder import Recorder


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
        # Around another shard_map, the values vary along its axes too.
        make = devices.map(lambda: [vary(jnp.zeros(kind.shape[1:], kind.dtype), kind.varying) for kind in kinds])
        mapped = next(eqn for eqn in self._trace(make) if eqn.primitive.name == "shard_map")
        return [Var(var.aval) for var in mapped.outvars]

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
