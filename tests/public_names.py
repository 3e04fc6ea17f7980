"""Which names are the API, by the place where they are written."""

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
import types

import jmp_policy

NO_API = ("__main__", "cli", "gradients", "loss_scale", "modules", "policy")
"""Modules without an underscore whose names the API does not have."""


def is_public(example: str) -> bool:
    """Whether the docstring of a name, as `jmp_policy.gradients._grad.grad` where it stands, is part of the API."""
    inner = [example.removeprefix(name) for name in find_public_names() if f"{example}.".startswith(f"{name}.")]
    return any("._" not in name for name in inner)


@functools.cache
def find_public_names() -> frozenset[str]:
    """The public modules, and by where they are written the functions and classes that they give another name."""
    found = set()
    for info in pkgutil.walk_packages(jmp_policy.__path__, "jmp_policy."):
        parts = info.name.split(".")[1:]
        if parts[0] in NO_API or any(part.startswith("_") for part in parts):
            continue
        found |= _list_names(info.name)
    return frozenset(found | _list_names("jmp_policy"))


def list_exported(module: types.ModuleType) -> dict[str, object]:
    """The values of a module by name, also of those that `dir` leaves out: results, states and base classes."""
    nodes = [node for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.ImportFrom)]
    unlisted = {alias.name for node in nodes for alias in node.names if alias.asname == alias.name}
    return {name: getattr(module, name) for name in {*dir(module), *unlisted} if not name.startswith("_")}


def _list_names(module_name: str) -> set[str]:
    module = importlib.import_module(module_name)
    values = list_exported(module).values()
    ours = [x for x in values if inspect.isroutine(x) or inspect.isclass(x) if x.__module__.startswith("jmp_policy")]
    is_package = hasattr(sys.modules[module_name], "__path__")  # any other module imports what is not its own
    return {module_name, *(f"{x.__module__}.{x.__qualname__}" for x in ours if is_package)}
