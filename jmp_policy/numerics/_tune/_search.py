"""Delta debugging in the order of a ranking, its trials, and a file to resume from."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ..._base import JsonLog
from ._ranking import Ranking

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


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of one run under a map.

    Attributes:
      kept: the scopes kept out of the policy; under `effective_bits`, `path=format` for each layer that does not have
        the smallest format.
      error: the largest relative error, or the relative increase of the loss; infinite if any result was not finite.

    >>> import jax.numpy as jnp, jmp_policy as jmp
    >>> tuning = jmp.tune(lambda x: x * x, (jnp.float32(2.0),), "mixed_bfloat16", tolerance=0.1)
    >>> tuning.trials
    (Trial(kept=(), error=0.0),)
    """

    kept: tuple[str, ...]
    error: float


class TrialLog:
    """Known trials and the ranking of an earlier run, stored in a file that `header` identifies."""

    def __init__(self, path: Path | None, header: dict[str, Any]):
        self._known: dict[frozenset[str], Trial] = {}
        self.ranking: Ranking | None = None
        self._file = JsonLog(path, header, "trials", "tune(..., trials_file={!r})", "tune")
        stored = self._file.read(_parse)
        if stored is not None:
            self.ranking, trials = stored
            self._known = {frozenset(trial.kept): trial for trial in trials}

    def find(self, kept: Iterable[str]) -> Trial | None:
        return self._known.get(frozenset(kept))

    def start(self, ranking: Ranking) -> None:
        """Writes the first line of a new file."""
        if self.ranking is None:
            self._file.start(ranking=ranking._asdict())
        self.ranking = ranking

    def add(self, trial: Trial) -> None:
        self._known[frozenset(trial.kept)] = trial
        error = trial.error if math.isfinite(trial.error) else None
        self._file.add({"kept": list(trial.kept), "error": error})


def _parse(header: dict[str, Any], lines: list[dict[str, Any]]) -> tuple[Ranking, list[Trial]]:
    stored = header["ranking"]
    errors = [math.inf if line["error"] is None else float(line["error"]) for line in lines]
    trials = [Trial(tuple(line["kept"]), error) for line, error in zip(lines, errors, strict=True)]
    return Ranking(tuple(stored["scopes"]), stored["loss_scale"]), trials
