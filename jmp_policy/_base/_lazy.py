"""Loads the names of a package when they are first used."""

import importlib
from collections.abc import Callable, Mapping


def load_lazily(
    package: str, sources: Mapping[str, str], loaded: Mapping[str, object]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    Args:
      package: `__name__` of the package.
      sources: maps each module of the package to the names that it provides, separated by spaces. An empty string
        provides the module itself.
      loaded: `globals()` of the package.
    """
    places = {name: module for module, names in sources.items() for name in names.split() or [module]}

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{places[name]}")
        return module if places[name] == name else getattr(module, name)

    return load, lambda: sorted({*loaded, *places})
