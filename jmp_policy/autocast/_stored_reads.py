"""Moves the reads of stored weights into the functions, branches and loops that get their results.

Only there, beside a matmul, can it be written as one by the stored numbers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from .._jaxpr import Atom, Program, body_of, float_dtype, replace_variables, scan_parts, shape_of, sub_jaxprs
from ..quant import find_structure, trace_read
from ._weight_products import TAKING

Reads = Sequence[JaxprEqn | None]
"""For each operand of an equation: the equation that reads it from a stored weight, or None."""


def move_reads_inside(program: Program) -> Program:
    """Moves the reads in a jaxpr, and in those that it runs, as far inside as possible."""
    body, known, equations = body_of(program), dict[Any, JaxprEqn](), []
    for eqn in body.eqns:
        # JAX leaves out the result of a read that nothing uses.
        if eqn.primitive.name == "jit" and eqn.outvars and find_structure(eqn.params["name"]) is not None:
            known[eqn.outvars[0]] = eqn
            equations.append(eqn)
            continue
        reads = [None if isinstance(atom, Literal) else known.get(atom) for atom in eqn.invars]
        if eqn.primitive.name == "convert_element_type" and reads[0] is not None:
            if (again := _read_as_cast(reads[0], eqn)) is not None:
                known[eqn.outvars[0]] = again
            equations.append(eqn)
            continue
        if any(reads) and eqn.primitive.name == "jit" and _is_indexing(eqn.params["jaxpr"]):
            equations += _write_out(eqn)
            continue
        moved = _MOVERS[eqn.primitive.name](eqn, reads) if any(reads) and eqn.primitive.name in _MOVERS else eqn
        params = {key: _move_in_parameter(value) for key, value in moved.params.items()}
        equations.append(moved.replace(params=params))
    return replace_variables(program, body.invars, equations, body.outvars, body.debug_info)


def _read_as_cast(read: JaxprEqn, cast: JaxprEqn) -> JaxprEqn | None:
    """Returns a read in the dtype of a cast, or None if the cast does not only round."""
    dtype: Any = float_dtype(cast.outvars[0])
    if float_dtype(read.outvars[0]) != np.float32 or dtype is None or dtype.itemsize > 4:
        return None
    avals: list[Any] = [atom.aval for atom in read.invars]
    again = trace_read(read.params["name"], dtype, [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
    return again.replace(invars=read.invars, outvars=cast.outvars, source_info=cast.source_info, ctx=read.ctx)


def _is_indexing(program: ClosedJaxpr) -> bool:
    """True for a jitted function such as `lax.dynamic_index_in_dim`: its result is an element of a weight."""
    last = program.jaxpr.eqns[-1:]
    ends = bool(last) and last[0].primitive.name in TAKING and last[0].outvars == program.jaxpr.outvars
    return ends and not program.consts and not any(map(sub_jaxprs, program.jaxpr.eqns))


def _write_out(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations of a jitted function with one result, in the place of its call."""
    body = eqn.params["jaxpr"].jaxpr
    values: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))
    made = []
    for each in body.eqns:
        own = eqn.outvars if each is body.eqns[-1] else [Var(var.aval) for var in each.outvars]
        read = [atom if isinstance(atom, Literal) else values[atom] for atom in each.invars]
        made.append(each.replace(invars=read, outvars=own, source_info=eqn.source_info))
        values.update(zip(each.outvars, own, strict=True))
    return made


def _move_in_parameter(value: Any) -> Any:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        return move_reads_inside(value)
    has_programs = type(value) is tuple and any(isinstance(item, Jaxpr | ClosedJaxpr) for item in value)
    return tuple(map(_move_in_parameter, value)) if has_programs else value


def _expand(values: Sequence[Any], reads: Reads) -> tuple[Any, ...]:
    """Repeats the value of each operand for the arrays of its weight."""
    return tuple(
        value for value, read in zip(values, reads, strict=True) for _ in (read.invars if read is not None else [None])
    )


def _list_operands(atoms: Sequence[Atom], reads: Reads) -> list[Atom]:
    """Replaces each operand by the arrays of its weight."""
    pairs = zip(atoms, reads, strict=True)
    return [own for atom, read in pairs for own in ([atom] if read is None else read.invars)]


def _read_in(program: Program, reads: Reads) -> Any:
    """Gives a jaxpr the arrays of weights, which it reads first, in the place of some inputs."""
    body, invars, first = body_of(program), [], []
    for var, read in zip(body.invars, reads, strict=True):
        if read is None:
            invars.append(var)
            continue
        sliced = len(shape_of(read.outvars[0])) - len(shape_of(var))  # 1 for a stack that a scan slices
        again = _read_slice(read) if sliced else read
        own: list[Any] = [Var(atom.aval) for atom in again.invars]
        invars += own
        first.append(again.replace(invars=own, outvars=[var], source_info=read.source_info, ctx=read.ctx))
    return replace_variables(program, invars, [*first, *body.eqns], body.outvars)


def _read_slice(read: JaxprEqn) -> JaxprEqn:
    """Returns the read of one weight of a stack."""
    avals: list[Any] = [atom.aval for atom in (*read.invars, *read.outvars)]
    *arrays, result = [jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype) for aval in avals]
    return trace_read(read.params["name"], result.dtype, arrays)


def _move_into_call(eqn: JaxprEqn, reads: Reads) -> JaxprEqn:
    per_operand = ("in_shardings", "in_layouts", "donated_invars")
    changed = {key: _expand(eqn.params[key], reads) for key in per_operand if key in eqn.params}
    params = {**eqn.params, **changed, "jaxpr": _read_in(eqn.params["jaxpr"], reads)}
    return eqn.replace(invars=_list_operands(eqn.invars, reads), params=params)


def _move_into_branches(eqn: JaxprEqn, reads: Reads) -> JaxprEqn:
    branches = tuple(_read_in(branch, reads[1:]) for branch in eqn.params["branches"])
    return eqn.replace(invars=_list_operands(eqn.invars, reads), params={**eqn.params, "branches": branches})


def _move_into_while(eqn: JaxprEqn, reads: Reads) -> JaxprEqn:
    first = eqn.params["cond_nconsts"]
    start = first + eqn.params["body_nconsts"]
    reads = [*reads[:start], *[None] * len(reads[start:])]  # carried values stay
    of_test, of_body, carried = reads[:first], reads[first:start], reads[start:]
    params = {
        **eqn.params,
        "cond_jaxpr": _read_in(eqn.params["cond_jaxpr"], [*of_test, *carried]),
        "body_jaxpr": _read_in(eqn.params["body_jaxpr"], [*of_body, *carried]),
        "cond_nconsts": len(_expand(of_test, of_test)),
        "body_nconsts": len(_expand(of_body, of_body)),
    }
    return eqn.replace(invars=_list_operands(eqn.invars, reads), params=params)


def _move_into_scan(eqn: JaxprEqn, reads: Reads) -> JaxprEqn:
    # Traced anew, because the parameters of a scan differ between versions of JAX.
    consts, carried = scan_parts(eqn)
    stacked = consts + carried
    reads = [None if consts <= i < stacked else read for i, read in enumerate(reads)]
    inner = _read_in(eqn.params["jaxpr"], reads)
    sizes = [len(_list_operands(eqn.invars[part], reads[part])) for part in (slice(consts), slice(consts, stacked))]
    operands, body = _list_operands(eqn.invars, reads), body_of(inner)
    run = jaxpr_as_fun(inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(body, ()))

    def scan_again(*values: Any) -> Any:
        first, start = sizes[0], sum(sizes)

        def step(carry: Any, xs: Any) -> Any:
            out = run(*values[:first], *carry, *xs)
            return out[:carried], out[carried:]

        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        return lax.scan(step, list(values[first:start]), list(values[start:]), **options)

    avals: list[Any] = [atom.aval for atom in operands]
    traced = jax.make_jaxpr(scan_again)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]).jaxpr
    (again,) = traced.eqns
    actual: dict[Any, Atom] = dict(zip(traced.invars, operands, strict=True))
    return eqn.replace(invars=[actual[atom] for atom in again.invars], params=again.params)


_MOVERS = {
    "jit": _move_into_call,
    "remat2": _move_into_call,
    "cond": _move_into_branches,
    "while": _move_into_while,
    "scan": _move_into_scan,
}
