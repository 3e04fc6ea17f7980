"""Jaxprs: variables, equations, the sub-jaxprs that equations run, and a walk over every equation."""

import contextlib
import math
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh

from .._base import is_floating_dtype
from ._primitives import Fact, having

Atom = Var | Literal
"""What an equation reads. Its abstract value, `aval`, has a dtype if `float_dtype` finds one."""

Program = Jaxpr | ClosedJaxpr
"""A body, with or without the constants that it closes over."""


def float_dtype(atom: Atom) -> Any:
    """The dtype of a real floating array, else `None`; refs and PRNG keys have none.

    >>> import jax
    >>> float_dtype(jax.make_jaxpr(lambda x: x)(1.0).jaxpr.invars[0])
    dtype('float32')
    """
    dtype = array_dtype(atom)
    return dtype if dtype is not None and is_floating_dtype(dtype) else None


def array_dtype(atom: Atom) -> Any:
    """Returns the dtype of an array, or None for anything else, such as a mutable reference to one."""
    aval: Any = atom.aval
    return aval.dtype if isinstance(aval, ShapedArray) else None


def is_float(atom: Atom) -> bool:
    """Whether a variable or literal is a real floating array.

    >>> import jax
    >>> is_float(jax.make_jaxpr(lambda x: x)(1.0).jaxpr.invars[0])
    True
    """
    return float_dtype(atom) is not None


def without_mesh() -> contextlib.AbstractContextManager[Any]:
    """Hides the mesh in use while an equation is traced that is kept: its types would name that mesh.

    >>> with without_mesh():
    ...     jax.sharding.get_abstract_mesh().empty
    True
    """
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def replace_variables(
    program: Program, invars: Sequence[Atom], equations: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> Program:
    """A program with other arguments and results. Its debug information names none, for they are more now."""
    old = body_of(program)
    nameless = DebugInfo(old.debug_info.traced_for, old.debug_info.func_src_info, None, None)
    new = old.replace(invars=list(invars), eqns=list(equations), outvars=list(outvars), debug_info=nameless)
    return program.replace(jaxpr=new) if old is not program else new


def list_variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among variables and literals, in order."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def body_of(program: Program) -> Jaxpr:
    """The equations and variables of a program, which may have constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def replace_body(
    program: Program, invars: Sequence[Atom], equations: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> Program:
    """A program with other variables and equations, and the same constants."""
    old = body_of(program)
    new = old.replace(invars=list(invars), eqns=list(equations), outvars=list(outvars), debug_info=old.debug_info)
    return program.replace(jaxpr=new) if old is not program else new


def multiplies_only(eqn: JaxprEqn) -> bool:
    """Whether an equation is written as a matmul and sums nothing: an outer product, as `einsum("i,j->ij")` traces to.

    >>> import jax, jax.numpy as jnp
    >>> outer = jax.make_jaxpr(lambda x: jnp.einsum("i,j->ij", x, x))(jnp.ones(2))
    >>> [multiplies_only(eqn) for eqn in outer.eqns if eqn.primitive.name == "dot_general"]
    [True]
    """
    if eqn.primitive.name != "dot_general":
        return False
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return not contracted


def name_stack(eqn: JaxprEqn) -> str:
    """The scopes in which an equation was traced, outermost first, as JAX prints them.

    The backward pass of a remat, and of a `jax.custom_jvp` function, carries the stack of the forward pass as well.
    Here it stands once.

    >>> import jax, jax.numpy as jnp
    >>> fun = jax.named_scope("net")(jax.grad(jax.checkpoint(jnp.sin)))
    >>> remat = jax.make_jaxpr(fun)(1.0).eqns[-1]
    >>> str(remat.source_info.name_stack), name_stack(remat)
    ('net/transpose(jvp(net))/jvp()', 'transpose(net)')
    """
    stack = str(eqn.source_info.name_stack)
    has_forward = eqn.primitive.name in ("checkpoint", "remat2") or ")/jvp(" in stack
    if not (has_forward and is_backward(stack)):
        return stack
    names = [name for name in strip_transformations(stack).split("/") if name]
    once = names[: len(names) // 2]
    return f"transpose({'/'.join(once)})" if once + once == names else stack


def is_backward(stack: str) -> bool:
    """Whether a name stack belongs to a backward pass.

    >>> is_backward("net/transpose(jvp(dense))"), is_backward("jvp(net)/transpose")
    (True, False)
    """
    return "transpose(" in stack


Pass = typing.Literal["forward", "recomputed", "backward"]


def find_direction(stack: str, outer: str = "forward") -> Pass:
    """The pass that a name stack belongs to, inside of a body of another.

    >>> find_direction("jvp(net)/dense"), find_direction("transpose(jvp(net))/rematted_computation/dense")
    ('forward', 'recomputed')
    >>> find_direction("rematted_computation/dense", "backward")
    'recomputed'
    """
    if outer == "recomputed":
        return "recomputed"
    backward = outer == "backward" or is_backward(stack)
    if backward and "rematted_computation" in stack:
        return "recomputed"
    return "backward" if backward else "forward"


def strip_transformations(stack: str) -> str:
    """A name stack without what transformations put around its scopes.

    >>> strip_transformations("transpose(jvp(net))/dense")
    'net/dense'
    """
    return re.sub(r"\w+\(|\)", "", stack)


Pair = tuple[Atom, Atom]
"""A value, and the variable that is the same value on the other side of the edge of a body."""


class SubJaxpr(NamedTuple):
    """A program that an equation runs.

    Attributes:
      program: its equations.
      consts: the arrays that it closes over, in the order of `program.constvars`.
      entering: the values that the equation reads, each with the argument of the program that it becomes.
      leaving: the results of the program, each with the variable that the equation makes of it.
      carry: which of its arguments are its own results of the turn before, from the second turn of a loop on.
      trips: how often it runs each time that the equation does; 1 where only running it would tell, and 0 for the
        branches of a `lax.platform_dependent` that are for other platforms than that of this process.
    """

    program: Jaxpr
    consts: Sequence[Any]
    entering: list[Pair]
    leaving: list[Pair]
    carry: range = range(0)
    trips: int = 1


def sub_jaxprs(eqn: JaxprEqn) -> list[SubJaxpr]:
    """The programs that an equation runs; none where only its primitive knows what to do with them.

    >>> import jax
    >>> [scan] = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3))(1.0).eqns
    >>> [(len(body.program.eqns), body.carry, body.trips) for body in sub_jaxprs(scan)]
    [(1, range(0, 1), 3)]
    """
    params, name = eqn.params, eqn.primitive.name
    if name in _OPAQUE:
        return []
    if name == "scan":
        consts, carried = scan_parts(eqn, eqn.invars)
        return [_make_inside(eqn, params["jaxpr"], eqn.invars, range(consts, consts + carried), params["length"])]
    if name == "while":
        return _find_while_bodies(eqn)
    if name == "cond":
        branches = zip(params["branches"], _list_running(eqn), strict=True)
        return [_make_inside(eqn, branch, eqn.invars[1:], trips=int(runs)) for branch, runs in branches]
    if name == "custom_linear_solve":
        return [_make_call(eqn, params["jaxprs"].solve)]
    return [_make_call(eqn, item) for value in params.values() for item in _list_items(value) if _is_body(item, eqn)]


_OPAQUE = having(Fact.COMBINES, Fact.KERNEL)
"""These hold programs that say how to combine two numbers, or that write to memory: they are operations themselves."""


PRODUCT_SCOPE = "jmp_product"
"""The scope of a choice between the forms of a product of half-precision numbers; no part of a path."""


def scan_parts(eqn: JaxprEqn, values: Sequence[Any]) -> tuple[int, int]:
    """How many of the values of a scan are constants of its body, and how many its carry."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _list_running(eqn: JaxprEqn) -> list[bool]:
    """Which branches of a `cond` may run in this process: all, or one of a `lax.platform_dependent`.

    Of a product of half-precision numbers whose result is wider it is the one that accelerators run: a report says how
    a model computes, and not for which products a CPU has no kernel.
    """
    branches, platforms = eqn.params["branches"], eqn.params.get("branches_platforms")
    if platforms is None:
        return [True] * len(branches)
    if PRODUCT_SCOPE in name_stack(eqn):
        return [own is None for own in platforms]
    backend = jax.default_backend()
    names = {"cuda", "rocm"} if backend == "gpu" else {backend}
    chosen = next((i for i, own in enumerate(platforms) if own is None or not names.isdisjoint(own)), None)
    return [i == chosen for i in range(len(branches))]


def _find_while_bodies(eqn: JaxprEqn) -> list[SubJaxpr]:
    params = eqn.params
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    values, count = eqn.invars, len(eqn.invars)
    carry_of_test = range(first, first + count - start)
    test = _make_inside(eqn, params["cond_jaxpr"], [*values[:first], *values[start:]], carry_of_test)
    turn = _make_inside(eqn, params["body_jaxpr"], values[first:], range(start - first, count - first))
    return [test._replace(leaving=[]), turn]


def _make_call(eqn: JaxprEqn, program: Program) -> SubJaxpr:
    """A body that is called with the last values that its equation reads: all of them, for almost all equations."""
    count = len(body_of(program).invars)
    return _make_inside(eqn, program, eqn.invars[len(eqn.invars) - count :], trips=_count_devices(eqn))


def _make_inside(
    eqn: JaxprEqn, program: Program, invars: Sequence[Atom], carry: range = range(0), trips: int = 1
) -> SubJaxpr:
    body = body_of(program)
    leaving = zip(body.outvars, eqn.outvars, strict=True) if len(body.outvars) == len(eqn.outvars) else ()
    consts = getattr(program, "consts", ())
    return SubJaxpr(body, consts, list(zip(invars, body.invars, strict=True)), list(leaving), carry, trips)


def _count_devices(eqn: JaxprEqn) -> int:
    """How many devices run the body of a shard_map, each on its own part of the values; one for other equations."""
    if eqn.primitive.name != "shard_map":
        return 1
    sizes = eqn.params["mesh"].shape
    return math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])


def _list_items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _is_body(item: Any, eqn: JaxprEqn) -> bool:
    return isinstance(item, ClosedJaxpr | Jaxpr) and len(body_of(item).invars) <= len(eqn.invars)


class Step(NamedTuple):
    """One thing that happens in a program.

    Attributes:
      name: the name of the primitive; `"link"` for a value that gets into a body or out of it, `"carry"` for one that
        gets into the first turn of a loop, `"constant"` for an array that a body closes over.
      operands: what is read.
      results: what is made.
      eqn: the equation; for a link and a constant, the one that the body belongs to.
      scope: the name stacks around and of the equation, outermost first, joined by `/`.
      around: the equations around it, outermost first, each with the body of it that the step is in.
      trips: how often it runs.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.named_scope("net")(jnp.sin))(1.0)
    >>> [(step.name, step.scope) for step in walk(program.jaxpr)]
    [('sin', 'net')]
    """

    name: str
    operands: Sequence[Any]
    results: Sequence[Any]
    eqn: JaxprEqn
    scope: str
    around: tuple[tuple[JaxprEqn, Jaxpr], ...] = ()
    trips: int = 1


def walk(
    program: Jaxpr, scope: str = "", around: tuple = (), trips: int = 1, *, live_only: bool = False
) -> Iterator[Step]:
    """The steps of a program in order, also in the bodies of jit, scan, cond, remat and custom rules.

    A body stands for itself once, where it is called, and its values are joined to those around it by links, each of
    one result. A value that goes around a loop is not followed to the next turn.

    Args:
      program: the program; its values are told apart by identity, so keep it alive.
      scope: the scopes around the program.
      around: the equations around it, as in a `Step`.
      trips: how often it runs.
      live_only: whether equations are passed over whose results nothing uses, as the compiler does.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(jax.jit(lambda x: jnp.sin(x) * 2))(1.0)
    >>> [step.name for step in walk(program.jaxpr)]
    ['link', 'sin', 'mul', 'link']
    """
    for eqn in list_live(program) if live_only else program.eqns:
        stack = name_stack(eqn)
        here = f"{scope}/{stack}" if scope and stack else scope or stack
        bodies = sub_jaxprs(eqn)
        if not bodies:
            yield Step(eqn.primitive.name, eqn.invars, eqn.outvars, eqn, here, around, trips)
            continue
        for body in bodies:
            for constant, var in zip(body.consts, body.program.constvars, strict=False):
                yield Step("constant", [constant], [var], eqn, here, around, trips)
            inside = (*around, (eqn, body.program))
            for i, (outer, inner) in enumerate(body.entering):
                yield Step("carry" if i in body.carry else "link", [outer], [inner], eqn, here, inside, trips)
            yield from walk(body.program, here, inside, trips * body.trips, live_only=live_only)
        # One link for each result of the equation: from each body that may have made it, as each branch of a cond.
        leaving = [{id(outer): inner for inner, outer in body.leaving} for body in bodies]
        for var in eqn.outvars:
            sources = [results[id(var)] for results in leaving if id(var) in results]
            yield Step("link", sources, [var], eqn, here, around, trips)


def list_live(program: Jaxpr) -> list[JaxprEqn]:
    """The equations that have effects, or results that lead to one that the program returns."""
    used = set(list_variables(program.outvars))
    found = []
    for eqn in reversed(program.eqns):
        if eqn.effects or not used.isdisjoint(eqn.outvars):
            used.update(list_variables(eqn.invars))
            found.append(eqn)
    return found[::-1]
