"""What a rule says about a program, what it knows of values, and what it writes to."""

import abc
import functools
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, new_jaxpr_eqn

from ._program import Atom, Program

Context = Any
"""What a rule knows of the place of an equation; hashable."""


class AbstractValue(NamedTuple):
    """What the rewriting of a body may depend on: each body is rewritten once for each combination of kinds.

    Attributes:
      dtype: the dtype that the value has in the new program; `None` if that is not a real floating one.
      state: whatever the rule remembers of it.

    >>> AbstractValue(np.dtype("float16"), "rounded").state
    'rounded'
    """

    dtype: Any
    state: Any = None


class Value(NamedTuple):
    """A value of the new program.

    Attributes:
      atom: its variable, or the literal.
      kind: its kind.

    >>> variable = jax.make_jaxpr(lambda x: x)(1.0).jaxpr.invars[0]
    >>> Value(variable, AbstractValue(variable.aval.dtype)).kind.dtype
    dtype('float32')
    """

    atom: Atom
    kind: AbstractValue


class JaxprBuilder:
    """The equations of a new program, in order.

    Attributes:
      equations: those written so far.
    """

    def __init__(self) -> None:
        self.equations: list[JaxprEqn] = []
        self._casts: dict[tuple[Atom, np.dtype], Atom] = {}

    def append(
        self, eqn: JaxprEqn, atoms: Sequence[Atom], kinds: Sequence[AbstractValue], params: dict[str, Any] | None = None
    ) -> list[Value]:
        """Writes an equation, and returns its results.

        Args:
          eqn: the equation as it was traced; what the other arguments do not say stays.
          atoms: what the new one reads.
          kinds: the kinds of its results.
          params: its parameters, if they are others.
        """
        outvars = [_change_dtype(var, kind.dtype) for var, kind in zip(eqn.outvars, kinds, strict=True)]
        if params is None and _are_same(atoms, eqn.invars) and _are_same(outvars, eqn.outvars):
            self.equations.append(eqn)
        else:
            changed = eqn.params if params is None else params
            self.equations.append(eqn.replace(invars=list(atoms), outvars=outvars, params=changed))
        return [Value(var, kind) for var, kind in zip(outvars, kinds, strict=True)]

    def cast(self, atom: Atom, dtype: np.dtype, eqn: JaxprEqn) -> Atom:
        """Casts a floating value for use in `eqn`; the cast takes the source line of that equation."""
        aval: Any = atom.aval
        if aval.dtype == dtype:
            return atom
        if isinstance(atom, Literal):
            return Literal(np.asarray(atom.val).astype(dtype), _change_aval(aval, dtype))
        template = _trace_conversion(dtype)
        out = Var(_change_aval(aval, dtype))
        params = {**template.params, "weak_type": aval.weak_type}  # as traced: Python's numbers promote nothing
        self.equations.append(
            new_jaxpr_eqn([atom], [out], template.primitive, params, template.effects, eqn.source_info, eqn.ctx)
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

    def cast_values(self, values: Sequence[Value], kinds: Sequence[AbstractValue], eqn: JaxprEqn) -> list[Atom]:
        """Casts each value to the dtype of a kind, if that has one, for use in `eqn`."""
        return [
            value.atom if kind.dtype is None else self.cast(value.atom, kind.dtype, eqn)
            for value, kind in zip(values, kinds, strict=True)
        ]


_REWRITTEN: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


class Rule(abc.ABC):
    """Says what becomes of each equation. Rules are hashable, and equal ones share the bodies they have rewritten.

    Attributes:
      rewritten: rewritten programs, by old program and then by rule, kinds, context and wanted dtypes. A rule that
        refers to objects which must not live as long as the programs needs a mapping of its own.

    >>> import jax.numpy as jnp
    >>> class Narrow(Rule):  # runs all operations in float16; `Rewriter` has what becomes of a program
    ...     half = AbstractValue(np.dtype("float16"))
    ...     def contexts(self, outer, program):
    ...         return [outer] * len(program.eqns)
    ...     def equation(self, eqn, values, body, context):
    ...         atoms = [body.cast(value.atom, self.half.dtype, eqn) for value in values]
    ...         return body.append(eqn, atoms, [self.half] * len(eqn.outvars))
    ...     def argument(self, dtype): return AbstractValue(dtype)
    ...     def literal(self, literal): return AbstractValue(literal.aval.dtype)
    ...     def join(self, kinds): return kinds[0]
    ...     def accumulated(self, kind): return kind
    ...     def rewrites_custom_rule(self, eqn, context): return True
    ...     def rewrites_primal_only(self, eqn, context): return True
    >>> eqn = jax.make_jaxpr(jnp.sin)(1.0).eqns[0]
    >>> values = [Value(eqn.invars[0], Narrow().argument(np.dtype("float32")))]
    >>> [result.kind.dtype for result in Narrow().equation(eqn, values, JaxprBuilder(), None)]
    [dtype('float16')]
    """

    rewritten: MutableMapping[Any, dict[Any, Any]] = _REWRITTEN

    @abc.abstractmethod
    def contexts(self, outer: Context, program: Jaxpr) -> Sequence[Context]:
        """What is known of the place of each equation of a body that was entered with the context `outer`."""

    @abc.abstractmethod
    def equation(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """Writes what becomes of an equation without a body of its own, and returns its results."""

    def fuse(
        self, program: Jaxpr, start: int, read: Callable[[Atom], Value], body: JaxprBuilder, contexts: Sequence[Context]
    ) -> tuple[int, list[Value]] | None:
        """Writes several equations as one, if the rule knows what they are together.

        Args:
          program: the program that is rewritten.
          start: the number of the first of the equations.
          read: what stands for a variable or literal of the program, before the first of the equations.
          body: where the one equation goes.
          contexts: the contexts of all equations of the program.

        Returns:
          How many equations they were, and the results of the last: no later equation may use another result.
        """
        del program, start, read, body, contexts

    def cast_operands(self, eqn: JaxprEqn, values: list[Value], body: JaxprBuilder, context: Context) -> list[Value]:
        """What the bodies of an equation are given: the values that it reads, or casts of them."""
        del eqn, body, context
        return values

    @abc.abstractmethod
    def argument(self, dtype: np.dtype | None) -> AbstractValue:
        """The kind of an argument or constant that is as it was traced."""

    @abc.abstractmethod
    def literal(self, literal: Literal) -> AbstractValue:
        """The kind of a literal."""

    @abc.abstractmethod
    def join(self, kinds: Sequence[AbstractValue]) -> AbstractValue:
        """The kind of a value that is now one and now another: of branches, or around a loop."""

    def accumulators(self, program: Jaxpr, carry: range) -> frozenset[int]:
        """Which values of the carry of a loop accumulate, by their positions in it.

        Args:
          program: the body of the loop.
          carry: which of its arguments are the carry.
        """
        del program, carry
        return frozenset()

    @abc.abstractmethod
    def accumulated(self, kind: AbstractValue) -> AbstractValue:
        """The kind of a value of the carry of a loop that accumulates, where it starts with `kind`."""

    def stacked(self, eqn: JaxprEqn, kinds: Sequence[AbstractValue], context: Context) -> Sequence[AbstractValue]:
        """The kinds in which a loop stacks what each of its turns makes, where its body makes it as `kinds`."""
        del eqn, context
        return kinds

    @abc.abstractmethod
    def rewrites_custom_rule(self, eqn: JaxprEqn, context: Context) -> bool:
        """Whether a function with custom derivatives is rewritten inside, its derivative too."""

    @abc.abstractmethod
    def rewrites_primal_only(self, eqn: JaxprEqn, context: Context) -> bool:
        """Whether a function with custom derivatives is rewritten inside, where its derivative stays."""


class Rewritten(NamedTuple):
    """A program that was rewritten.

    Attributes:
      program: the new program, of the class of the old one.
      kinds: the kinds of its results.
      made: the same before its results were cast to the dtypes that were asked for.
    """

    program: Any
    kinds: tuple[AbstractValue, ...]
    made: tuple[AbstractValue, ...]


class RewritesBodies(Protocol):
    """What equations with programs of their own are written with: `Rewriter` is one."""

    rule: Rule

    def rewrite(
        self,
        program: Program,
        kinds: Sequence[AbstractValue],
        context: Context,
        out_dtypes: Sequence[np.dtype | None] | None = None,
    ) -> Rewritten:
        """Rewrites a program for arguments of the given kinds, as `Rewriter.rewrite` does."""
        ...


Writer = Callable[[RewritesBodies, JaxprEqn, list[Value], JaxprBuilder, Context], list[Value] | None]
"""Writes an equation that runs programs, given what it reads, and returns its results; `None` leaves it to the rule."""


@functools.cache
def _trace_conversion(dtype: np.dtype) -> JaxprEqn:
    """An equation that converts to `dtype`, as JAX would trace it."""
    source = np.float32 if dtype != np.float32 else np.float16
    return jax.make_jaxpr(lambda x: lax.convert_element_type(x, dtype))(source(0)).eqns[0]


def _change_dtype(var: Var, dtype: np.dtype | None) -> Var:
    aval: Any = var.aval
    return var if dtype is None or aval.dtype == dtype else type(var)(_change_aval(aval, dtype))


# Making an abstract value takes ten times as long as finding it; a program has few that differ.
@functools.lru_cache
def _change_aval(aval: Any, dtype: np.dtype) -> Any:
    """The abstract value of an array in another dtype."""
    return aval.update(dtype=dtype)


def _are_same(atoms: Sequence[Atom], others: Sequence[Atom]) -> bool:
    return all(a is b for a, b in zip(atoms, others, strict=True))
