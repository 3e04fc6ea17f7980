"""The operations of a traced program, one after the other, whatever they are nested in."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr

from .._dtypes import is_floating_dtype
from ..interpreter import walk
from ._half_sums import HalfSum, half_sum

STRUCTURAL = frozenset({
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "name", "optimization_barrier", "pad", "reduce_precision", "reshape",
    "rev", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose", "link", "carry",
})  # fmt: skip
"""Primitives that move or convert numbers and compute nothing; a `link` joins values in and around a body, a `carry`
those around and in a loop."""


class Value(NamedTuple):
    """What an operation reads or makes.

    Attributes:
      key: tells it from other values; `None` for a literal.
      dtype: its dtype if it is floating, else `None`.
    """

    key: int | None
    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class Operation:
    """One primitive operation.

    Attributes:
      name: that of the primitive.
      scope: the `jax.named_scope`s around it, outermost first, joined by `/`.
      operands: what it reads.
      results: what it makes.
      half_sum: the sum or product of many numbers that it takes in half precision, if it is one.
    """

    name: str
    scope: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    half_sum: HalfSum | None = None

    @property
    def computes(self) -> bool:
        """Whether it does arithmetic."""
        return self.name not in STRUCTURAL


def operations(jaxpr: Jaxpr, scope: str = "") -> Iterator[Operation]:
    """The operations of a program in order, those of the bodies of jit, scan, cond, remat and custom rules among them.

    A body stands for itself once, where it is called; its values are joined to those around it by `link`s. A value
    that goes around a loop is not followed to the next turn.

    Args:
      jaxpr: the program; its values are told apart by identity, so keep it alive.
      scope: the scopes around the program.

    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> [operation.name for operation in operations(program.jaxpr) if operation.computes]
    ['sin', 'mul']
    """
    for step in walk(jaxpr, scope):
        if step.name != "constant":
            yield Operation(step.name, step.scope, _values(step.operands), _values(step.results), half_sum(step))


def _values(variables: Sequence[Any]) -> tuple[Value, ...]:
    return tuple(Value(_key(variable), _floating_dtype(variable.aval)) for variable in variables)


def _key(variable: Any) -> int | None:
    return None if hasattr(variable, "val") else id(variable)


def _floating_dtype(aval: Any) -> np.dtype | None:
    dtype = getattr(aval, "dtype", None)
    return np.dtype(dtype) if dtype is not None and is_floating_dtype(dtype) else None
