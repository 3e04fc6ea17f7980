"""A program run on the host, equation by equation, that notes each floating value: what records are compared with."""

from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

# The package `_jaxpr` has no public names: what it computes is seen outside only through slower programs.
from jmp_policy._jaxpr import float_dtype, sub_jaxprs
from jmp_policy._jaxpr._program import body_of, list_live, scan_parts


class CannotReplay(Exception):
    """A program has references, or runs on several devices."""


def replay(program: Any, args: Any) -> list[tuple[str, tuple[int, ...], np.ndarray]]:
    """The operation, the turns of the loops around it and the value, of each floating result in order."""
    notes: list[tuple[str, tuple[int, ...], np.ndarray]] = []
    _run(program, args, notes, ())
    return notes


def _run(program, args, notes, turns):
    body = body_of(program)
    values = dict(zip(body.constvars, getattr(program, "consts", ()), strict=True))
    values.update(zip(body.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
    live = set(map(id, list_live(body)))
    for eqn in body.eqns:
        if any("Ref" in type(atom.aval).__name__ for atom in (*eqn.invars, *eqn.outvars)):
            raise CannotReplay
        seen = notes if id(eqn) in live else []
        results = _WRITERS.get(eqn.primitive.name, _operate)(eqn, [*map(read, eqn.invars)], seen, turns)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def _operate(eqn, operands, notes, turns):
    made = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    results = made if eqn.primitive.multiple_results else [made]
    for var, result in zip(eqn.outvars, results, strict=True):
        if float_dtype(var) is not None and str(var) != "_":
            notes.append((eqn.primitive.name, turns, np.asarray(result, np.float64)))
    return results


def _call(eqn, operands, notes, turns):
    return _run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), operands, notes, turns)


def _scan(eqn, operands, notes, turns):
    program, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, carried = scan_parts(eqn)
    carry, xs = operands[consts : consts + carried], operands[consts + carried :]
    ys: list[Any] = [None] * length
    for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
        out = _run(program, [*operands[:consts], *carry, *(x[turn] for x in xs)], notes, (*turns, turn))
        carry, ys[turn] = out[:carried], out[carried:]
    avals: Any = [var.aval for var in eqn.outvars[carried:]]
    stacked = [
        jax.numpy.stack([y[i] for y in ys]) if ys else jax.numpy.zeros(aval.shape, aval.dtype)
        for i, aval in enumerate(avals)
    ]
    return [*carry, *stacked]


def _while(eqn, operands, notes, turns):
    params = eqn.params
    if body_of(params["cond_jaxpr"]).outvars[0].aval.shape:
        return _operate(eqn, operands, notes, turns)
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = operands[start:]
    while _run(params["cond_jaxpr"], [*operands[:first], *carry], [], ())[0]:
        carry = _run(params["body_jaxpr"], [*operands[first:start], *carry], notes, turns)
    return carry


def _cond(eqn, operands, notes, turns):
    branches = eqn.params["branches"]
    if eqn.params.get("branches_platforms") is not None:
        chosen = next(i for i, body in enumerate(sub_jaxprs(eqn)) if body.trips)
    else:
        chosen = int(np.clip(int(operands[0]), 0, len(branches) - 1))
    return _run(branches[chosen], operands[1:], notes, turns)


def _refuse(eqn, operands, notes, turns):
    raise CannotReplay


_WRITERS = {
    "jit": _call,
    "closed_call": _call,
    "eval_jaxpr": _call,
    "remat2": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _refuse,
}
