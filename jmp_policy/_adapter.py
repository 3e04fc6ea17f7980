"""Which adapter of Flax knows a module, a class of modules, or the modules that are among some arguments."""

import importlib
import sys
from typing import Any

import jax

from ._flax_objects import is_flax_object
from ._memory import remember_weakly
from ._trees import PyTree

_ADAPTERS = {
    "flax.linen": "jmp_policy.linen._attach",
    "flax.nnx": "jmp_policy.nnx._attach",
}
"""The package of a `Module` class, and the module that knows its modules: `attach(target, policy, keep)`,
`policy_of(target)`, `explain(model, inputs, method, rngs, kwargs)` and `named(fun, enter)`, which tells what modules a
function calls. Loaded when the first target of that kind arrives, so that importing the library loads no Flax."""


def find_adapter(target: Any) -> Any:
    """The module that attaches policies to targets of this kind, imported now; `None` if it is no Flax module."""
    path = _adapter_path(target if isinstance(target, type) else type(target))
    return None if path is None else importlib.import_module(path)


def find_loaded_adapters() -> list[Any]:
    """The adapters of the packages that are loaded: a function may call the modules of any of them."""
    return [importlib.import_module(path) for package, path in _ADAPTERS.items() if package in sys.modules]


def find_lifting_adapter(tree: PyTree) -> Any:
    """The module that calls functions of objects that they write to, such as those in a tree; `None` if it has none."""
    leaves = jax.tree.leaves(tree, is_leaf=is_flax_object)
    is_any = any(is_flax_object(leaf) and _is_of_nnx(type(leaf)) for leaf in leaves)
    return importlib.import_module(_ADAPTERS["flax.nnx"]) if is_any else None


@remember_weakly
def _is_of_nnx(kind: type) -> bool:
    return any(base.__module__.startswith("flax.nnx.") for base in kind.__mro__)


@remember_weakly
def _adapter_path(kind: type) -> str | None:
    for base in kind.__mro__:
        for package, adapter in _ADAPTERS.items():
            if base.__name__ == "Module" and base.__module__.startswith(package + "."):
                return adapter
    return None
