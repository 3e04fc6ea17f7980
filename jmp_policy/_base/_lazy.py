"""Lazy imports of package attributes."""

import importlib
from collections.abc import Callable, Mapping


def load_lazily(
    package: str,
    sources: Mapping[str, str],
    loaded: Mapping[str, object],
    *,
    internal: Mapping[str, str] = {},
    unlisted: str = "",
    elsewhere: Mapping[str, str] = {},
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    `sources` maps each module to its names, separated by spaces; an empty string stands for the module. `dir` leaves
    out the names in `unlisted`, and those of `internal`, which are like `sources` but for the other packages of this
    library. `elsewhere` maps names that users look for here to their places, for an error.
    """
    listed, hidden = _find_modules(sources), _find_modules(internal)
    places = hidden | listed

    def list_names() -> list[str]:
        return sorted({*loaded, *listed}.difference(hidden, unlisted.split()))

    def load(name: str) -> object:
        if name == "__all__":  # of `from package import *`
            return [name for name in list_names() if not name.startswith("_")]
        if name in elsewhere:
            raise AttributeError(f"module {package!r} has no attribute {name!r}. It is jmp_policy.{elsewhere[name]}.")
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{places[name]}")
        return module if places[name] == name else getattr(module, name)

    return load, list_names


def _find_modules(sources: Mapping[str, str]) -> dict[str, str]:
    """Maps each name to its module."""
    return {name: module for module, names in sources.items() for name in names.split() or [module]}
