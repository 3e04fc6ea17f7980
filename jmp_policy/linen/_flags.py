"""What the scope of a linen module says of it: where it stands, and whether a rule's boundary around it is running.

Both are told by flags of the scope. Flax hands them to the clones that lifted transforms call and to the scopes inside,
and has them in the key under which `nn.jit` finds its program.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax import linen as nn
from flax.core import FrozenDict, Scope, freeze

_PATH = "jmp_policy_path"
_RUNNING = "jmp_policy_running"


@contextlib.contextmanager
def paths_in_jit_keys(scope: Scope) -> Iterator[None]:
    """A context in which the scopes that a scope makes for the modules inside carry their paths as a flag.

    Flax compiles a jitted module once for all modules of equal fields, wherever they stand: its key has everything but
    the name. Under a policy map they may have different policies.
    """
    if "push" in vars(scope):
        yield
        return
    push = scope.push

    def push_with_path(*args: Any, **kwargs: Any) -> Scope:
        inner = push(*args, **kwargs)
        flags = {**inner.flags, _PATH: inner.path}  # a copy already: freezing it would copy every item again
        inner.flags = FrozenDict(flags, __unsafe_skip_copy__=True)
        return inner

    # On this one object, for the time of a call: neither Flax's class nor the author's module is touched.
    vars(scope)["push"] = push_with_path
    try:
        yield
    finally:
        del vars(scope)["push"]


@contextlib.contextmanager
def boundary_of(module: nn.Module) -> Iterator[None]:
    """A context in which a module, and any clone of it, is known to have cast what entered."""
    before = _flags(module)
    _set_flags(module, freeze({**before, _RUNNING: module.path}))
    try:
        yield
    finally:
        _set_flags(module, before)  # the module may have got another scope: a method that calls its base's gives it one


def runs_inside_boundary(module: nn.Module) -> bool:
    """Whether the boundary of this very module, or of the one that it is a clone of, is running."""
    return _flags(module).get(_RUNNING) == module.path


def _flags(module: nn.Module) -> Any:
    assert module.scope is not None
    return module.scope.flags


def _set_flags(module: nn.Module, flags: Any) -> None:
    assert module.scope is not None
    module.scope.flags = flags
