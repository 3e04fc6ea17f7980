"""The way back from a result that is not finite to the value that began it, inside of a compiled program."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._extremes import INFINITY, MOST_LOOPS, NEVER, Extremes, decode_key
from ._graph import CONSTANT, NONE, Graph
from ._provenance import FINITE, FOUND, INFINITE, NAN, NOT_REPRODUCED, UNUSED, Provenance


class Place(NamedTuple):
    """A value on the way.

    Attributes:
      value: which, an int32 scalar.
      kind: `NAN` or `INFINITE`; `FINITE` for nowhere.
      turns: when, of the loops whose turns have no rows of their own: int32 of shape `(MOST_LOOPS,)`.
    """

    value: jax.Array
    kind: jax.Array
    turns: jax.Array


def find_origin(graph: Graph, record: Extremes) -> Provenance:
    """Finds the origin of the first result of a program that is not finite.

    From value to value it goes to an operand that is a nan, or where none is, to one that is infinite. Where a nan was
    made of infinities, that is the origin, and theirs is its cause. So what never got into a result is never blamed.

    Args:
      graph: the values of the program.
      record: what was measured of them.
    """
    values = _Values(graph, record)
    results = values.choose(Place(jnp.int32(len(graph.start) - 2), jnp.int32(NAN), jnp.zeros(MOST_LOOPS, jnp.int32)))
    origin, operand = values.chase(results)
    cause, _ = values.chase(operand)
    places = jax.tree.map(lambda *parts: jnp.stack(parts), origin, cause)
    texts, turns, ranges = jax.vmap(values.describe)(places)
    status = jnp.where(origin.kind == FINITE, NOT_REPRODUCED, FOUND)
    return Provenance(status.astype(jnp.int32), texts, places.kind, turns, ranges)


class _Values:
    """The values of a program: its tables, and what was measured, as arrays of a traced function."""

    def __init__(self, graph: Graph, record: Extremes):
        self._graph = Graph(*map(jnp.asarray, graph))  # type: ignore[arg-type]
        self._record = record

    def choose(self, place: Place) -> Place:
        """The operand to go to from a value: one that is not finite either, at that time or before."""
        start, end = (self._graph.start[place.value + i] for i in (0, 1))

        def consider(edge: jax.Array, best: tuple[jax.Array, Place]) -> tuple[jax.Array, Place]:
            for score, other in self._weigh(edge, place):
                best = jax.tree.map(lambda new, old: jnp.where(score > best[0], new, old), (score, other), best)  # noqa: B023
            return best

        nowhere = jnp.int32(0), place._replace(kind=jnp.int32(FINITE))
        end = jnp.where(place.kind == FINITE, start, end)
        return lax.fori_loop(start, end, consider, nowhere)[1]

    def chase(self, start: Place) -> tuple[Place, Place]:
        """Goes back from a value to its origin.

        Returns:
          The origin, and the infinite operand that it made a nan of; `FINITE` if it did not.
        """

        def goes_on(state: tuple[Place, Place]) -> jax.Array:
            here, operand = state
            is_made = (here.kind == NAN) & (operand.kind == INFINITE)
            return (operand.kind != FINITE) & ~is_made

        return lax.while_loop(goes_on, lambda state: (state[1], self.choose(state[1])), (start, self.choose(start)))

    def describe(self, place: Place) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The text, the turns and the ranges of the operands of a place, as a `Provenance` has them."""
        graph, value = self._graph, place.value
        text = graph.texts[graph.text[value]]

        # Of a loop whose turns have no rows of their own, the turn is that of the place.
        turns, loop = graph.turns[value], -2 - graph.turns[value]
        last = graph.last[value]
        run = jnp.where(last >= 0, last - place.turns, place.turns)
        turns = jnp.where(loop >= 0, run[jnp.clip(loop, 0, MOST_LOOPS - 1)], turns)

        operands, constants = graph.operands[value], graph.constants[value]
        both = self._record.low, self._record.high
        numbers = [decode_key(keys[operands], graph.is_half[operands]) for keys in both]
        low, high = (jnp.where(operands == CONSTANT, constants, number) for number in numbers)
        is_known = (operands >= 0) & (self._record.low[operands] <= self._record.high[operands])
        is_known |= operands == CONSTANT
        low, high = jnp.where(is_known, low, jnp.inf), jnp.where(is_known, high, -jnp.inf)
        bits = lax.bitcast_convert_type(jnp.stack([low, high], 1), jnp.int32)
        ranges = jnp.where((operands == NONE)[:, None], UNUSED, bits)

        is_used = place.kind != FINITE
        return jnp.where(is_used, text, 0), jnp.where(is_used, turns, UNUSED), jnp.where(is_used, ranges, UNUSED)

    def _weigh(self, edge: jax.Array, place: Place) -> list[tuple[jax.Array, Place]]:
        """An operand as a nan and as an infinity, each with a score; 0 if it was not that by then."""
        graph = self._graph
        value = graph.target[edge]
        first, is_positive = self._record.first[value], self._record.high[value] == INFINITY
        infinite = jnp.where(is_positive, 3, 2)  # a mask is minus infinity more often than what overflowed
        scores = {NAN: jnp.where(place.kind == NAN, 4, 1), INFINITE: infinite}
        weighed = []
        for kind, score in scores.items():
            turns = first[kind - 1]
            is_by_then = _is_before(turns, place.turns, graph.common[edge], graph.carried[edge])
            ok = (turns[0] != NEVER) & is_by_then
            # In the loops that both are in, it is the same turn: what is infinite in each of them may do harm in one.
            same = (jnp.arange(MOST_LOOPS) < graph.common[edge]) & ~graph.carried[edge]
            other = Place(value, jnp.int32(kind), jnp.where(same, place.turns, turns))
            weighed.append((jnp.where(ok, score, 0), other))
        return weighed


def _is_before(turns: jax.Array, others: jax.Array, count: jax.Array, strictly: jax.Array) -> jax.Array:
    """Whether the first `count` turns come before others, or are the same if that is enough."""
    is_less, is_equal = jnp.array(False), jnp.array(True)
    for i in range(MOST_LOOPS):
        is_used = i < count
        is_less |= is_used & is_equal & (turns[i] < others[i])
        is_equal &= ~is_used | (turns[i] == others[i])
    return is_less | (is_equal & ~strictly)
