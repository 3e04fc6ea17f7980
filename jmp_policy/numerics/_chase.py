"""Follows a non-finite result back to the value where it began, inside a compiled program."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._base import vary_everywhere
from ._extremes import INFINITY, MOST_LOOPS, NEVER, Extremes, decode_key
from ._nonfinite_graph import CONSTANT, NONE, Graph
from ._origin import FINITE, FOUND, INFINITE, NAN, NOT_REPRODUCED, UNUSED, NonfiniteOrigin


class Visit(NamedTuple):
    """A value and the iteration in which it was not finite, as int32."""

    value: jax.Array  # its row
    kind: jax.Array  # `NAN` or `INFINITE`; `FINITE` for none
    turns: jax.Array  # the iterations of the merged loops, of shape `(MOST_LOOPS,)`


def chase_origin(graph: Graph, record: Extremes) -> NonfiniteOrigin:
    """Finds the origin of the first non-finite result.

    Goes from each value to an operand that is nan, or else to one that is infinite, until all operands are finite. If
    that is an infinity, the last op that made a nan on the way is the origin, and the infinity is the cause. If an op
    makes an infinity at a zero, and the zero is the reciprocal of an earlier infinity, the origin of that one is the
    cause.
    """
    program = Visit(jnp.int32(len(graph.start) - 2), jnp.int32(_PROGRAM), jnp.zeros(MOST_LOOPS, jnp.int32))
    tables, program = vary_everywhere((Graph(*map(jnp.asarray, graph)), program))  # type: ignore[arg-type]
    root, made = _chase(tables, record, program)
    # A scale is infinite for an array with a nan: then the nan that it was made of is the origin.
    is_made = (root.kind == INFINITE) & (made.kind == NAN)
    origin = _select_visit(is_made, made, root)
    earlier, _ = _chase(tables, record, _find_vanished(tables, record, origin))
    cause = _select_visit(is_made, root, earlier)
    cause = cause._replace(kind=jnp.where(is_made | (origin.kind == INFINITE), cause.kind, FINITE))
    places = jax.tree.map(lambda *parts: jnp.stack(parts), origin, cause)
    texts, turns, ranges = jax.vmap(functools.partial(_describe_visit, tables, record))(places)
    status = jnp.where(origin.kind == FINITE, NOT_REPRODUCED, FOUND)
    return NonfiniteOrigin(status.astype(jnp.int32), texts, places.kind, turns, ranges)


def _select_visit(condition: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(functools.partial(jnp.where, condition), one, other)


_PROGRAM = 3
"""The kind of the start node; its operands are the results of the jaxpr."""


@jax.jit  # traced once for both ways
def _chase(graph: Graph, record: Extremes, start: Visit) -> tuple[Visit, Visit]:
    """Returns the value whose operands were all finite, and the last nan on the way that was made of an infinity."""

    def go(state: tuple[Visit, Visit, Visit]) -> tuple[Visit, Visit, Visit]:
        _, here, made = state
        operand = _choose_operand(graph, record, here)
        return here, operand, _select_visit((here.kind == NAN) & (operand.kind == INFINITE), here, made)

    nowhere = start._replace(kind=jnp.full_like(start.kind, FINITE))
    root, _, made = lax.while_loop(lambda state: state[1].kind != FINITE, go, (nowhere, start, nowhere))
    return root._replace(kind=jnp.where(root.kind == _PROGRAM, FINITE, root.kind)), made


def _find_vanished(graph: Graph, record: Extremes, origin: Visit) -> Visit:
    """Finds an infinity whose reciprocal is the zero at which `origin` made an infinity, if there is one."""
    ends = jnp.stack([record.low, record.high])
    has_zero = jnp.any(decode_key(ends, graph.is_half) == 0, axis=0)

    def choose(edge: jax.Array, chosen: tuple[Visit, Visit], here: Visit) -> tuple[Visit, Visit]:
        value = graph.target[edge]
        (_, _), (score, infinite) = _weigh(graph, record, here, edge)
        infinite = infinite._replace(turns=record.first[value, 1])
        # The iteration in which it was zero is not recorded, so take any.
        zero = Visit(value, jnp.int32(INFINITE), jnp.full_like(here.turns, NEVER))
        takes = has_zero[value], graph.is_reciprocal[here.value] & (score > 0)
        pairs = zip(takes, (zero, infinite), chosen, strict=True)
        return tuple(_select_visit(take, new, old) for take, new, old in pairs)  # type: ignore[return-value]

    def goes_on(state: tuple[jax.Array, Visit, Visit]) -> jax.Array:
        steps, here, found = state
        return (steps < _MOST_STEPS) & (here.kind != FINITE) & (found.kind == FINITE)

    def go(state: tuple[jax.Array, Visit, Visit]) -> tuple[jax.Array, Visit, Visit]:
        steps, here, nowhere = state
        consider = functools.partial(choose, here=here)
        edges = graph.start[here.value], graph.start[here.value + 1]
        return steps + 1, *lax.fori_loop(*edges, consider, (nowhere, nowhere))

    nowhere = origin._replace(kind=jnp.full_like(origin.kind, FINITE))
    return lax.while_loop(goes_on, go, (jnp.int32(0), origin, nowhere))[2]


_MOST_STEPS = 16
"""Maximum number of values between an infinity and the zero of its reciprocal."""


def _choose_operand(graph: Graph, record: Extremes, place: Visit) -> Visit:
    """Chooses the next operand: one that was not finite in the same iteration or before."""

    def consider(edge: jax.Array, best: tuple[jax.Array, Visit]) -> tuple[jax.Array, Visit]:
        for found in _weigh(graph, record, place, edge):
            best = _select_visit(found[0] > best[0], found, best)
        return best

    nowhere = jnp.zeros_like(place.kind), place._replace(kind=jnp.full_like(place.kind, FINITE))
    return lax.fori_loop(graph.start[place.value], graph.start[place.value + 1], consider, nowhere)[1]


def _weigh(graph: Graph, record: Extremes, place: Visit, edge: jax.Array) -> list[tuple[jax.Array, Visit]]:
    """Scores an operand as a nan and as an infinity; 0 if it was not so by that iteration.

    | an operand that is | is the likely source of a nan | of an infinity |
    |---|---|---|
    | nan | first | last |
    | infinity | second | first |
    | minus infinity, often a mask | third | second |
    | infinity in a constant, such as a bound or a mask | last | third |
    """
    value = graph.target[edge]
    first, is_positive = record.first[value], record.high[value] == INFINITY
    infinite = jnp.where(graph.is_constant[value], _FOURTH, jnp.where(is_positive, _SECOND, _THIRD))
    scores = jnp.where(place.kind == INFINITE, _LAST, _FIRST), infinite
    # Among the results, take the first that is not finite: the loss comes before its gradients.
    later = graph.start[place.value + 1] - edge
    before_others = jnp.where(place.kind == _PROGRAM, _FIRST * later, 0)
    # In loops around both values, stay in the same iteration: the operand may be infinite in every iteration.
    stays = (jnp.arange(MOST_LOOPS, dtype=jnp.int32) < graph.common[edge]) & ~graph.carried[edge]
    weighed = []
    for kind, turns, score in zip((NAN, INFINITE), first, scores, strict=True):
        is_so = (turns[0] != NEVER) & _is_before(turns, place.turns, graph.common[edge], graph.carried[edge])
        other = Visit(value, jnp.int32(kind), jnp.where(stays, place.turns, turns))
        weighed.append((jnp.where(is_so, score + before_others, 0), other))
    return weighed


_LAST, _FOURTH, _THIRD, _SECOND, _FIRST = range(1, 6)
"""Scores of `_weigh`, the lowest first."""


def _is_before(turns: jax.Array, others: jax.Array, count: jax.Array, strictly: jax.Array) -> jax.Array:
    """True if the first `count` iterations come before `others`, or are equal unless `strictly`."""
    is_less, is_equal = jnp.array(False), jnp.array(True)
    for i in range(MOST_LOOPS):
        is_used = i < count
        is_less |= is_used & is_equal & (turns[i] < others[i])
        is_equal &= ~is_used | (turns[i] == others[i])
    return is_less | (is_equal & ~strictly)


def _describe_visit(graph: Graph, record: Extremes, place: Visit) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the text, the iterations and the operand ranges of a `NonfiniteOrigin`."""
    value, is_used = place.value, place.kind != FINITE
    text = graph.texts[graph.text[value]]

    # For a merged loop, the iteration is in `place`.
    turns, loop, last = graph.turns[value], -2 - graph.turns[value], graph.last[value]
    run = jnp.where(last >= 0, last - place.turns, place.turns)
    turns = jnp.where(loop >= 0, run[jnp.clip(loop, 0, MOST_LOOPS - 1)], turns)

    operands, scales, shifts = (table[value][None] for table in (graph.operands, graph.scales, graph.shifts))
    is_half, is_constant = graph.is_half[operands], operands == CONSTANT
    keys = jnp.concatenate([record.low[operands], record.high[operands]])
    is_known = is_constant | ((operands >= 0) & (keys[:1] <= keys[1:]))
    numbers = jnp.where(is_constant, 0, decode_key(keys, is_half) * scales) + shifts
    numbers = jnp.where(scales < 0, numbers[::-1], numbers)
    crossed = jnp.array([[jnp.inf], [-jnp.inf]], jnp.float32)
    bits = lax.bitcast_convert_type(jnp.where(is_known, numbers, crossed), jnp.int32)
    ranges = jnp.where(operands == NONE, UNUSED, bits).T
    return jnp.where(is_used, text, 0), jnp.where(is_used, turns, UNUSED), jnp.where(is_used, ranges, UNUSED)
