"""Which operations of a program compute the derivative of another one, and which are in a branch of a `jnp.where`."""

from typing import Any

from jax.extend.core import Jaxpr, Literal

from ..._jaxpr import Step, walk
from ._words import GUARDED


def find_roles(program: Jaxpr) -> dict[int, str]:
    """Finds the roles of equations, by their ids: see `Words.role`.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.grad(jnp.sqrt))(1.0)
    >>> roles = find_roles(program.jaxpr)
    >>> [(eqn.primitive.name, roles[id(eqn)]) for eqn in program.eqns if id(eqn) in roles]
    [('div', 'sqrt')]
    """
    steps = list(walk(program))
    makers: dict[int, list[Step]] = {}
    for step in steps:
        for var in step.results:
            makers.setdefault(id(var), []).append(step)
    roles = {id(eqn): GUARDED for eqn in _list_guarded(steps, makers)}
    logarithms = {id(step.operands[0]) for step in steps if step.name == "log"}
    divisors = {id(step.operands[1]) for step in steps if step.name == "div"}
    for step in steps:
        if "jvp(" not in step.scope:  # which is around the backward pass, too
            continue
        role = ""
        if step.name == "integer_pow":
            role = _find_role_of_power(step, makers, divisors)
        elif step.name == "div":
            role = _find_role_of_quotient(step, makers, logarithms)
        if role:
            roles[id(step.eqn)] = role
    return roles


def _find_role_of_power(step: Step, makers: dict[int, list[Step]], divisors: set[int]) -> str:
    (base,) = step.operands
    if _is_made_by("cbrt", base, makers):
        return "cbrt"
    return _find_decomposition(base, makers) or ("div" if step.eqn.params["y"] == -2 and id(base) in divisors else "")


def _find_role_of_quotient(step: Step, makers: dict[int, list[Step]], logarithms: set[int]) -> str:
    dividend, divisor = step.operands
    is_half = isinstance(dividend, Literal) and float(dividend.val) == 0.5
    if is_half and _is_made_by("sqrt", divisor, makers):
        return "sqrt"
    is_transposed = "transpose(" in step.scope
    if is_transposed and id(divisor) in logarithms:
        return "log"
    return _find_decomposition(divisor, makers, of_differences=not is_transposed)


def _find_decomposition(atom: Any, makers: dict[int, list[Step]], *, of_differences: bool = True) -> str:
    """Finds the decomposition of a matrix from whose values a divisor is made; the empty string for none.

    Args:
      atom: the divisor.
      makers: the steps that make each value.
      of_differences: whether only differences of the values count. The program of a user may divide by one of them.
    """
    queue, seen = [(atom, not of_differences)], set()
    while queue:
        atom, counts = queue.pop()
        if (id(atom), counts) in seen:
            continue
        seen.add((id(atom), counts))
        for step in makers.get(id(atom), ()):
            if step.name in ("eigh", "svd") and counts:
                return step.name
            if step.name in (*_FOLLOWED, "slice", "squeeze"):
                queue += [(operand, counts or step.name == "sub") for operand in step.operands]
    return ""


def _is_made_by(name: str, atom: Any, makers: dict[int, list[Step]]) -> bool:
    return any(step.name == name for step in makers.get(id(atom), ()))


def _list_guarded(steps: list[Step], makers: dict[int, list[Step]]) -> list[Any]:
    """The equations from which a branch of a `select_n` comes, up to sums and products of them."""
    found, seen = [], set()
    queue = [atom for step in steps if step.name == "select_n" for atom in step.operands[1:]]
    while queue:
        atom = queue.pop()
        if id(atom) in seen:
            continue
        seen.add(id(atom))
        for step in makers.get(id(atom), ()):
            if step.name not in ("link", "carry"):
                found.append(step.eqn)
            if step.name in _FOLLOWED:
                queue += step.operands
    return found


_FOLLOWED = ("add", "broadcast_in_dim", "convert_element_type", "div", "link", "mul", "neg", "reshape", "sub")
