"""The paths of modules, out of the name stacks of equations."""

from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ._program import PRODUCT_SCOPE, name_stack, strip_transformations

ELSEWHERE = "^"
"""What starts the scope of a module that is called from one that it is not inside of, such as a tied embedding: its
path starts there."""

AUTOCAST = "jmp_autocast"
"""The scope of what autocast decided, which tells it from what an author wrote; no part of a path."""

RECORD = "jmp_record"
"""The scope of what a recorder measures, which is no part of the user's program."""

ROUNDING_SCOPE = "jmp_rounding"
"""The scope of what rounds the operands of a product into a quantized format, and back: conversions, which are no part
of what a layer computes in; no part of a path."""

_NO_SCOPES = frozenset({
    "", "rematted_computation", "checkpoint", "force_full_precision", AUTOCAST, RECORD, ROUNDING_SCOPE, PRODUCT_SCOPE,
})  # fmt: skip


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


class ModulePaths:
    """Reads the paths of equations.

    Args:
      modules: the modules that the program calls.
    """

    def __init__(self, modules: Modules):
        self._modules = modules
        self._with_methods: dict[str, list[str]] = {}
        for path, name in modules.methods:
            self._with_methods.setdefault(name, []).append(path)
        self._joined: dict[tuple[str, str], str] = {}

    def find(self, outer: str, eqn: JaxprEqn) -> str:
        """The path of an equation in a body whose own path is `outer`."""
        return self._join(outer, _list_names(name_stack(eqn)))

    def read_stack(self, stack: str) -> str:
        """The path that a name stack spells.

        >>> paths = ModulePaths(Modules(roots=frozenset(["Net"]), methods=frozenset([("encoder", "encoder.encode")])))
        >>> paths.read_stack("transpose(jvp(Net))/encoder/encoder.encode/dense")
        'encoder/dense'
        """
        return self._join("", _list_names(stack))

    def _join(self, outer: str, names: list[str]) -> str:
        key = outer, "/".join(names)
        if key not in self._joined:
            self._joined[key] = "/".join(self._follow(outer.split("/") if outer else [], names))
        return self._joined[key]

    def _follow(self, path: list[str], names: list[str]) -> list[str]:
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
        """Whether a method that is called in the module at `path` belongs to that module, not to one inside."""
        here = "/" + "/".join(path)
        return any(here.endswith(f"/{module}") for module in self._with_methods[name])


def _list_names(stack: str) -> list[str]:
    """The scopes in a name stack, without what transformations put around them: `transpose(jvp(a))/b` is `a/b`.

    The subscripts of `jnp.einsum`, which opens a scope of that name, are no module's name.
    """
    names = strip_transformations(stack).split("/")
    return [name for name in names if name not in _NO_SCOPES and "->" not in name]
