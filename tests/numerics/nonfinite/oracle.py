"""Where non-finite numbers come from, found by running a program on the host: each value carries its origin along.

This looks forward, number by number, where `first_nonfinite` looks back, tensor by tensor. They share
only what reads the programs of equations.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

from jmp_policy._jaxpr import float_dtype, name_stack, sub_jaxprs
from jmp_policy._jaxpr._program import body_of, scan_parts


class Origin(NamedTuple):
    """What made a number that is not finite: an operation, or an argument of the program by its index."""

    kind: str
    primitive: str = ""
    direction: str = "forward"
    turns: tuple[int, ...] = ()
    operands: tuple[tuple[float, float] | None, ...] = ()
    argument: int | None = None
    cause: "Origin | None" = None


class Noted(NamedTuple):
    """A value, and where what is not finite in it came from."""

    value: Any
    origin: Origin | None = None


class Place(NamedTuple):
    """What is around an equation: name stacks, and turns of loops."""

    stack: str = ""
    turns: tuple[int, ...] = ()


def find_origin(fun: Any, *args: Any) -> Origin | None:
    """The origin of the first result that is not finite."""
    program = jax.make_jaxpr(fun)(*args)
    leaves = [Noted(leaf, _find_argument(i, leaf)) for i, leaf in enumerate(jax.tree.leaves(args))]
    return next((noted.origin for noted in _run(program, leaves, Place()) if noted.origin), None)


def _find_argument(index: int, value: Any) -> Origin | None:
    kind = _find_kind(value)
    return Origin(kind, argument=index) if kind else None


def _run(program: Any, args: list[Noted], place: Place) -> list[Noted]:
    body = body_of(program)
    values = dict(zip(body.constvars, map(Noted, getattr(program, "consts", ())), strict=True))
    values.update(zip(body.invars, args, strict=True))
    read = lambda atom: Noted(atom.val) if isinstance(atom, Literal) else values[atom]
    for eqn in body.eqns:
        inner = place._replace(stack=f"{place.stack}/{name_stack(eqn)}")
        results = _WRITERS.get(eqn.primitive.name, _operate)(eqn, [*map(read, eqn.invars)], inner)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def _operate(eqn: Any, operands: list[Noted], place: Place) -> list[Noted]:
    made = eqn.primitive.bind(*(noted.value for noted in operands), **eqn.primitive.get_bind_params(eqn.params))
    results = made if eqn.primitive.multiple_results else [made]
    return [Noted(result, _judge(eqn, operands, result, place)) for result in results]


def _judge(eqn: Any, operands: list[Noted], result: Any, place: Place) -> Origin | None:
    """The origin of a result: that of an operand which has the like where the result does, else this equation."""
    kind = _find_kind(result)
    if not kind:
        return None
    test = np.isnan if kind == "nan" else np.isinf
    bad = test(_widen(result))
    seen = [(noted.origin, _widen(noted.value)) for noted in operands if noted.origin]
    seen = [(origin, value[bad] if value.shape == bad.shape else value) for origin, value in seen]
    for origin, value in seen:
        if test(value).any() or np.isnan(value).any():  # an infinity may stand for a nan, as in a scale
            return origin
    moves = eqn.primitive.name in ("broadcast_in_dim", "convert_element_type")
    if moves and not seen and test(_widen(operands[0].value)).any():  # it stands in the program
        return None
    cause = next((origin for origin, value in seen if np.isinf(value).any()), None)
    if cause is not None and cause.kind == "nan":
        return cause
    ranges = tuple(
        _find_range(noted.value) if float_dtype(atom) is not None else None
        for atom, noted in zip(eqn.invars, operands, strict=True)
    )
    return Origin(kind, eqn.primitive.name, _find_direction(place.stack), place.turns, ranges, cause=cause)


def _find_direction(stack: str) -> str:
    if "transpose(" not in stack:
        return "forward"
    return "recomputed" if "rematted_computation" in stack else "backward"


def _find_kind(value: Any) -> str:
    if not jax.numpy.issubdtype(getattr(value, "dtype", int), jax.numpy.inexact):
        return ""
    wide = _widen(value)
    return "nan" if np.isnan(wide).any() else "inf" if np.isinf(wide).any() else ""


def _find_range(value: Any) -> tuple[float, float]:
    wide = _widen(value)
    return float(wide.min()), float(wide.max())


def _widen(value: Any) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _call(eqn: Any, operands: list[Noted], place: Place) -> list[Noted]:
    return _run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), operands, place)


def _scan(eqn: Any, operands: list[Noted], place: Place) -> list[Noted]:
    program, length = eqn.params["jaxpr"], eqn.params["length"]
    consts, carried = scan_parts(eqn)
    carry, xs = operands[consts : consts + carried], operands[consts + carried :]
    ys: list[Any] = [None] * length
    for turn in reversed(range(length)) if eqn.params["reverse"] else range(length):
        slices = [Noted(x.value[turn], x.origin if _find_kind(x.value[turn]) else None) for x in xs]
        inner = place._replace(turns=(*place.turns, turn))
        out = _run(program, [*operands[:consts], *carry, *slices], inner)
        carry, ys[turn] = out[:carried], out[carried:]
    stacked = []
    for i in range(len(ys[0])):
        values = [y[i] for y in ys]
        origin = next((noted.origin for noted in values if noted.origin), None)
        stacked.append(Noted(jax.numpy.stack([noted.value for noted in values]), origin))
    return [*carry, *stacked]


def _while(eqn: Any, operands: list[Noted], place: Place) -> list[Noted]:
    params = eqn.params
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry, turn = operands[start:], 0
    while _run(params["cond_jaxpr"], [*operands[:first], *carry], place)[0].value:
        inner = place._replace(turns=(*place.turns, turn))
        carry, turn = _run(params["body_jaxpr"], [*operands[first:start], *carry], inner), turn + 1
    return carry


def _cond(eqn: Any, operands: list[Noted], place: Place) -> list[Noted]:
    branches = eqn.params["branches"]
    if eqn.params.get("branches_platforms") is not None:
        chosen = next(i for i, body in enumerate(sub_jaxprs(eqn)) if body.trips)
    else:
        chosen = int(np.clip(int(operands[0].value), 0, len(branches) - 1))
    return _run(branches[chosen], operands[1:], place)


_WRITERS = {
    "jit": _call,
    "closed_call": _call,
    "eval_jaxpr": _call,
    "remat2": _call,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
