"""What a rule knows of a value while it rewrites a program."""

from typing import Any, NamedTuple

from .._dtypes import is_floating_dtype

Atom = Any
"""A `Var` or a `Literal`; what is abstract about it, `aval`, has a dtype if `float_dtype` finds one."""


class Kind(NamedTuple):
    """All that the rewriting of a body may depend on: bodies are rewritten once for each combination.

    Attributes:
      dtype: the dtype that the value has in the new program, `None` if that is not a real floating one.
      mark: whatever the rule remembers of it.
    """

    dtype: Any
    mark: Any = None


class Value(NamedTuple):
    """A value of the new program.

    Attributes:
      atom: its variable, or the literal.
      kind: its kind.
    """

    atom: Atom
    kind: Kind


def float_dtype(atom: Atom) -> Any:
    """The dtype of a real floating array, else `None`; refs and PRNG keys have none."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype if dtype is not None and hasattr(atom.aval, "update") and is_floating_dtype(dtype) else None


def is_float(atom: Atom) -> bool:
    """Whether a variable or literal is a real floating array.

    >>> is_float(jax.make_jaxpr(lambda x: x)(1.0).jaxpr.invars[0])
    True
    """
    return float_dtype(atom) is not None
