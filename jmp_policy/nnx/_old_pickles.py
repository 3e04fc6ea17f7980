"""The names that pickles of models hold, where an older version of the library wrote them.

A pickle finds a class or a function by the file that it stood in. Names that changed since are provided here; a file
that no longer exists is made anew, and holds nothing else.
"""

import sys
import types
from collections.abc import Callable
from typing import Any

from ._attachment import adopt, make_policied_class, rebuild_module
from ._decorate import cast_params, decorate_class
from ._methods import run_method
from ._module_spec import CallEffect, DtypeSource, ModuleSpec, Product, find_spec
from ._quantized_embed import make_quantized_embed


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


def _make_policied_class(spec: ModuleSpec, adopt: object) -> type:
    return make_policied_class(spec)


def _rebuild_module(spec: ModuleSpec, adopt: object, attributes: dict[str, Any]) -> Any:
    return rebuild_module(spec, attributes)


def _call_method(
    module: Any, spec: ModuleSpec, method: Any, args: tuple, kwargs: dict[str, Any], adopt: Callable[..., None]
) -> Any:
    adopt(module, spec)
    return run_method(module, spec, method, args, kwargs)


def _provide(file: str, **names: Any) -> None:
    path = f"{__package__}.{file}"
    vars(sys.modules.setdefault(path, types.ModuleType(path))).update(names)


_provide("_roles", Role=_Role, role_of=find_spec)
_provide("_adopt", adopt=adopt)
_provide("_call", call_method=_call_method)
_provide("_cast_params", cast_params=cast_params)
_provide("_classes", policied_class=_make_policied_class, _remade=_rebuild_module)
_provide("_decorate", decorated=decorate_class)
_provide("_quantized_embed", quantized_embed=make_quantized_embed)
