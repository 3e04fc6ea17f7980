"""The names that pickles of models hold, where an older version of the library wrote them.

A pickle finds classes and functions by the files they stood in. The files below no longer exist, and are made anew
here, empty but for what pickles ask of them.
"""

import sys
import types
from typing import Any

from . import _attachment
from ._module_spec import CallEffect, DtypeSource, ModuleSpec, Product, find_spec


class _Role(ModuleSpec):
    """A spec whose states were bools; it is an ordinary one as soon as they have been read."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        attached, casts, calls = (state.pop(name) for name in ("attached", "boundary", "calls"))
        reads_params, is_open, hands_on = (state.pop(name) for name in ("casts_params", "open_dtype", "bridges"))
        reads_rows, in_float8 = state.pop("reads_quantized_rows"), state.pop("multiplies_in_float8")
        effect = CallEffect.CASTS if casts else CallEffect.COMPUTES if calls else CallEffect.NOTHING
        source = DtypeSource.FIELD if is_open else DtypeSource.PARAMS if reads_params else DtypeSource.AUTHOR
        vars(self).update(
            state,
            effect=CallEffect.CASTS_AT_ROOT if attached else effect,
            dtype_source=DtypeSource.LINEN_MODULE if hands_on else source,
            product=Product.FLOAT8 if in_float8 else Product.QUANTIZED_ROWS if reads_rows else Product.OWN,
        )
        object.__setattr__(self, "__class__", ModuleSpec)


def _make_class(spec: ModuleSpec, adopt: Any) -> type:
    return _attachment.policied_class(spec)


def _rebuild_module(spec: ModuleSpec, adopt: Any, attributes: dict[str, Any]) -> Any:
    return _attachment._remade(spec, attributes)


def _provide(file: str, **names: Any) -> None:
    path = f"{__package__}.{file}"
    vars(sys.modules.setdefault(path, types.ModuleType(path))).update(names)


_provide("_roles", Role=_Role, role_of=find_spec)
_provide("_adopt", adopt=_attachment.adopt)
_provide("_classes", policied_class=_make_class, _remade=_rebuild_module)
