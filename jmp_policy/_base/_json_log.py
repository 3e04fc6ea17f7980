"""A file of JSON lines that a long search appends to, and resumes from."""

import functools
import json
import re
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._dtypes import is_array
from ._trees import PyTree

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
        """Returns `parse(header, lines)`, or None without a line. Removes a last line that was cut off by a kill.

        `parse` raises a ValueError, KeyError, TypeError or AttributeError for any other file.
        """
        path = self._path
        if path is None or not path.exists() or not path.stat().st_size:
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
        whole, first = text[: text.rfind("\n") + 1], json.dumps(self._header)[:-1]
        if not whole and (first.startswith(text) or text.startswith(first)):
            return None  # cut off in the header
        try:
            header, *lines = map(_parse_line, whole.splitlines())
            parsed = parse(header, lines)
            different = [key for key, value in self._header.items() if header[key] != value]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(
                f"{path} is not a file of {self._entries}, or is damaged, so it was not changed. Pass another name. "
                f"For example: {self._example.format(self._stem + '.jsonl')}."
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
            self._path.write_text(_format_line({**self._header, **more}), encoding="utf-8")

    def add(self, entry: dict[str, Any]) -> None:
        """Appends a line."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_format_line(entry))


def _format_line(entry: dict[str, Any]) -> str:
    return json.dumps({**entry, "checksum": _sum_text(json.dumps(entry))}, allow_nan=False) + "\n"


def _parse_line(line: str) -> dict[str, Any]:
    entry = json.loads(line)
    if entry.pop("checksum") != _sum_text(json.dumps(entry)):
        raise ValueError
    return entry


def _sum_text(text: str, total: int = 0) -> str:
    return f"{zlib.crc32(text.encode(), total):08x}"


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


def sum_program(fun: Callable[..., Any], *args: Any) -> str:
    """Computes a checksum of a function as JAX traces it, with its constants, or of its code if JAX cannot trace it."""
    try:
        program = jax.make_jaxpr(fun)(*args)
    except Exception:
        return sum_code(fun)
    text = re.sub(r"\b0x[0-9a-f]+", "", str(program))  # addresses of functions
    return _sum_text(text + sum_arrays(program.consts))


def sum_code(fun: Any) -> str:
    """Computes a checksum of the code of a function, and of all that it closes over and calls in its Python module."""
    seen: set[int] = set()

    def describe(value: Any) -> Any:
        if isinstance(value, functools.partial):
            return [describe(part) for part in (value.func, value.args, sorted(value.keywords.items()))]
        if isinstance(value, types.MethodType):
            return describe(value.__func__)
        if isinstance(value, types.CodeType):
            return value.co_code.hex(), value.co_names, describe(value.co_consts)
        if isinstance(value, tuple | list):
            return [describe(part) for part in value]
        if isinstance(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            called = [value.__globals__.get(name) for name in value.__code__.co_names]
            own = [each for each in called if getattr(each, "__module__", None) == value.__module__]
            closed = [cell.cell_contents for cell in value.__closure__ or ()]
            return [describe(part) for part in (value.__code__, value.__defaults__, closed, own)]
        if is_array(value):
            return sum_arrays(value)
        is_plain = value is None or isinstance(value, str | bytes | int | float | complex)
        return repr(value) if is_plain else type(value).__qualname__

    return _sum_text(repr(describe(fun)))
