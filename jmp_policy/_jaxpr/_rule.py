"""The interface of a rewriting rule, the values that it sees, and the builder that collects its equations."""

import abc
import functools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn

from ._program import Atom, float_dtype

Context = Any
"""A rule's description of the place of an equation; hashable."""


class AbstractValue(NamedTuple):
    """A rule's knowledge of a value. A jaxpr is rewritten once per combination of these.

    Attributes:
      dtype: the dtype of the value in the new jaxpr; None unless it is a real floating dtype.
      state: any hashable object of the rule.
    """

    dtype: Any
    state: Any = None


class Value(NamedTuple):
    """A variable or literal of the new jaxpr, and the rule's knowledge of it."""

    atom: Atom
    kind: AbstractValue


class JaxprBuilder:
    """Collects the equations of a new jaxpr, in order."""

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self._casts: dict[tuple[Atom, np.dtype], Atom] = {}

    def append(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], kinds: Sequence[AbstractValue], params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Appends `eqn` with other operands, output dtypes and, optionally, parameters. Returns its outputs."""
        outvars = [_change_dtype(var, kind.dtype) for var, kind in zip(eqn.outvars, kinds, strict=True)]
        if params is None and _are_same(atoms, eqn.invars) and _are_same(outvars, eqn.outvars):
            self.equations.append(eqn)
        else:
            changed = eqn.params if params is None else params
            self.equations.append(eqn.replace(invars=list(atoms), outvars=outvars, params=changed))
        return [Value(var, kind) for var, kind in zip(outvars, kinds, strict=True)]

    def cast(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """Casts a floating value for use in `eqn`. The cast has the source line of `eqn`."""
        aval: Any = atom.aval
        if aval.dtype == dtype:
            return atom
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val).astype(dtype), _change_aval(aval, dtype))
        template = _trace_conversion(dtype)
        out = Var(_change_aval(aval, dtype))
        params = {**template.params, "weak_type": aval.weak_type}  # so that a Python scalar stays weak
        self.equations.append(
            new_jaxpr_eqn([atom], [out], template.primitive, params, template.effects, eqn.source_info, eqn.ctx)
        )
        return out

    def cast_once(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """Like `cast`, but returns the first cast again for the same value and dtype."""
        if isinstance(atom, Literal):
            return self.cast(atom, dtype, eqn)
        key = atom, dtype
        if key not in self._casts:
            self._casts[key] = self.cast(atom, dtype, eqn)
        return self._casts[key]

    def cast_values(self, values: Sequence[Value], kinds: Sequence[AbstractValue], eqn: JaxprEqn) -> list[Atom]:
        """Casts each value to the dtype of its new kind, if that has one."""
        return [
            value.atom if kind.dtype is None else self.cast(value.atom, kind.dtype, eqn)
            for value, kind in zip(values, kinds, strict=True)
        ]


_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Rule(abc.ABC):
    """Decides how each equation is rewritten. Rules are hashable, and equal rules share rewritten jaxprs.

    Attributes:
      rewritten: the rewritten jaxprs by original jaxpr. A rule that refers to objects that must be freed before the
        jaxprs needs a mapping of its own.
    """

    rewritten: MutableMapping[Any, dict[Any, Any]] = _REWRITTEN

    @abc.abstractmethod
    def contexts(self, outer: Context, program: Jaxpr) -> Sequence[Context]:
        """Returns the context of each equation of a jaxpr that is run by an equation with the context `outer`."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Writes an equation that has no sub-jaxpr, and returns its outputs."""

    def fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        """Writes the equations from number `start` on as one equation, if the rule has one for them.

        `read` returns the new value of an atom of `program`. Returns the number of equations and the outputs of the
        last one. No later equation may use another output of them.
        """
        del program, start, read, body, contexts

    def cast_operands(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Returns the operands of an equation with sub-jaxprs, or casts of them."""
        del eqn, body, context
        return values

    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        """Returns the kind of an argument or constant in the dtype that it was traced in."""
        return AbstractValue(dtype)

    def literal(self, literal: Literal) -> AbstractValue:
        """Returns the kind of a literal."""
        return AbstractValue(float_dtype(literal))

    @abc.abstractmethod
    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        """Returns the kind of a value that may have any of some kinds: of several branches, or around a loop."""

    def accumulators(self, program: Jaxpr, carry: range) -> frozenset[int]:
        """Returns the positions in the carry of the values that a loop accumulates; `carry` numbers its arguments."""
        del program, carry
        return frozenset()

    def accumulated(self, kind: AbstractValue) -> AbstractValue:
        """Returns the kind in which to carry an accumulator whose initial value has the kind `kind`."""
        return kind

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: Context) -> Sequence[AbstractValue]:
        """Returns the kinds in which a scan stacks its outputs, given those that its sub-jaxpr computes."""
        del eqn, context
        return kinds

    def rewrites_custom_rule(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function and its derivative are both rewritten."""
        del eqn, context
        return False

    def rewrites_primal_only(self, eqn: JaxprEqn, context: Context) -> bool:
        """True if a custom-derivative function is rewritten, but not its derivative."""
        del eqn, context
        return False


@functools.cache
def _trace_conversion(dtype: np.dtype) -> JaxprEqn:
    source = np.float32 if dtype != np.float32 else np.float16
    return jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))(source(0)).eqns[0]


def _change_dtype(var: Var, dtype: np.dtype | None) -> Var:
    aval: Any = var.aval
    return var if dtype is None or aval.dtype == dtype else type(var)(_change_aval(aval, dtype))


# A jaxpr has few distinct avals, and `update` takes ten times as long as this look-up.
@functools.lru_cache
def _change_aval(aval: Any, dtype: np.dtype) -> Any:
    return aval.update(dtype=dtype)


def _are_same(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
    return all(a is b for a, b in zip(atoms, others, strict=True))
