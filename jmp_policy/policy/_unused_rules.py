"""Why a rule of a map decides nothing, and what it may have meant."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN = 5
"""How many paths a sentence lists."""


def explain_unused_key(key: str | type, hiding: str | type | None, types: Mapping[str, Any]) -> str:
    """A sentence on a rule that decides nothing.

    Args:
      key: the key of the rule.
      hiding: the key of the earlier rule that covers what this one names; `None` if it names nothing.
      types: the types of the model's modules, by path.

    >>> explain_unused_key("haed", None, {"": None, "head": None})
    "policy rule 'haed' matches no module; the closest path is 'head'"
    """
    if hiding is not None:
        return f"policy rule {spell_key(key)} decides nothing: the earlier rule {spell_key(hiding)} hides it"
    if isinstance(key, type):
        near = _find_nearest_type(key, types)
    else:
        near = _name_type(key, types) or _find_nearest_path(key, types)
    return f"policy rule {spell_key(key)} matches no module{near and '; ' + near}"


def spell_key(key: str | type) -> str:
    """A key as messages have it."""
    return repr(key) if isinstance(key, str) else key.__qualname__


def _find_nearest_path(key: str, paths: Iterable[str]) -> str:
    """Names the path that a pattern comes nearest to, as a whole or in its last words."""
    paths = [path for path in paths if path]
    near = difflib.get_close_matches(key, paths, 1, cutoff=0.4)
    if near:
        return f"the closest path is {near[0]!r}"
    depth = key.count("/") + 1
    ends = {"/".join(path.split("/")[-depth:]): path for path in reversed(paths)}  # of paths that end alike the first
    near = difflib.get_close_matches(key, ends, 1, cutoff=0.4)
    if near:
        return f"the closest path is {ends[near[0]]!r}, which r'(.*/)?{near[0]}' matches"
    shown = [*map(repr, paths[:_SHOWN]), *["..."] * (len(paths) > _SHOWN)]
    return f"the model has the paths {', '.join(shown)}" if paths else ""


def _name_type(key: str, types: Mapping[str, Any]) -> str:
    """Proposes the type of modules as the key where a pattern is its name."""
    kind = next((kind for kind in types.values() if isinstance(kind, type) and kind.__name__ == key), None)
    if kind is None:
        return ""
    prefix = {"flax.linen": "nn.", "flax.nnx": "nnx."}
    where = next((short for package, short in prefix.items() if kind.__module__.startswith(package)), "")
    return f"{key} is a type of modules here, whose key is the type itself: {where}{key}, without quotes"


def _find_nearest_type(key: type, types: Mapping[str, Any]) -> str:
    """Names the type of a module that comes nearest to another type: one of nnx has the name of linen's."""
    found = {kind.__qualname__: kind for kind in types.values() if isinstance(kind, type)}
    near = difflib.get_close_matches(key.__qualname__, found, 1, cutoff=0.4)
    return f"the closest type is {found[near[0]].__module__}.{near[0]}" if near else ""
