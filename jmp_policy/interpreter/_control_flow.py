"""Equations that have programs of their own: loops, branches, calls.

Each is written again as it was traced, with other bodies; names, shardings, layouts, donation, policies and the
structure of arguments stay, because only dtypes change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import JaxprEqn

from ._body import Body
from ._jaxpr import Program, body_of, scan_parts
from ._kind import Kind, Value
from ._rule import Context

if TYPE_CHECKING:
    from ._rewriter import Rewriter


def _call(parameter: str) -> Any:
    """An equation that runs one body once, with the equation's values as arguments."""

    def write(rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
        inner = rewriter.rewrite(eqn.params[parameter], _kinds(values), context)
        return body.append(eqn, _atoms(values), inner.kinds, {**eqn.params, parameter: inner.program})

    return write


def _scan(rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
    program = eqn.params["jaxpr"]
    consts, carried = scan_parts(eqn, values)
    kinds = list(_kinds(values))
    end = consts + carried
    others = [None] * (len(eqn.outvars) - carried)
    kinds[consts:end] = _carry(
        rewriter,
        program,
        kinds[consts:end],
        consts,
        lambda carry: (
            rewriter.rewrite(
                program, [*kinds[:consts], *carry, *kinds[end:]], context, [*_dtypes(carry), *others]
            ).made
        ),
    )
    inner = rewriter.rewrite(program, kinds, context, [*_dtypes(kinds[consts:end]), *others])
    results = (*kinds[consts:end], *inner.kinds[carried:])
    return body.append(eqn, _entering(values, kinds, eqn, body), results, {**eqn.params, "jaxpr": inner.program})


def _while(rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
    params = eqn.params
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    kinds = list(_kinds(values))
    kinds[start:] = _carry(
        rewriter,
        params["body_jaxpr"],
        kinds[start:],
        start - first,
        lambda carry: (
            rewriter.rewrite(params["body_jaxpr"], [*kinds[first:start], *carry], context, _dtypes(carry)).made
        ),
    )
    inner = rewriter.rewrite(params["body_jaxpr"], kinds[first:], context, _dtypes(kinds[start:]))
    test = rewriter.rewrite(params["cond_jaxpr"], [*kinds[:first], *kinds[start:]], context)
    changed = {**params, "body_jaxpr": inner.program, "cond_jaxpr": test.program}
    return body.append(eqn, _entering(values, kinds, eqn, body), kinds[start:], changed)


def _cond(rewriter: Rewriter, eqn: JaxprEqn, values: list[Value], body: Body, context: Context) -> list[Value]:
    branches, kinds = eqn.params["branches"], _kinds(values)[1:]
    taken = [rewriter.rewrite(branch, kinds, context).kinds for branch in branches]
    joined = [rewriter.rule.join(kinds) for kinds in zip(*taken, strict=True)]
    inner = [rewriter.rewrite(branch, kinds, context, _dtypes(joined)).program for branch in branches]
    return body.append(eqn, _atoms(values), joined, {**eqn.params, "branches": tuple(inner)})


def _carry(rewriter: Rewriter, program: Program, kinds: Sequence[Kind], consts: int, turn: Any) -> list[Kind]:
    """The kinds of a carry that come back as they went in: `turn` gives those after one turn of the loop."""
    accumulators = _accumulators(body_of(program), consts, len(kinds))
    carry = [rewriter.rule.accumulated(kind) if i in accumulators else kind for i, kind in enumerate(kinds)]
    while True:
        after = turn(carry)[: len(carry)]
        joined = [rewriter.rule.join(pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _accumulators(body: Any, consts: int, count: int) -> set[int]:
    """Which values of a carry are only added to, once a turn."""
    carried = {var: i for i, var in enumerate(body.invars[consts : consts + count])}
    uses: dict[Any, int] = {}
    for eqn in body.eqns:
        for atom in eqn.invars:
            if not hasattr(atom, "val"):
                uses[atom] = uses.get(atom, 0) + 1
    for atom in body.outvars:
        if not hasattr(atom, "val"):
            uses[atom] = uses.get(atom, 0) + 1
    found = set()
    for eqn in body.eqns:
        if eqn.primitive.name not in ("add", "add_any"):
            continue
        for atom in eqn.invars:
            i = None if hasattr(atom, "val") else carried.get(atom)
            if i is not None and uses[atom] == 1 and body.outvars[i] is eqn.outvars[0] and uses[eqn.outvars[0]] == 1:
                found.add(i)
    return found


def _entering(values: list[Value], kinds: Sequence[Kind], eqn: JaxprEqn, body: Body) -> list[Any]:
    return [
        value.atom if kind.dtype is None else body.cast(value.atom, kind.dtype, eqn)
        for value, kind in zip(values, kinds, strict=True)
    ]


def _kinds(values: Sequence[Value]) -> tuple[Kind, ...]:
    return tuple(value.kind for value in values)


def _atoms(values: Sequence[Value]) -> list[Any]:
    return [value.atom for value in values]


def _dtypes(kinds: Sequence[Kind]) -> list[np.dtype | None]:
    return [kind.dtype for kind in kinds]


CONTROL_FLOW: dict[str, Any] = {
    "jit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "remat2": _call("jaxpr"),
    "shard_map": _call("jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
