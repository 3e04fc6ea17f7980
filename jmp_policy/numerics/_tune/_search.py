"""Delta debugging in the order of a ranking: finds a smallest set of items that an oracle accepts."""

import math
from collections.abc import Callable
from typing import NamedTuple

Oracle = Callable[[frozenset[int]], float]
"""Returns the error with a set of items kept. Keeping more items must not make it larger."""


class SearchResult(NamedTuple):
    """The result of a search."""

    kept: frozenset[int]  # the smallest accepted set found, or all items if no smaller set was accepted
    is_minimal: bool  # True if no item can be left out. False if the budget ran out first
    trials: int  # the number of calls of the oracle


def find_smallest(oracle: Oracle, count: int, tolerance: float, *, budget: int | None = None) -> SearchResult:
    """Finds an accepted set from which no item can be left out. Item 0 is the most suspicious; nan is rejected.

    Each trial keeps a prefix of the undecided items and leaves the others out. If the error stays within the tolerance,
    these are not needed. Otherwise a binary search finds the last item that is needed. Prefix lengths are split at
    their geometric mean, because the ranking puts needed items first. All items together are taken as accepted.

    Source: delta debugging after Zeller and Hildebrandt, Simplifying and Isolating Failure-Inducing Input, 2002.
    """
    needed: frozenset[int] = frozenset()
    enough, short = count, -1  # lengths of the shortest accepted prefix and of the longest rejected one, if any
    size, dropped = count, 0  # how many items to leave out next, and how many were since the last needed item
    trials = 0
    while enough:
        if trials == budget:
            return SearchResult(needed.union(range(enough)), False, trials)
        if short < 0:
            tried = max(0, enough - size)
        else:
            tried = min(max(short + 1, math.isqrt((short + 1) * (enough + 1))), enough - 1)
        trials += 1
        if oracle(needed.union(range(tried))) <= tolerance:
            size, dropped, enough = 4 * (enough - tried), dropped + enough - tried, tried
        else:
            short = tried
        if short == enough - 1 >= 0:
            enough, short = short, -1
            needed |= {enough}
            size, dropped = max(1, min(2 * dropped, enough // 2)), 0
    return SearchResult(needed, True, trials)
