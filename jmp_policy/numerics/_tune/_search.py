"""The search: the smallest set that an oracle accepts, by as few questions as its ranking allows.

Items are integers, the most suspicious first; an oracle says how large the error is where a set of them is kept. What
is kept may only lessen the error. Each question leaves a group out of what is kept. If the error stays within the
tolerance, all of the group are free; if not, one of them is needed, and a part of the group is left out next, until
that one is known. A group is chosen so that both answers are as likely: a belief says how likely, and learns from each.

Source: group testing where some items are more suspicious than others, after Hwang, A Generalized Binomial Group
Testing Problem, 1975; here the belief is a mixture, so that a ranking that misleads is found out and let go.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

Oracle = Callable[[frozenset[int]], float]
"""The error where the items of a set are kept."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
      kept: the smallest set that is known to be within the tolerance; all items if no smaller one was seen.
      is_minimal: whether none of them can be left out; not so if the budget was spent before that was known.
      trials: how many questions the oracle was asked.
    """

    kept: frozenset[int]
    is_minimal: bool
    trials: int


def find_smallest(
    oracle: Oracle, count: int, tolerance: float, *, likely: int | None = None, budget: int | None = None
) -> Found:
    """Finds a set that is within the tolerance, and of which no item can be left out.

    Args:
      oracle: the error where a set of items is kept; nan counts as too large. All items together are taken to be
        within the tolerance.
      count: how many items there are: 0 is the most suspicious.
      tolerance: the largest error that is accepted.
      likely: how many of the first are thought to be needed, if anything is thought.
      budget: how many questions may be asked; as many as it takes if `None`.

    >>> find_smallest(lambda kept: 0.0 if {1, 6} <= kept else 1.0, 8, 0.5).kept
    frozenset({1, 6})
    """
    if not count:
        return Found(frozenset(), True, 0)
    search = _Search(oracle, count, tolerance, likely, math.inf if budget is None else budget)
    is_minimal = search.run()
    return Found(frozenset(search.kept), is_minimal, search.trials)


class _Search:
    """One search.

    Attributes:
      kept: what is kept, and within the tolerance.
      trials: how many questions were asked.
    """

    def __init__(self, oracle: Oracle, count: int, tolerance: float, likely: int | None, budget: float):
        self._oracle, self._tolerance, self._budget = oracle, tolerance, budget
        self._belief = Belief(count, likely)
        self._open = list(range(count))  # neither free nor known to be needed
        self.kept = set(self._open)
        self.trials = 0

    def run(self) -> bool:
        """Asks until every item is free or needed, or the budget is spent; says whether it was enough."""
        group = list(self._open)  # first of all: is anything needed at all?
        while group:
            if self.trials >= self._budget:
                return False
            if self._can_spare(group):
                self._free(group)
            elif not self._find_needed(group):
                return False
            group = self._belief.choose(self._open)
        return True

    def _find_needed(self, group: list[int]) -> bool:
        """Finds a needed item in a group that has one, and frees those behind it."""
        while len(group) > 1:
            if self.trials >= self._budget:
                return False
            part = self._belief.choose_within(group)
            if self._can_spare(part):
                self._free(part)
                group = group[: -len(part)]
            else:
                group = part
        self._open.remove(group[0])
        self._belief.learn_needed(group[0])
        return True

    def _can_spare(self, group: list[int]) -> bool:
        self.trials += 1
        is_free = self._oracle(frozenset(self.kept.difference(group))) <= self._tolerance  # nan is not
        if not is_free:
            self._belief.learn_dirty(group)
        return is_free

    def _free(self, group: list[int]) -> None:
        self._belief.learn_free(group)
        self.kept.difference_update(group)
        self._open = [item for item in self._open if item in self.kept]


class Belief:
    """How likely each item is needed: a mixture of guesses, each with its own probabilities, that learns from answers.

    Half of the guesses trust the ranking: the first few are needed, and hardly any behind them. The others say that it
    means nothing. In each, items are independent, so that all that was answered is taken into account exactly, but for
    one thing: a group that is known to have a needed item is forgotten where that item was found in a part of it.

    Args:
      count: how many items there are.
      likely: how many of the first are thought to be needed, if anything is thought.
    """

    def __init__(self, count: int, likely: int | None = None):
        sizes = sorted({min(count, 2**n) for n in range(count.bit_length() + 1)} | {min(count, 3)})
        weights, rows = [], []
        for size in sizes:
            for trusts in (True, False):
                weights.append(1 / size)
                rows.append(_guess_first(count, size) if trusts else np.full(count, min(size / count, _MOST)))
        if likely:
            weights.append(sum(weights))
            rows.append(_guess_first(count, min(likely, count)))
        self._log_weights = np.log(weights)
        self._log_free = np.log1p(-np.array(rows).reshape(len(rows), count))
        self._in_doubt: tuple[int, ...] = ()

    def choose(self, items: Sequence[int]) -> list[int]:
        """The last items that are together as likely to be free as not: the least suspicious ones."""
        return self._choose_last(items, within=False)

    def choose_within(self, group: Sequence[int]) -> list[int]:
        """The same within a group of several that has a needed item; not all of them."""
        return self._choose_last(group, within=True)

    def _choose_last(self, items: Sequence[int], within: bool) -> list[int]:
        if not items:
            return []
        # By size of the part, from the last item on: how likely all of it is free, under each guess.
        log_free = np.cumsum(self._log_free[:, list(items)][:, ::-1], axis=1)
        weights = np.exp(self._log_weights - self._log_weights.max())[:, None]
        if within:
            all_free = np.exp(log_free[:, -1:])
            likely = np.sum(weights * (np.exp(log_free[:, :-1]) - all_free), 0) / np.sum(weights * (1 - all_free))
        else:
            likely = np.sum(weights * np.exp(log_free), 0) / np.sum(weights)
        size = 1 + int(np.argmin(np.abs(likely - 0.5)))
        return list(items[-size:])

    def learn_free(self, group: Sequence[int]) -> None:
        """Takes into account that all items of a group are free."""
        free = self._log_free[:, list(group)].sum(1)
        rest = [item for item in self._in_doubt if item not in group]
        if self._in_doubt and len(rest) < len(self._in_doubt):  # that something was needed there was counted before
            doubt = self._log_free[:, list(self._in_doubt)].sum(1)
            self._log_weights += np.log(-np.expm1(doubt - free)) + free - np.log(-np.expm1(doubt))
            self._in_doubt = tuple(rest)
        else:
            self._log_weights += free

    def learn_dirty(self, group: Sequence[int]) -> None:
        """Takes into account that an item of a group is needed; it may be a part of the last such group."""
        free = self._log_free[:, list(group)].sum(1)
        self._log_weights += np.log(-np.expm1(free))
        if self._in_doubt:
            self._log_weights -= np.log(-np.expm1(self._log_free[:, list(self._in_doubt)].sum(1)))
        self._in_doubt = tuple(group)

    def learn_needed(self, item: int) -> None:
        """Takes into account that an item is needed, which was the last of a group that has one."""
        self._in_doubt = ()


_MOST = 0.95
"""How sure a guess may be that an item is needed: each has to be tried."""


def _guess_first(count: int, size: int) -> np.ndarray:
    """The guess that about so many are needed, and that they come first."""
    positions = np.arange(count)
    return np.where(positions < size, 0.9, np.maximum(0.5 * 0.5 ** (positions - size), 0.3 / count))
