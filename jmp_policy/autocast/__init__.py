"""Mixed precision for any JAX function, operation by operation."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._autocast import autocast as autocast

if _TYPE_CHECKING:
    from ._rules import AutocastRules as AutocastRules


def __getattr__(name: str) -> object:
    if name == "AutocastRules":  # its tables are loaded when they are first needed
        from ._rules import AutocastRules

        return AutocastRules
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
