"""The two generations of JAX's programs: a body and its constants in two objects, or in one from JAX 0.11 on."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ._kind import Atom

Program = Any
"""A `Jaxpr` or a `ClosedJaxpr`."""


def body_of(program: Program) -> Jaxpr:
    """The equations and variables of a program, which may have constants."""
    return program.jaxpr


def with_body(
    program: Program, invars: Sequence[Any], equations: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> Program:
    """A program with other variables and equations, and the same constants."""
    old = body_of(program) if isinstance(program, ClosedJaxpr) else program
    new = old.replace(invars=list(invars), eqns=list(equations), outvars=list(outvars), debug_info=old.debug_info)
    return program.replace(jaxpr=new) if old is not program else new


def scan_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[int, int]:
    """How many of the values of a scan are constants of its body, and how many its carry."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def multiplies_only(eqn: JaxprEqn) -> bool:
    """Whether an equation is written as a matmul and sums nothing: an outer product, as `einsum("i,j->ij")` traces to.

    >>> outer = jax.make_jaxpr(lambda x: jnp.einsum("i,j->ij", x, x))(jnp.ones(2))
    >>> [multiplies_only(eqn) for eqn in outer.eqns if eqn.primitive.name == "dot_general"]
    [True]
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return not contracted
