"""`SkipLog`: a file of the skipped steps of a run."""

import datetime
import json
import os
from pathlib import Path
from typing import Any

from .._base import JsonLog, describe
from ._verdict import Verdict


class SkipLog:
    """A file with one line of JSON for each skipped step: when, which batch, and the verdict.

    A line that a crash has cut off is removed when the file is opened again, and the log goes on after it.

    Args:
      path: the file. It is created if it does not exist.

    Raises:
      ValueError: the file is not a log of skipped steps, or a line in the middle is damaged. It is not changed.

    >>> import tempfile, jax.numpy as jnp, optax, jmp_policy as jmp
    >>> find = jmp.optim.find_origin(lambda w, x: jnp.sum(w / x), tx := jmp.optim.skip_nonfinite(optax.sgd(0.1)))
    >>> params, batch = jnp.ones(2), jnp.float32([2.0, jnp.inf])
    >>> log = jmp.optim.SkipLog(tempfile.mkdtemp() + "/skips.jsonl")
    >>> log.add(find.verdict(params, tx.init(params), jnp.float32([jnp.nan, 1.0])), batch="shard-3/1207")
    >>> [(entry["batch"], entry["kind"], entry["place"]) for entry in log.read()]
    [('shard-3/1207', 'data', 'x')]
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._file = _open(self._path)
        if self._file.read(_parse) is None:
            self._file.start()

    def add(self, verdict: Verdict, batch: Any = None, **more: Any) -> None:
        """Appends a line.

        Args:
          verdict: from `find.verdict`.
          batch: how the caller names the batch: a number, a string, or other JSON.
          **more: other JSON values to store, such as `epoch=3`. A `step` replaces that of the verdict. Scalars of NumPy
            and JAX become numbers, and a number that is not finite `None`.

        Raises:
          TypeError: `verdict` is not a `Verdict`, or a value is not JSON.
          ValueError: a name is taken.
        """
        if not isinstance(verdict, Verdict):
            given = describe(verdict)
            raise TypeError(
                f"SkipLog.add takes a Verdict, got {given}. For example: log.add(find.verdict(...), batch=7)."
            )
        now, entry = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), verdict.to_dict()
        for name in more.keys() & ({"time", "checksum", *entry} - {"step"}):
            raise ValueError(
                f"SkipLog stores {name!r} itself. Choose another name, for example: log.add(verdict, my_{name}=...)."
            )
        text = json.dumps({"batch": batch, **more}, default=_read_scalar)
        self._file.add({"time": now, **entry, **json.loads(text, parse_constant=lambda _: None)})

    def truncate(self, step: int) -> None:
        """Drops the entries of later steps, for a run that goes on from a checkpoint of `step`, and logs them again."""
        entries, new = self.read(), self._path.with_name(f"{self._path.name}.tmp")
        log = _open(new)
        log.start()
        for entry in entries:
            if entry["step"] is None or entry["step"] <= step:
                log.add(entry)
        new.replace(self._path)

    def read(self) -> list[dict[str, Any]]:
        """Returns all entries: the fields of `Verdict.to_dict`, `batch`, and `time` in UTC."""
        return self._file.read(_parse) or []


def _read_scalar(value: Any) -> Any:
    if not hasattr(value, "item") or getattr(value, "size", 1) != 1:
        raise TypeError(f"SkipLog stores JSON, got {describe(value)}. For example: log.add(verdict, batch=7).")
    return value.item()


def _open(path: Path) -> JsonLog:
    return JsonLog(path, {"log": "skipped steps"}, "skipped steps", "SkipLog({!r})", "skips")


def _parse(header: dict[str, Any], lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if header != {"log": "skipped steps"}:
        raise ValueError
    return lines
