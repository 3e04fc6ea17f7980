"""The equations of a program that is being written."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var, new_jaxpr_eqn

from ._kind import Atom, Kind, Value


class Body:
    """Equations in order, each appended as it was traced or with other dtypes.

    Attributes:
      equations: those written so far.
    """

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self._casts: dict[tuple[Any, np.dtype], Any] = {}

    def append(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], kinds: Sequence[Kind], params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Writes an equation that reads `atoms` and makes values of `kinds`, and is `eqn` in all else."""
        outvars = [_retyped(var, kind.dtype) for var, kind in zip(eqn.outvars, kinds, strict=True)]
        if params is None and _same(atoms, eqn.invars) and _same(outvars, eqn.outvars):
            self.equations.append(eqn)
        else:
            changed = eqn.params if params is None else params
            self.equations.append(eqn.replace(invars=list(atoms), outvars=outvars, params=changed))
        return [Value(var, kind) for var, kind in zip(outvars, kinds, strict=True)]

    def cast(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """A floating value in another dtype, for use in `eqn`, whose place in the source the cast takes."""
        if atom.aval.dtype == dtype:
            return atom
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val).astype(dtype), _strong(atom.aval, dtype))
        template = _conversion(dtype)
        out = Var(_strong(atom.aval, dtype))
        self.equations.append(
            new_jaxpr_eqn(
                [atom], [out], template.primitive, template.params, template.effects, eqn.source_info, eqn.ctx
            )
        )
        return out

    def cast_once(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """As `cast`, but a second call for the same value finds the first cast."""
        if isinstance(atom, Literal):
            return self.cast(atom, dtype, eqn)
        key = atom, dtype
        if key not in self._casts:
            self._casts[key] = self.cast(atom, dtype, eqn)
        return self._casts[key]


@functools.cache
def _conversion(dtype: np.dtype) -> JaxprEqn:
    """An equation that converts to `dtype`, as JAX would trace it."""
    source = np.float32 if dtype != np.float32 else np.float16
    return jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))(source(0)).eqns[0]


def _retyped(var: Var, dtype: np.dtype | None) -> Var:
    aval: Any = var.aval
    return var if dtype is None or aval.dtype == dtype else type(var)(in_dtype(aval, dtype))


# Making an abstract value takes ten times as long as finding it; a program has few that differ.
@functools.lru_cache
def in_dtype(aval: Any, dtype: np.dtype) -> Any:
    """The abstract value of an array in another dtype."""
    return aval.update(dtype=dtype)


@functools.lru_cache
def _strong(aval: Any, dtype: np.dtype) -> Any:
    return aval.update(dtype=dtype, weak_type=False)


def _same(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
    return all(a is b for a, b in zip(atoms, others, strict=True))
