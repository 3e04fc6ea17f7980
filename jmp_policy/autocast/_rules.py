"""A user's own table."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from . import _tables
from ._functions import Functions
from ._tables import Precision


@dataclasses.dataclass(frozen=True)
class AutocastRules:
    """Moves primitives, functions and scopes between the classes of autocast."""

    primitives: Any = ()
    functions_: Any = ()

    def table(self, compute_dtype: Any) -> Mapping[str, Precision]:
        moved = {name: Precision[precision.upper()] for name, precision in self.primitives}
        return _table(bool(jnp.finfo(compute_dtype).maxexp < 100)) | moved

    def functions(self) -> Functions:
        return Functions(_tables.FUNCTIONS | dict(self.functions_))


@functools.cache
def _table(narrow_range: bool) -> dict[str, Precision]:
    found = {}
    for precision in Precision:
        found |= dict.fromkeys(getattr(_tables, precision.name, ()), precision)
    if narrow_range:
        found |= dict.fromkeys(_tables.FULL_IN_FLOAT16, Precision.FULL)
    return found
