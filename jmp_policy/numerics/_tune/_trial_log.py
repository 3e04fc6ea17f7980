"""Trials of a search, and a file to resume from."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..._base import JsonLog
from ._ranking import Ranking


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
