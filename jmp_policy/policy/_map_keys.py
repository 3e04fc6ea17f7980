"""Keys of a policy map: patterns of paths and module types. How they match, and how configs and messages spell them."""

import difflib
import functools
import importlib
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._base import describe, list_paths_to, quote, shorten

Key = str | type

_SHOWN = 5  # paths in a message
_PLAIN = re.compile(r"(?:[\w/ -]|\\[^\w\n])*")  # patterns that match one path
_SLOW = 0.1  # seconds of CPU time for one match


@functools.lru_cache(maxsize=1 << 14)  # each module is asked about many times
def covers_path(pattern: str, path: str) -> bool | None:
    """Returns True if a pattern matches the path, False if only the path of a module around it, and None otherwise."""
    _check_backtracking(pattern, path)
    return next((outer == path for outer in reversed(list_paths_to(path)) if re.fullmatch(pattern, outer)), None)


def find_first_pattern(keys: Sequence[Key]) -> Callable[[str], int]:
    """Returns a function that finds the position of the first pattern that covers a path, or the number of keys.

    A tuned map has a key without special characters for each of hundreds of modules. They are looked up.
    """
    plain, others = dict[str, int](), dict[int, str]()
    for position, key in enumerate(keys):
        if isinstance(key, str) and _PLAIN.fullmatch(key):
            plain.setdefault(re.sub(r"\\(.)", r"\1", key), position)
        elif isinstance(key, str):
            others[position] = key

    @functools.lru_cache(maxsize=1 << 14)
    def find(path: str) -> int:
        first = min((plain[outer] for outer in list_paths_to(path) if outer in plain), default=len(keys))
        earlier = (i for i, pattern in others.items() if i < first and covers_path(pattern, path) is not None)
        return next(earlier, first)

    return find


def check_rule_key(key: Any, where: str) -> None:
    """Raises unless a key is a valid pattern or a type."""
    if isinstance(key, str):
        try:
            re.compile(key)
        except (re.error, OverflowError, RecursionError) as error:
            example = "For example: r'block_\\d+/mlp'."
            if key.startswith(("*", "?")):  # a glob, such as `*norm`
                example = f"Keys are regular expressions. For example: {re.sub('[*?]', '.*', key)!r}."
            raise ValueError(f"The key {quote(key)}, {where}, is not a valid pattern: {error}. {example}") from None
    elif not isinstance(key, type):
        is_module = callable(key) and type(key).__module__ != "builtins"
        example = type(key).__qualname__ if is_module else "'head'"
        raise TypeError(
            f"The key {describe(key)}, {where}, is neither a pattern nor a module type. For example: {example}."
        )


def _check_backtracking(pattern: str, path: str) -> None:
    """Raises if `re` would need much more than `_SLOW` seconds, as for `(a+)+b`."""
    is_repeated = any(f"){sign}" in pattern for sign in "*+{")
    if not is_repeated and sum(map(pattern.count, "*+?{|")) < 3:  # quadratic at most
        return
    flags, body = re.findall(r"((?:\(\?[a-zA-Z]+\))*)(.*)", pattern, re.DOTALL)[0]
    # The end that never matches makes `re` try every way to match. Each further character multiplies their number by a
    # small factor only, so that the time of the last prefix is bounded before it is spent.
    explore = re.compile(f"{flags}(?:{body}{chr(10) * ('x' in flags)})(?!)")
    for length in range(1, len(path) + 1):
        start = time.thread_time()
        explore.match(path, 0, length)
        if time.thread_time() - start > _SLOW:
            raise ValueError(
                f"The key {quote(pattern)} of a PolicyMap takes too long on the path {quote(path)}: its repetitions "
                "match the same characters in too many ways. For example: r'(.*/)?block_\\d+/mlp'."
            )


def explain_unused_key(key: str | type, hiding: str | type | None, types: Mapping[str, Any]) -> str:
    """Explains why no module gets its policy from a rule; `hiding` is the key of the earlier rule that covers it."""
    if hiding is not None:
        return f"policy rule {spell_key(key)} decides nothing: the earlier rule {spell_key(hiding)} hides it"
    if isinstance(key, type):
        near = _find_nearest_type(key, types)
    else:
        near = _name_type(key, types) or _find_nearest_path(key, tuple(path for path in types if path))
    return f"policy rule {spell_key(key)} matches no module{near and '; ' + near}"


def spell_key(key: str | type) -> str:
    return repr(key) if isinstance(key, str) else key.__qualname__


@functools.lru_cache(maxsize=64)  # each trace of a model asks again
def _find_nearest_path(key: str, paths: Sequence[str]) -> str:
    """Suggests the path nearest to a pattern, by whole paths and then by their last components."""
    near = difflib.get_close_matches(key, paths, 1, cutoff=0.4)
    if near:
        return f"the closest path is {near[0]!r}"
    depth = key.count("/") + 1
    ends = {"/".join(path.split("/")[-depth:]): path for path in reversed(paths)}  # the first of paths with equal ends
    near = difflib.get_close_matches(key, ends, 1, cutoff=0.4)
    if near:
        return f"the closest path is {ends[near[0]]!r}, which r'(.*/)?{near[0]}' matches"
    shown = [*map(repr, paths[:_SHOWN]), *["..."] * (len(paths) > _SHOWN)]
    return f"the model has the paths {', '.join(shown)}" if paths else ""


def _name_type(key: str, types: Mapping[str, Any]) -> str:
    """Suggests a module type as the key if the pattern is the name of one."""
    kind = next((kind for kind in types.values() if isinstance(kind, type) and kind.__name__ == key), None)
    if kind is None:
        return ""
    prefix = {"flax.linen": "nn.", "flax.nnx": "nnx."}
    where = next((short for package, short in prefix.items() if kind.__module__.startswith(package)), "")
    return f"{key} is a type of modules here, whose key is the type itself: {where}{key}, without quotes"


def _find_nearest_type(key: type, types: Mapping[str, Any]) -> str:
    """Suggests the module type whose name is nearest: nnx and linen use the same names."""
    found = {kind.__qualname__: kind for kind in types.values() if isinstance(kind, type)}
    near = difflib.get_close_matches(key.__qualname__, found, 1, cutoff=0.4)
    return f"the closest type is {found[near[0]].__module__}.{near[0]}" if near else ""


def write_key(key: Key) -> dict[str, str]:
    """Returns the config of a key."""
    return {"path": key} if isinstance(key, str) else {"type": f"{key.__module__}:{key.__qualname__}"}


def read_key(config: Any, example: str) -> Key:
    """Reads the config of a key. Types are found in Flax and in modules that are loaded; nothing else is imported."""
    if not isinstance(config, Mapping) or not config.keys() & {"path", "type"}:
        raise ValueError(f"The key {quote(config)} of a PolicyMap's config has neither 'path' nor 'type'. {example}")
    name = config.get("path", config.get("type"))
    if not isinstance(name, str):
        raise ValueError(f"{quote(name)} in the key {quote(config)} of a PolicyMap's config is not a string. {example}")
    return name if "path" in config else _find_type(name)


def _find_type(spec: str) -> type:
    where, _, name = spec.partition(":")
    problem = f"The module type {quote(spec)} of a PolicyMap's config cannot be found"
    if where.partition(".")[0] == "flax":
        try:
            importlib.import_module(where)
        except (ImportError, ValueError):
            raise ValueError(f"{problem}: Flax has no such type. For example: 'flax.nnx.nn.linear:Linear'.") from None
    if where not in sys.modules:
        example = shorten(where) if all(map(str.isidentifier, where.split("."))) else "my_project.layers"
        raise ValueError(f"{problem}: import its Python module first. For example: import {example}.")
    found: Any = sys.modules[where]
    for attribute in name.split("."):
        found = getattr(found, "__dict__", {}).get(attribute)  # `getattr` could run code, such as a lazy import
    if not isinstance(found, type):
        raise ValueError(f"{problem}: {quote(where)} has no such class. For example: 'flax.nnx.nn.linear:Linear'.")
    return found
