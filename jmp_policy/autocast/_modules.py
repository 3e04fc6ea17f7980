"""The Flax modules that are called while a function is traced."""

from typing import NamedTuple

import jax

ELSEWHERE = "^"
"""What starts the scope of a module that is called from one that it is not inside of, such as a tied embedding: its
path starts there."""


class Modules(NamedTuple):
    """What tells module paths from the other names in a name stack.

    Attributes:
      types: the type of each module by its path, as pairs.
      roots: what the roots of linen models are called in name stacks: by their class, where a path leaves them out.
      methods: the paths of modules, each with the name of it and a method, such as `encoder.encode`.
    """

    types: tuple[tuple[str, type], ...] = ()
    roots: frozenset[str] = frozenset()
    methods: frozenset[tuple[str, str]] = frozenset()


class Register:
    """The modules that were called in the traces of one function; each adapter of Flax enters those it knows.

    Attributes:
      token: what stands for it in JAX's keys, which JAX never lets go of.
    """

    def __init__(self) -> None:
        self.token = object()
        self._types: dict[str, type] = {}
        self._roots: set[str] = set()
        self._methods: set[tuple[str, str]] = set()

    def enter(self, path: str, kind: type, name: str = "", is_method: bool = False) -> None:
        """Enters a module that is called.

        Args:
          path: its path in the model.
          kind: its class.
          name: what the name stack has for the call, if that is not the last name of the path.
          is_method: whether that is the name of the module and a method.
        """
        self._types[path] = kind
        if not path and name:
            self._roots.add(name)
        elif is_method:
            self._methods.add((path, name))

    def modules(self) -> Modules:
        """Those that were entered."""
        return Modules(tuple(self._types.items()), frozenset(self._roots), frozenset(self._methods))


TRACING = jax.make_user_context(None)
"""The token of the register of the function that is being traced by its scopes.

A context of JAX's, part of the key of every jit cache: a jitted function that was traced before would not call its
modules again, and none would be entered."""
