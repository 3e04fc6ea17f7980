"""Trials of a search, and a file to resume from."""

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base import PyTree, is_array
from ._ranking import Ranking


@dataclasses.dataclass(frozen=True)
class Trial:
    """Result of one run under a map.

    Attributes:
      kept: the scopes kept out of the policy.
      error: the largest relative error; infinite if any result was not finite.

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
        self._path, self._header = path, header
        self._known: dict[frozenset[str], Trial] = {}
        self.ranking: Ranking | None = None
        if path is not None and path.exists() and path.stat().st_size:
            self._read(path)

    def find(self, kept: Iterable[str]) -> Trial | None:
        return self._known.get(frozenset(kept))

    def start(self, ranking: Ranking) -> None:
        """Writes the first line of a new file."""
        if self.ranking is None and self._path is not None:
            self._path.write_text(_write_line({**self._header, "ranking": ranking._asdict()}), encoding="utf-8")
        self.ranking = ranking

    def add(self, trial: Trial) -> None:
        self._known[frozenset(trial.kept)] = trial
        if self._path is not None:
            error = trial.error if math.isfinite(trial.error) else None
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_write_line({"kept": list(trial.kept), "error": error}))

    def _read(self, path: Path) -> None:
        """Reads the file. Removes a last line that was cut off when a run was killed."""
        text = path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        wanted = json.loads(json.dumps(self._header))
        try:
            header, *others = map(json.loads, whole.splitlines())
            stored = header.pop("ranking")
            ranking = Ranking(tuple(stored["scopes"]), stored["loss_scale"])
            errors = [math.inf if line["error"] is None else float(line["error"]) for line in others]
            trials = [Trial(tuple(line["kept"]), error) for line, error in zip(others, errors, strict=True)]
            different = [key for key in wanted if header[key] != wanted[key]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path} is not a file of trials, so it was not changed. Pass another name. For example: "
                "tune(..., trials_file='tune.jsonl')."
            ) from None
        if different:
            key = different[0]
            raise ValueError(
                f"{path} has the trials of another run: its {key} is {header[key]!r}, expected {wanted[key]!r}. "
                "It was not changed. Pass another name. For example: tune(..., trials_file='other.jsonl')."
            )
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        self.ranking = ranking
        self._known = {frozenset(trial.kept): trial for trial in trials}


def _write_line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"


def sum_arrays(tree: PyTree) -> str:
    """Computes a checksum of shapes, dtypes and, if this host can address them, elements of all arrays of a tree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if not is_array(leaf):
            total = zlib.crc32(repr(type(leaf) if callable(leaf) else leaf).encode(), total)
            continue
        total = zlib.crc32(f"{leaf.dtype}{leaf.shape}".encode(), total)
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            total = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, total)
    return f"{total:08x}"
