"""Mixed precision for any JAX function, operation by operation."""

import typing as _typing

from ._autocast import autocast as autocast

if _typing.TYPE_CHECKING:
    from ._rules import AutocastRules as AutocastRules
else:  # a checker would take each misspelt name for one that is loaded later

    def __getattr__(name: str) -> object:
        if name == "AutocastRules":  # its tables are loaded when they are first needed
            from ._rules import AutocastRules

            return AutocastRules
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
