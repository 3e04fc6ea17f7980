"""`numerics.collectives`: traces and partitions a program, and counts its collectives."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from .._base import TRACING, Results, describe, flatten_function, hide_frames
from .._jaxpr import ModulePaths, Register, check_function, find_direction, keep_changes, walk
from ._collectives_report import Collective, Collectives
from ._hlo import make_unique, parse_module, partition
from ._partitioned import read_module
from ._traced import read_program


def collectives(fun: Callable[..., Any], *, compiled: bool | None = None) -> Callable[..., Collectives]:
    """Lists the collectives between the devices of a mesh: kind, dtype, mesh axes, bytes and source line.

    Nothing runs. The function is traced and compiled for its mesh, and the output of XLA's SPMD partitioner for one
    device is read. It has the collectives of `shard_map` and those that XLA inserts. Later passes are not included:
    they combine small collectives, CPUs upcast half-precision ones, and GPUs and TPUs turn an all-reduce into a
    reduce-scatter if each device keeps only a part. A TPU partitioner may turn a matmul and its collective into a ring
    of permutes, whose partial sums are not recognized as gradients.

    With `compiled=False`, or on an `AbstractMesh`, only the collectives of `shard_map` are read from the jaxpr, in
    seconds for thousands of devices that need not exist. Arrays in a `shard_map` with auto axes (`axis_names`) then
    count as if those axes had size 1.

    Iterations of a loop are counted, and every branch of a `cond`. A loop with an unknown trip count, as of a `while`,
    counts as one iteration, and the report names its line. Gradient sums are recognized by their name stack and by the
    ops that read the result. This is wrong for parameters that are normalized by their own sums, and for backward
    passes written without `jax.grad`.

    With a persistent compilation cache, JAX stores each compiled program like any other.

    Args:
      fun: any function of trees of arrays, jitted or not. Only arrays in its output count.
      compiled: whether to compile; by default if the mesh has devices.

    Returns:
      A function of the same arguments that returns `Collectives`. Arguments may be arrays or `jax.ShapeDtypeStruct`s
      with shardings.

    Raises:
      TypeError: `fun` is not a function.
      ValueError: the mesh has no devices, but the program is to be compiled or has no explicit collectives.
      RuntimeError: the compiler does not dump the program.

    >>> import jax, jax.numpy as jnp, jmp_policy as jmp
    >>> from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
    >>> mesh = AbstractMesh((4096,), ("data",))
    >>> total = jax.shard_map(lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data"), mesh=mesh, in_specs=P("data"),
    ...                       out_specs=P())
    >>> x = jax.ShapeDtypeStruct((8192, 5), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    >>> [row] = jmp.numerics.collectives(total)(x).rows
    >>> row.kind, row.dtype, row.axes, row.devices, row.shape, row.count, row.bytes
    ('all-reduce', 'bfloat16', ('data',), 4096, (2, 5), 1, 20)
    """
    check_function(fun, "collectives")
    if compiled is not None and not isinstance(compiled, bool):
        raise TypeError(f"compiled is True, False or None, got {describe(compiled)}. For example: compiled=False.")

    @hide_frames
    @functools.wraps(fun)
    def find_collectives(*args: Any, **kwargs: Any) -> Collectives:
        register, results = Register(), Results()
        flat, arrays, _ = flatten_function(register.watch(results.take_arrays(keep_changes(fun))), args, kwargs)
        unique = make_unique(flat, getattr(fun, "__name__", ""))
        with TRACING(register.take_token()):
            traced = jax.jit(unique).trace(*arrays)
            program = traced.jaxpr.jaxpr
            meshes, paths = find_meshes(program, arrays), ModulePaths(register.list_modules())
            find_place = functools.cache(lambda stack: (paths.read_stack(stack), find_direction(stack)))
            compiles = meshes.devices > 1 and _decide_compiling(compiled, meshes)
            if compiles:
                shapes = [mesh.shape for mesh in meshes.concrete]
                rows, loops = read_module(parse_module(partition(traced.lower())), shapes, meshes.devices, find_place)
            else:
                rows, loops = read_program(program, find_place) if meshes.devices > 1 else ([], [])
                _check_abstract(rows, meshes, compiled)
        register.release_token(program)
        return Collectives(_add_up(rows), meshes.devices, meshes.axes, compiles, tuple(loops))

    return find_collectives


class _Meshes(NamedTuple):
    """Meshes of more than one device. `abstract` has those without a concrete mesh of the same shape."""

    concrete: tuple[Mesh, ...]
    abstract: tuple[AbstractMesh, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for mesh in (*self.concrete, *self.abstract) for axis in mesh.axis_names))

    @property
    def devices(self) -> int:
        return max((mesh.size for mesh in (*self.concrete, *self.abstract)), default=1)


def find_meshes(program: Jaxpr, arguments: Iterable[Any]) -> _Meshes:
    """Finds the meshes of the arguments, the shard_maps and the sharding constraints of a jaxpr."""
    shardings = [getattr(argument, "sharding", None) for argument in arguments]
    for eqn in {id(step.eqn): step.eqn for step in walk(program)}.values():
        shardings += [value for name in _MESH_PARAMETERS for value in jax.tree.leaves(eqn.params.get(name))]
    shardings += [getattr(var.aval, "sharding", None) for var in program.invars]  # of an explicit mesh
    shardings.append(jax.sharding.get_abstract_mesh())
    found = [value.mesh if isinstance(value, NamedSharding) else value for value in shardings]
    large = dict.fromkeys(mesh for mesh in found if isinstance(mesh, Mesh | AbstractMesh) and mesh.size > 1)
    concrete = [mesh for mesh in large if isinstance(mesh, Mesh)]
    shapes = [dict(mesh.shape) for mesh in concrete]
    abstract = [mesh for mesh in large if isinstance(mesh, AbstractMesh) and dict(mesh.shape) not in shapes]
    return _Meshes(tuple(concrete), tuple(abstract))


_MESH_PARAMETERS = ("mesh", "ctx_mesh", "sharding", "in_shardings", "out_shardings", "dst_sharding")


def _decide_compiling(compiled: bool | None, meshes: _Meshes) -> bool:
    if compiled and not meshes.concrete:
        raise ValueError(
            f"compiled=True needs devices, but {_describe_mesh(meshes)} has none. Without it, the collectives in "
            "shard_map are read from the jaxpr. For example: collectives(fun)(*args)."
        )
    return bool(meshes.concrete) and not meshes.abstract if compiled is None else compiled


def _check_abstract(rows: Sequence[Collective], meshes: _Meshes, compiled: bool | None) -> None:
    if compiled is None and meshes.abstract and not rows:
        raise ValueError(
            "The program has no explicit collectives, and XLA can only insert them for devices, which "
            f"{_describe_mesh(meshes)} does not have. Write them in jax.shard_map, or use a mesh of devices. "
            "For example: jax.make_mesh((8,), ('data',))."
        )


def _describe_mesh(meshes: _Meshes) -> str:
    mesh = meshes.abstract[0]
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"the AbstractMesh of {sizes} ({mesh.size} devices; {jax.device_count()} are here)"


def _add_up(rows: Iterable[Collective]) -> tuple[Collective, ...]:
    """Merges rows that differ only in their counts."""
    table: dict[Collective, list[int]] = {}
    for row in rows:
        amounts = table.setdefault(dataclasses.replace(row, count=0, bytes=0), [0, 0])
        amounts[0] += row.count
        amounts[1] += row.bytes
    return tuple(dataclasses.replace(row, count=count, bytes=bytes) for row, (count, bytes) in table.items())
