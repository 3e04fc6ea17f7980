"""Equations that have programs of their own: loops, branches, calls.

Each is written again as it was traced, with other bodies. Names, shardings, layouts, donation, policies and the
structure of arguments stay, because only dtypes change.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jax.extend.core import JaxprEqn

from ._program import Atom, Program, body_of, scan_parts
from ._rule import Body, Context, Kind, RewritesBodies, Value, Writer


def _make_call_writer(parameter: str) -> Writer:
    """Writes an equation that runs the body in a parameter once, with the equation's values as arguments."""

    def write_call(
        rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
    ) -> list[Value]:
        inner = rewriter.rewrite(eqn.params[parameter], _list_kinds(values), context)
        return body.append(eqn, _list_atoms(values), inner.kinds, {**eqn.params, parameter: inner.program})

    return write_call


def _write_scan(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value]:
    program = eqn.params["jaxpr"]
    consts, carried = scan_parts(eqn, values)
    kinds = _list_kinds(values)
    end = consts + carried
    others = [None] * (len(eqn.outvars) - carried)

    # The carry first: one turn for a guess of its kinds tells what comes back, until that is what went in.
    def turn(carry: Sequence[Kind]) -> Sequence[Kind]:
        arguments = [*kinds[:consts], *carry, *kinds[end:]]
        return rewriter.rewrite(program, arguments, context, [*_list_dtypes(carry), *others]).made

    kinds[consts:end] = _settle_carry(rewriter, program, kinds[consts:end], consts, turn)
    # Then the body once more, with a carry that comes back in the dtypes that it goes in.
    inner = rewriter.rewrite(program, kinds, context, [*_list_dtypes(kinds[consts:end]), *others])
    stacked = tuple(rewriter.rule.stacked(eqn, inner.kinds[carried:], context))
    if stacked != inner.kinds[carried:]:
        inner = rewriter.rewrite(program, kinds, context, _list_dtypes([*kinds[consts:end], *stacked]))
    results = (*kinds[consts:end], *stacked)
    return body.append(eqn, body.cast_values(values, kinds, eqn), results, {**eqn.params, "jaxpr": inner.program})


def _write_while(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value]:
    params, program = eqn.params, eqn.params["body_jaxpr"]
    first, start = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    kinds = _list_kinds(values)

    def turn(carry: Sequence[Kind]) -> Sequence[Kind]:
        return rewriter.rewrite(program, [*kinds[first:start], *carry], context, _list_dtypes(carry)).made

    kinds[start:] = _settle_carry(rewriter, program, kinds[start:], start - first, turn)
    inner = rewriter.rewrite(program, kinds[first:], context, _list_dtypes(kinds[start:]))
    test = rewriter.rewrite(params["cond_jaxpr"], [*kinds[:first], *kinds[start:]], context)
    changed = {**params, "body_jaxpr": inner.program, "cond_jaxpr": test.program}
    return body.append(eqn, body.cast_values(values, kinds, eqn), kinds[start:], changed)


def _write_cond(
    rewriter: RewritesBodies, eqn: JaxprEqn, values: list[Value], body: Body, context: Context
) -> list[Value]:
    branches, kinds = eqn.params["branches"], _list_kinds(values)[1:]
    # Each branch by itself tells what it makes; then all of them make what that is together.
    taken = [rewriter.rewrite(branch, kinds, context).kinds for branch in branches]
    joined = [rewriter.rule.join(kinds) for kinds in zip(*taken, strict=True)]
    inner = [rewriter.rewrite(branch, kinds, context, _list_dtypes(joined)).program for branch in branches]
    return body.append(eqn, _list_atoms(values), joined, {**eqn.params, "branches": tuple(inner)})


def _settle_carry(
    rewriter: RewritesBodies,
    program: Program,
    kinds: Sequence[Kind],
    consts: int,
    turn: Callable[[Sequence[Kind]], Sequence[Kind]],
) -> list[Kind]:
    """Finds the kinds of a carry that come back as they went in.

    Args:
      rewriter: it has the rule.
      program: the body of the loop.
      kinds: the kinds of what the loop starts with.
      consts: how many arguments of the body stand before the carry.
      turn: gives the kinds after one turn of the loop, for those before it.
    """
    accumulators = rewriter.rule.accumulators(body_of(program), range(consts, consts + len(kinds)))
    carry = [rewriter.rule.accumulated(kind) if i in accumulators else kind for i, kind in enumerate(kinds)]
    while True:
        after = turn(carry)[: len(carry)]
        joined = [rewriter.rule.join(pair) for pair in zip(carry, after, strict=True)]
        if joined == carry:
            return carry
        carry = joined


def _list_kinds(values: Sequence[Value]) -> list[Kind]:
    return [value.kind for value in values]


def _list_atoms(values: Sequence[Value]) -> list[Atom]:
    return [value.atom for value in values]


def _list_dtypes(kinds: Sequence[Kind]) -> list[np.dtype | None]:
    return [kind.dtype for kind in kinds]


CONTROL_FLOW: Mapping[str, Writer] = {
    "jit": _make_call_writer("jaxpr"),
    "closed_call": _make_call_writer("call_jaxpr"),
    "eval_jaxpr": _make_call_writer("call_jaxpr"),  # as `closed_call` is named from JAX 0.12 on
    "remat2": _make_call_writer("jaxpr"),
    "shard_map": _make_call_writer("jaxpr"),
    "scan": _write_scan,
    "while": _write_while,
    "cond": _write_cond,
}
"""How each equation with programs of its own is written."""
