"""Makes the place of a module part of the key under which `nn.jit` finds its program.

Flax compiles a jitted module once for all modules of equal fields, wherever they stand: its key has everything but the
name. Under a policy map they may have different policies. The key does have the flags of a module's scope, and a scope
gives its flags to the scopes inside it, so the path goes in there.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from flax.core import Scope, freeze


@contextlib.contextmanager
def paths_in_jit_keys(scope: Scope) -> Iterator[None]:
    """A context in which the scopes that a scope makes for the modules inside carry their paths as a flag."""
    if "push" in vars(scope):
        yield
        return
    push = scope.push

    def push_with_path(*args: Any, **kwargs: Any) -> Scope:
        inner = push(*args, **kwargs)
        inner.flags = freeze({**inner.flags, "jmp_policy_path": inner.path})
        return inner

    # On this one object, for the time of a call: neither Flax's class nor the author's module is touched.
    vars(scope)["push"] = push_with_path
    try:
        yield
    finally:
        del vars(scope)["push"]
