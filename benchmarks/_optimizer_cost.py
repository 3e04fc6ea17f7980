"""Memory traffic of an optimizer's step, without an array of its size in memory."""

import dataclasses
from typing import Any

import jax

from benchmarks._compiled import compile_for_figures
from benchmarks._programs import Program


@dataclasses.dataclass(frozen=True)
class Traffic:
    """XLA's analysis of a compiled step, in bytes, or in multiples of some bytes.

    Attributes:
      accessed: bytes read and written.
      temporaries: bytes of temporary buffers.
      in_place: bytes of results that are written into donated arguments.
    """

    accessed: float
    temporaries: float
    in_place: float

    def per(self, unit: float) -> "Traffic":
        """The figures in multiples of a unit."""
        return Traffic(*(figure / unit for figure in dataclasses.astuple(self)))


def traffic(program: Program) -> Traffic:
    """The traffic of a program, which is compiled for it; its arguments may be `jax.ShapeDtypeStruct`."""
    compiled = compile_for_figures(program.lower())
    memory = compiled.memory_analysis()
    accessed = compiled.cost_analysis()["bytes accessed"]
    return Traffic(accessed, memory.temp_size_in_bytes, memory.alias_size_in_bytes)


def count_bytes(tree: Any) -> int:
    """The bytes of the arrays of a tree.

    >>> count_bytes([jax.ShapeDtypeStruct((2, 3), "bfloat16"), jax.ShapeDtypeStruct((), "int32")])
    16
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_parameters(params: Any) -> int:
    """The numbers in a tree.

    >>> count_parameters({"w": jax.ShapeDtypeStruct((2, 3), "float32")})
    6
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))
