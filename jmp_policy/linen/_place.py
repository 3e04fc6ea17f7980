"""Paths of linen modules, also through `.apply`, and the place of the module that was given the policy.

A module that another one runs by `self.decoder.apply(variables, x)`, as tied heads do, has a new scope, whose path is
empty. A flag of the scope holds the path around it. Flax copies flags to the scopes inside, and to the clones that
lifted transforms call.
"""

import contextlib
import contextvars
import dataclasses
from collections import ChainMap
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict, Scope

from ..policy import Match, PolicyMap

_AROUND = "jmp_policy_around"
"""The flag of a scope with the path of the module around its outermost scope."""
_PATH = "jmp_policy_path"

# The module whose method is running, and the path around its scope. Not a JAX context, which would compile everything
# again in each module. A jitted function that several modules call is told apart by `ActivePolicy.covering`.
_CALLING: contextvars.ContextVar[tuple[nn.Module, tuple[str, ...]] | None]
_CALLING = contextvars.ContextVar("_CALLING", default=None)


@dataclasses.dataclass(frozen=True)
class ModulePlace:
    """The place of a module that was given a policy: the root of a model, or a path inside an nnx model."""

    lineage: tuple[tuple[str, type], ...] = ()  # the types of the nnx modules around it, by path; the last one wraps it
    boundary: bool = True  # true if it casts its inputs and outputs
    inferred: np.dtype | None = None  # the dtype in place of an open compute dtype; `None` takes it from the inputs

    def path(self, names: tuple[str, ...]) -> str:
        """Returns the path, in the whole model, of a module inside this one."""
        around = self.lineage[-1][0] if self.lineage else ""
        return "/".join((around, *names) if around else names)

    def match(self, rules: PolicyMap, names: tuple[str, ...], types: dict[str, Any]) -> Match:
        """Returns the match of a map for a module inside this one, whose names and types, by path, are given."""
        if not self.lineage:
            return rules.match(self.path(names), types)
        found = rules.match(self.path(names), ChainMap(types, dict(self.lineage)))
        # The wrapper has the same path, but a type of its own, which a rule may name too.
        around = rules.match(self.path(()), dict(self.lineage))
        rank = lambda match: len(rules.rules) if match.rule is None else rules.rules.index(match.rule)
        return found if rank(found) <= rank(around) else dataclasses.replace(around, boundary=False)


ROOT = ModulePlace()
"""The place of a module that was itself given the policy."""


def path_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the path of a bound module. Inside `.apply` it is the original's path, or its name in angle brackets."""
    around = module.scope.flags.get(_AROUND)  # type: ignore[union-attr]
    return (*(_find_path_around(module) if around is None else around), *module.path)


def path_text(module: nn.Module) -> str:
    """Returns the path of a bound module as tables, rules and errors write it: `encoder/layer_0`."""
    return "/".join(path_of(module))


def is_applied_inside(module: nn.Module, path: tuple[str, ...]) -> bool:
    """True if a module runs through `.apply` inside the module at `path`, so that its writes are lost."""
    return len(_find_path_around(module)) > len(path)


def is_trial(module: nn.Module, method_name: str) -> bool:
    """True if Flax only tries the setup of a module: it calls a function on a clone without variables."""
    is_bare = not module.path and not module.scope.variables()  # type: ignore[union-attr]
    return _CALLING.get() is not None and is_bare and not hasattr(type(module), method_name)


def explain_unknown(paths: Iterable[str]) -> list[str]:
    """Returns a sentence for each module that runs through `.apply` and that its caller does not hold."""
    return [
        f"{path!r} runs through .apply, and what runs it holds no such module, or several: rules by path cover it "
        f"where they cover {path.rpartition('/')[0]!r}"
        for path in paths
        if path.endswith(">")
    ]


class calling:  # a class, because a generator context is slower and each module of a model enters one
    """Context of a running method of a bound module. Modules that run through `.apply` are inside of it."""

    def __init__(self, module: nn.Module):
        self._module = module
        self._scope: Any = module.scope

    def __enter__(self) -> None:
        scope, around = self._scope, _find_path_around(self._module)
        self._marks = _AROUND not in scope.flags and (scope.parent is None or bool(around))
        if self._marks:
            scope.flags = FrozenDict({**scope.flags, _AROUND: around}, __unsafe_skip_copy__=True)
        self._token = _CALLING.set((self._module, around))

    def __exit__(self, *_: object) -> None:
        _CALLING.reset(self._token)
        if self._marks:  # a bound module may have another caller next
            _unmark(self._scope)
            _unmark(self._module.scope)  # another scope, if the method called its base class


@contextlib.contextmanager
def add_paths_to_jit_keys(scope: Scope) -> Iterator[None]:
    """Adds paths to the flags of inner scopes, since Flax compiles a jitted module once for all with equal fields."""
    if "push" in vars(scope):
        yield
        return
    push = scope.push

    def push_with_path(*args: Any, **kwargs: Any) -> Scope:
        inner = push(*args, **kwargs)
        flags = {**inner.flags, _PATH: inner.path}  # freezing would copy each item again
        inner.flags = FrozenDict(flags, __unsafe_skip_copy__=True)
        return inner

    # Only on this scope, and only during the call.
    vars(scope)["push"] = push_with_path
    try:
        yield
    finally:
        del vars(scope)["push"]


def _find_path_around(module: nn.Module) -> tuple[str, ...]:
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
    return _find_path_inside(caller, outermost)


def _find_path_inside(caller: nn.Module, applied: nn.Module) -> tuple[str, ...]:
    """Returns the path of a module that runs through `.apply`: Flax clones it, and the clone has its name."""
    near, seen = [caller], {id(caller)}
    while near:
        found = {path_of(module) for module in near if module.name == applied.name and type(module) is type(applied)}
        if len(found) == 1:
            return found.pop()
        if found or applied.name is None:
            break
        near = [inner for module in near for inner in _list_held_modules(module) if id(inner) not in seen]
        seen.update(map(id, near))
    return (*path_of(caller), f"<{applied.name or type(applied).__name__}>")


def _list_held_modules(module: nn.Module) -> list[nn.Module]:
    """Lists the bound modules that a module made, or has in its fields."""
    nodes = [*module._state.children.values(), *(x for name, x in vars(module).items() if name != "parent")]
    leaves = jax.tree.leaves(nodes, is_leaf=lambda node: isinstance(node, nn.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nn.Module) and leaf.scope is not None]


def _unmark(scope: Scope | None) -> None:
    if scope is not None and _AROUND in scope.flags:
        flags = {name: value for name, value in scope.flags.items() if name != _AROUND}
        scope.flags = FrozenDict(flags, __unsafe_skip_copy__=True)
