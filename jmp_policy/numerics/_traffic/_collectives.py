"""`numerics.collectives`: a program is traced and partitioned, and what its devices send each other is counted."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax

from ..._base import TRACING, describe, is_array
from ..._jaxpr import ModulePaths, Register, Step, choose_line, find_direction, find_line, find_origin, flatten_function
from .._ends import check_function
from ._collective import Direction, Meshes, Place, add_up, find_meshes
from ._hlo import make_unique, parse_module, partition
from ._partitioned import read_module
from ._report import Collectives
from ._traced import Found, read_program


def collectives(fun: Callable[..., Any], *, compiled: bool | None = None) -> Callable[..., Collectives]:
    """Tells what the devices of a mesh send each other in a program: which collective, in which dtype, how many bytes.

    Nothing runs: the function is traced, and the program is compiled for the devices of its mesh. It is read as XLA's
    partitioner leaves it, for one device, with what `shard_map` says and with what XLA inserts by itself. Passes that
    come later are not seen: they combine small collectives, XLA for CPUs widens those in half precision, that for GPUs
    and TPUs makes a reduce-scatter of an all-reduce of which each device keeps a part, and TPUs gather little as an
    all-reduce. For TPUs the partitioner itself may make a ring of a product and its collective: the report has its
    permutes, and does not know that what is added between them is a gradient.

    With `compiled=False`, and on an `AbstractMesh`, the jaxpr is read instead: what `shard_map` says, in seconds for
    thousands of devices that need not be there. What XLA would insert is not counted then, and arrays in a `shard_map`
    with axes left to XLA (`axis_names`) count as if those had one device.

    The turns of a loop are counted, and every branch of a `cond` counts as if it ran. Of a loop whose turns nobody
    knows, such as a `while`, one turn counts, and the report has its line. Where XLA inserted a collective, its line is
    that of the operation that needs it. Whether a sum is of gradients is told by where it stands and where its result
    goes; a parameter that is normalized by sums of itself, and a pass written by hand outside of `jax.grad`, are told
    wrong.

    Args:
      fun: any function of trees of arrays, jitted or not. What it returns besides arrays is ignored.
      compiled: whether to compile the program; by default, if its mesh is one of devices.

    Returns:
      A function of the same arguments that returns `Collectives`: tables when printed or shown in a notebook, `.rows`,
      `.select`, `.total_bytes` and `.to_dict()` for programs, `.assert_reduced_in`, `.assert_gathered_in` and
      `.assert_no` for tests. Arguments may be arrays or `jax.ShapeDtypeStruct`s with shardings.

    Raises:
      TypeError: `fun` is not a function. What the function itself raises comes through.
      ValueError: the program is to be compiled, or leaves its collectives to XLA, and its mesh has no devices.
      RuntimeError: the compiler does not write down what it does.

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

    @functools.wraps(fun)
    def find_collectives(*args: Any, **kwargs: Any) -> Collectives:
        register = Register()
        flat, arrays, _ = flatten_function(register.watch(_return_arrays(fun)), args, kwargs)
        unique, token = make_unique(flat, getattr(fun, "__name__", ""))
        with TRACING(register.token):
            traced = jax.jit(unique).trace(*arrays)
            body = traced.jaxpr.jaxpr
            meshes = find_meshes(body, arrays)
            places = _Places(ModulePaths(register.list_modules()))
            devices = _count_devices(meshes)
            compiles = devices > 1 and _choose(compiled, meshes)
            if compiles:
                shapes = [mesh.shape for mesh in meshes.concrete]
                found = read_module(parse_module(partition(traced.lower(), token)), shapes, devices, places)
            else:
                found = read_program(body, places) if devices > 1 else Found([], [])
                _check_abstract(found, meshes, compiled)
        return Collectives(add_up(found.rows), devices, meshes.axes, compiles, tuple(found.uncounted_loops))

    return find_collectives


def _return_arrays(fun: Callable[..., Any]) -> Callable[..., list[Any]]:
    def list_arrays(*args: Any, **kwargs: Any) -> list[Any]:
        return [leaf for leaf in jax.tree.leaves(fun(*args, **kwargs)) if is_array(leaf)]

    return list_arrays


def _count_devices(meshes: Meshes) -> int:
    return max([mesh.size for mesh in (*meshes.concrete, *meshes.abstract)], default=1)


def _choose(compiled: bool | None, meshes: Meshes) -> bool:
    """Whether to compile a program."""
    if compiled and not meshes.concrete:
        raise ValueError(
            f"compiled=True needs devices, but {_describe_mesh(meshes)} has none. Without it, what shard_map says is "
            "read off the program: collectives(fun)(*args)."
        )
    return bool(meshes.concrete) and not meshes.abstract if compiled is None else compiled


def _check_abstract(found: Found, meshes: Meshes, compiled: bool | None) -> None:
    if compiled is None and meshes.abstract and not found.rows:
        raise ValueError(
            f"The program says no collectives itself, and XLA inserts them for devices, which {_describe_mesh(meshes)} "
            "does not have. Give it a mesh of devices, as jax.make_mesh makes it, or say in jax.shard_map what is sent."
        )


def _describe_mesh(meshes: Meshes) -> str:
    mesh = meshes.abstract[0]
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"the AbstractMesh of {sizes} ({mesh.size} devices; {jax.device_count()} are here)"


class _Places:
    """Reads name stacks and source lines, as `Places` of the room says."""

    def __init__(self, paths: ModulePaths):
        self._paths = paths
        self._known: dict[str, Place] = {}

    def find_place(self, stack: str) -> Place:
        if stack not in self._known:
            direction = cast(Direction, find_direction(stack))
            self._known[stack] = Place(self._paths.read_stack(stack), direction)
        return self._known[stack]

    def find_line(self, step: Step) -> str:
        return find_line(find_origin(step))

    def choose_line(self, frames: Iterable[Any]) -> str:
        return choose_line(list(frames))
