"""The path of a linen module in the model that is called, through every `.apply` inside of it.

A module that another one runs by `self.decoder.apply(variables, x)`, as tied heads do, gets a scope of its own, whose
path begins anew. Where such a scope stands is told by a flag of it, as Flax hands flags to the scopes inside and to the
clones that lifted transforms call.
"""

import contextvars
from collections.abc import Iterable
from typing import Any

import jax
from flax import linen as nn
from flax.core import FrozenDict, Scope

_AROUND = "jmp_policy_around"
"""The flag of a scope: the path of the module whose scope is the outermost around it."""

# The module whose method is running, and what is around its scope. No context of JAX's, which would compile everything
# anew in each module. What is jitted and runs modules by `.apply` is mostly a closure of the method that calls it; a
# function that several modules call is told apart by the rule that covers them, `Frame.rule`.
_CALLING: contextvars.ContextVar[tuple[nn.Module, tuple[str, ...]] | None]
_CALLING = contextvars.ContextVar("_CALLING", default=None)


def path_of(module: nn.Module) -> tuple[str, ...]:
    """The path of a bound module.

    Of a module that runs through `.apply` it is that of the module it was made of, which the one that makes the call
    holds. Where that one holds no such module, or several, the path is inside of it, and the name in angle brackets.
    """
    return (*_around(module), *module.path)


def is_applied_inside(module: nn.Module, path: tuple[str, ...]) -> bool:
    """Whether a bound module, inside the one at `path`, runs through `.apply`, so that what it writes is lost."""
    return len(_around(module)) > len(path)


def is_trial(module: nn.Module, method_name: str) -> bool:
    """Whether a call is that by which Flax tries the setup of a module: of a function, on a clone without variables."""
    return bool(_around(module)) and not module.path and not hasattr(type(module), method_name)


def explain_unknown(paths: Iterable[str]) -> list[str]:
    """A sentence for each module that runs through `.apply` and is none that its caller holds."""
    return [
        f"{path!r} runs through .apply, and what runs it holds no such module, or several: rules by path cover it "
        f"where they cover {path.rpartition('/')[0]!r}"
        for path in paths
        if path.endswith(">")
    ]


class calling:  # in lower case: a function to those who use it, and a class because each module of a model enters one
    """The context in which a method of a bound module runs, and whatever runs through `.apply` is inside of it."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._scope: Any = module.scope

    def __enter__(self) -> None:
        scope, around = self._scope, _around(self._module)
        self._marks = _AROUND not in scope.flags and (scope.parent is None or bool(around))
        if self._marks:
            scope.flags = FrozenDict({**scope.flags, _AROUND: around}, __unsafe_skip_copy__=True)
        self._token = _CALLING.set((self._module, around))

    def __exit__(self, *_: object) -> None:
        _CALLING.reset(self._token)
        if self._marks:  # a bound module may be called from elsewhere next
            _unmark(self._scope)
            _unmark(self._module.scope)  # another scope, if a method called its base's


def _around(module: nn.Module) -> tuple[str, ...]:
    scope: Any = module.scope
    found = scope.flags.get(_AROUND)
    found = scope.root.flags.get(_AROUND) if found is None else found
    if found is not None:
        return found
    calling = _CALLING.get()
    if calling is None:
        return ()
    caller, around = calling
    if scope.root.path or scope.root is caller.scope.root:  # type: ignore[union-attr]
        return around
    outermost = module
    while isinstance(outermost.parent, nn.Module):
        outermost = outermost.parent
    return _path_inside(caller, outermost)


def _path_inside(caller: nn.Module, applied: nn.Module) -> tuple[str, ...]:
    """The path of a module that another one runs through `.apply`: Flax clones it, and the clone knows its name."""
    near, seen = [caller], {id(caller)}
    while near:
        found = {path_of(module) for module in near if module.name == applied.name and type(module) is type(applied)}
        if len(found) == 1:
            return found.pop()
        if found or applied.name is None:
            break
        near = [inner for module in near for inner in _held_by(module) if id(inner) not in seen]
        seen.update(map(id, near))
    return (*path_of(caller), f"<{applied.name or type(applied).__name__}>")


def _held_by(module: nn.Module) -> list[nn.Module]:
    """The bound modules that a module made, or has in its fields."""
    nodes = [*module._state.children.values(), *(x for name, x in vars(module).items() if name != "parent")]
    leaves = jax.tree.leaves(nodes, is_leaf=lambda node: isinstance(node, nn.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nn.Module) and leaf.scope is not None]


def _unmark(scope: Scope | None) -> None:
    if scope is not None and _AROUND in scope.flags:
        flags = {name: value for name, value in scope.flags.items() if name != _AROUND}
        scope.flags = FrozenDict(flags, __unsafe_skip_copy__=True)
