"""Module paths out of name stacks."""

import re

from jax.extend.core import JaxprEqn

from ..interpreter import name_stack
from ._modules import ELSEWHERE, Modules


class Paths:
    """The paths of equations.

    Args:
      modules: those of the program.
    """

    def __init__(self, modules: Modules):
        self._modules = modules
        self._with_methods: dict[str, list[str]] = {}
        for path, name in modules.methods:
            self._with_methods.setdefault(name, []).append(path)
        self._joined: dict[tuple[str, str], str] = {}

    def of(self, outer: str, eqn: JaxprEqn) -> str:
        """The path of an equation in a body whose own path is `outer`."""
        return self._join(outer, _names(name_stack(eqn)))

    def of_stack(self, stack: str) -> str:
        """The path that a name stack spells.

        >>> paths = Paths(Modules(roots=frozenset(["Net"]), methods=frozenset([("encoder", "encoder.encode")])))
        >>> paths.of_stack("transpose(jvp(Net))/encoder/encoder.encode/dense")
        'encoder/dense'
        """
        return self._join("", _names(stack))

    def _join(self, outer: str, names: list[str]) -> str:
        key = outer, "/".join(names)
        if key not in self._joined:
            self._joined[key] = "/".join(self._inside(outer.split("/") if outer else [], names))
        return self._joined[key]

    def _inside(self, path: list[str], names: list[str]) -> list[str]:
        for name in names:
            if name in self._modules.roots:
                continue
            if name.startswith(ELSEWHERE):
                path = [name.removeprefix(ELSEWHERE)]
            elif name not in self._with_methods:
                path = [*path, name]
            elif not self._is_own_method(path, name):
                path = [*path, name.partition(".")[0]]
        return path

    def _is_own_method(self, path: list[str], name: str) -> bool:
        """Whether a method that is called in the module at `path` is its own, not that of one inside."""
        here = "/" + "/".join(path)
        return any(here.endswith(f"/{module}") for module in self._with_methods[name])


AUTOCAST = "jmp_autocast"
"""The scope of what autocast decided, which tells it from what an author wrote; no part of a path."""

_NO_SCOPES = frozenset(("", "rematted_computation", "checkpoint", "force_full_precision", AUTOCAST))


def _names(stack: str) -> list[str]:
    """The scopes in a name stack, without what transformations put around them: `transpose(jvp(a))/b` is `a/b`."""
    return [name for name in re.sub(r"\w+\(|\)", "", stack).split("/") if name not in _NO_SCOPES]
