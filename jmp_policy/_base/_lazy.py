"""Lazy imports of package attributes."""

import importlib
from collections.abc import Callable, Mapping


def load_lazily(
    package: str, sources: Mapping[str, str], loaded: Mapping[str, object]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package.

    `sources` maps each module of the package to its names, separated by spaces; an empty string stands for the module.
    """
    places = {name: module for module, names in sources.items() for name in names.split() or [module]}

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{places[name]}")
        return module if places[name] == name else getattr(module, name)

    return load, lambda: sorted({*loaded, *places})
