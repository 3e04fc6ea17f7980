"""A file of JSON lines that a long search appends to, and resumes from."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._trees import PyTree, is_array

T = TypeVar("T")


class JsonLog:
    """A header that identifies a run, and one JSON object per line. Without a path nothing is read or written.

    Args:
      path: the file.
      header: JSON values; a file with other ones belongs to another run.
      entries: the word for the lines, for errors.
      example: a call with `{!r}` in the place of the file name, for errors.
      stem: of the file in this call.
    """

    def __init__(self, path: Path | None, header: dict[str, Any], entries: str, example: str, stem: str):
        self._path, self._header = path, json.loads(json.dumps(header))
        self._entries, self._example, self._stem = entries, example, stem

    def read(self, parse: Callable[[dict[str, Any], list[dict[str, Any]]], T]) -> T | None:
        """Returns `parse(header, lines)`, or None without a file. Removes a last line that was cut off by a kill.

        `parse` raises a ValueError, KeyError, TypeError or AttributeError for any other file.
        """
        path = self._path
        if path is None or not path.exists() or not path.stat().st_size:
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
        whole = text[: text.rfind("\n") + 1]
        try:
            header, *lines = map(json.loads, whole.splitlines())
            parsed = parse(header, lines)
            different = [key for key, value in self._header.items() if header[key] != value]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(
                f"{path} is not a file of {self._entries}, so it was not changed. Pass another name. For example: "
                f"{self._example.format(self._stem + '.jsonl')}."
            ) from None
        if different:
            key = different[0]
            raise ValueError(
                f"{path} has the {self._entries} of another run: its {key} is {header[key]!r}, expected "
                f"{self._header[key]!r}. It was not changed. Pass another name. For example: "
                f"{self._example.format('other.jsonl')}."
            )
        if whole != text:
            path.write_text(whole, encoding="utf-8")
        return parsed

    def start(self, **more: Any) -> None:
        """Writes the first line of a new file: the header, and values that are not compared."""
        if self._path is not None:
            self._path.write_text(_write_line({**self._header, **more}), encoding="utf-8")

    def add(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_write_line(entry))


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
