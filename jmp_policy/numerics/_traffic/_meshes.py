"""The meshes that a traced program is written for."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from ..._jaxpr import bodies_of


class Meshes(NamedTuple):
    """The meshes of a program, without those of one device.

    Attributes:
      concrete: those of devices.
      abstract: those of sizes and names only, in whose place no mesh of devices stands.
    """

    concrete: tuple[Mesh, ...]
    abstract: tuple[AbstractMesh, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of all axes."""
        return tuple(dict.fromkeys(axis for mesh in (*self.concrete, *self.abstract) for axis in mesh.axis_names))


def find_meshes(program: Jaxpr, arguments: Iterable[Any]) -> Meshes:
    """Finds the meshes of the arguments of a program, of its shard_maps and of its constraints.

    Args:
      program: the program.
      arguments: arrays and `ShapeDtypeStruct`s.
    """
    found = dict.fromkeys(_list_meshes(program, arguments))
    large = [mesh for mesh in found if math.prod(mesh.shape.values()) > 1]
    concrete = [mesh for mesh in large if isinstance(mesh, Mesh)]
    shapes = [dict(mesh.shape) for mesh in concrete]
    abstract = [mesh for mesh in large if isinstance(mesh, AbstractMesh) and dict(mesh.shape) not in shapes]
    return Meshes(tuple(concrete), tuple(abstract))


def _list_meshes(program: Jaxpr, arguments: Iterable[Any]) -> Iterator[Mesh | AbstractMesh]:
    for argument in arguments:
        yield from _find_mesh(getattr(argument, "sharding", None))
    yield from _list_meshes_inside(program)
    for var in program.invars:  # arguments of an explicit mesh
        yield from _find_mesh(getattr(var.aval, "sharding", None))
    yield jax.sharding.get_abstract_mesh()


def _list_meshes_inside(program: Jaxpr) -> Iterator[Mesh | AbstractMesh]:
    for eqn in program.eqns:
        yield from _list_meshes_of(eqn)
        for body in bodies_of(eqn):
            yield from _list_meshes_inside(body.program)


def _list_meshes_of(eqn: JaxprEqn) -> Iterator[Mesh | AbstractMesh]:
    for name in ("mesh", "ctx_mesh", "sharding", "in_shardings", "out_shardings", "dst_sharding"):
        for value in jax.tree.leaves(eqn.params.get(name)):
            yield from _find_mesh(value)


def _find_mesh(value: Any) -> Iterator[Mesh | AbstractMesh]:
    mesh = value.mesh if isinstance(value, NamedSharding) else value
    if isinstance(mesh, Mesh | AbstractMesh) and not mesh.empty:
        yield mesh
