"""The Flax modules that are called while a function is traced."""

import jax

from ..interpreter._module_paths import Modules


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
