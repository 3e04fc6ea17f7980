"""The operations of a traced program, one after the other, whatever they are nested in."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from .._dtypes import is_floating_dtype

STRUCTURAL = frozenset({
    "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "dynamic_slice",
    "dynamic_update_slice", "expand_dims", "name", "optimization_barrier", "pad", "reduce_precision", "reshape",
    "rev", "sharding_constraint", "slice", "split", "squeeze", "stop_gradient", "transpose", "link",
})  # fmt: skip
"""Primitives that move or convert numbers and compute nothing; a `link` joins values in and around a body."""


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
    """

    name: str
    scope: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]

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
    for eqn in jaxpr.eqns:
        inner_scope = f"{scope}/{eqn.source_info.name_stack}"
        bodies = _bodies(eqn)
        for body in bodies:
            yield from _links(inner_scope, _from_the_end(eqn.invars, body.invars))
            yield from operations(body, inner_scope)
        if bodies:
            yield from _links(inner_scope, _results_of(bodies, eqn))
        else:
            yield Operation(eqn.primitive.name, inner_scope, _values(eqn.invars), _values(eqn.outvars))


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The programs inside of an equation."""
    found = []
    for parameter in eqn.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _from_the_end(outer: Sequence[Any], inner: Sequence[Any]) -> Iterator[tuple[list[Any], Any]]:
    """Which values a body is called with: the last ones, for `cond` and `while` have others in front of them."""
    for source, target in zip(reversed(outer), reversed(inner), strict=False):
        yield [source], target


def _results_of(bodies: list[Jaxpr], eqn: JaxprEqn) -> Iterator[tuple[list[Any], Any]]:
    returning = [body.outvars for body in bodies if len(body.outvars) == len(eqn.outvars)]
    for index, target in enumerate(eqn.outvars):
        yield [outvars[index] for outvars in returning], target


def _links(scope: str, pairs: Iterator[tuple[list[Any], Any]]) -> Iterator[Operation]:
    for sources, target in pairs:
        yield Operation("link", scope, _values(sources), _values([target]))


def _values(variables: Sequence[Any]) -> tuple[Value, ...]:
    return tuple(Value(_key(variable), _floating_dtype(variable.aval)) for variable in variables)


def _key(variable: Any) -> int | None:
    return None if hasattr(variable, "val") else id(variable)


def _floating_dtype(aval: Any) -> np.dtype | None:
    dtype = getattr(aval, "dtype", None)
    return np.dtype(dtype) if dtype is not None and is_floating_dtype(dtype) else None
