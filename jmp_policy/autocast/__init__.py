"""Mixed precision for any JAX function, per operation."""

import typing as _typing

from .._base import load_lazily as _load_lazily
from ._autocast import autocast as autocast

if _typing.TYPE_CHECKING:
    from ._rewrite import AutocastRules as AutocastRules
else:  # loads the tables when they are first used
    _SOURCES = {"_rewrite": "AutocastRules"}
    __getattr__, __dir__ = _load_lazily(__name__, _SOURCES, globals())
