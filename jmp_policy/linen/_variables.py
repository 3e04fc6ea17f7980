"""Fields of a linen module during a call: the policy's dtypes, and how it makes and reads variables.

Variables are drawn in the dtypes of their author, and parameters are stored in the param dtype.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from flax import linen as nn

from .._base import cast_floating
from ..modules import find_adapter, widen_policy
from ..policy import Policy, match_policy, stored_format_of
from ._active_policy import CURRENT, NOTES
from ._fields import (
    find_fields,
    has_open_dtype,
    is_filled_in,
    is_widening_params,
    mark_dtype,
    mark_param_dtype,
    needs_param_dtype,
    read_authors_dtype,
    temporarily_set,
)
from ._quantized import read_quantized_param

INSIDE = "_jmp_inside"
"""The attribute of a module whose method is running, with its policy. Methods that this one calls reuse the fields."""

_NEVER_NARROWED = ("params", "batch_stats")
"""Collections that are made without the policy's compute dtype. A cache has the dtype of its layer."""


def fill_fields(module: nn.Module, policy: Policy, *, until_it_returns: bool) -> AbstractContextManager[None]:
    """Fills in the dtype fields of a bound module, and how it makes and reads variables, for a `with` block.

    `until_it_returns` is false for a plain function of the module: methods that it calls must still be boundaries.
    """
    assert module.scope is not None
    param_dtype = policy.param_dtype
    values: dict[str, Any] = {INSIDE: policy} if until_it_returns else {}
    if has_open_dtype(module):
        values["dtype"] = mark_dtype(policy.compute_dtype)
    elif is_widening_params(module, param_dtype):
        values["dtype"] = mark_dtype(param_dtype)
    if param_dtype is not None and needs_param_dtype(module, param_dtype):
        values["param_dtype"] = mark_param_dtype(module, param_dtype)
    # Flax asks an initializer for its shape at every call, and an orthogonal one refuses to draw in half precision.
    is_storing = param_dtype is not None and module.scope.is_mutable_collection("params")
    is_quantized = policy.quantization is not None and stored_format_of(policy.quantization) is not None
    reads_in_compute = not find_fields(type(module)).casts_own_params
    if reads_in_compute or "param_dtype" in values or is_storing or is_quantized:
        values["param"] = functools.partial(_declare_param, module, module.param, policy, reads_in_compute)
    if "param_dtype" in values or "dtype" in values:
        values["variable"] = functools.partial(_declare_variable, module, module.variable)
    if is_bridge(module):
        values["nnx_class"] = _MakerAcross(module, policy)
    filled = temporarily_set(module, values)
    return _fill_first_carry(filled, module.cell) if isinstance(module, nn.RNN) else filled


def is_bridge(module: nn.Module) -> bool:
    """True if a linen module wraps an nnx one."""
    bridge = sys.modules.get("flax.nnx.bridge")
    return bridge is not None and isinstance(module, bridge.ToLinen)


class _MakerAcross:
    """Replaces the class of the nnx module that a linen one wraps: makes it with its policy.

    Flax calls it as a constructor, and reads methods of the class by name.
    """

    def __init__(self, module: nn.Module, policy: Policy):
        active = CURRENT.value
        self._make = vars(module)["nnx_class"]
        self._rules = active.get_rules_inside(module, policy)
        self._path = active.locate(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._make(*args, **kwargs)
        adapter = find_adapter(made)
        if adapter is None or adapter.attach_wrapped is None:
            return made
        made, types = adapter.attach_wrapped(made, self._rules, self._path, (args, kwargs))
        # Both modules have the same path. The outer type counts, unless a rule names the inner one.
        if match_policy(self._rules, self._path, types).rule is None:
            types.pop(self._path, None)
        NOTES.get().types.update(types)
        return made

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._make, name)
        if not callable(found):
            return found
        return lambda module, *args, **kwargs: getattr(module, name)(*args, **kwargs)


@contextlib.contextmanager
def _fill_first_carry(filled: AbstractContextManager[None], cell: nn.Module) -> Iterator[None]:
    """Fills in the fields of the cell too: `nn.RNN` asks it for the first carry before the cell is called."""
    dtype = None if cell.scope is None else _choose_first_carry_dtype(CURRENT.value.match(cell).policy)
    fields = {}
    if dtype is not None and needs_param_dtype(cell, dtype):
        fields["param_dtype"] = mark_param_dtype(cell, dtype)
    with filled, temporarily_set(cell, fields):
        yield


def _choose_first_carry_dtype(policy: Policy) -> np.dtype | None:
    """Returns the param dtype, or a wider compute dtype: a narrower carry would be rounded at each step."""
    if policy.param_dtype is None or policy.compute_dtype is None:
        return policy.param_dtype
    return max(policy.param_dtype, policy.compute_dtype, key=lambda dtype: dtype.itemsize)


def _declare_param(
    module: nn.Module,
    param: Callable[..., Any],
    policy: Policy,
    reads_in_compute: bool,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `Module.param`: draws in the author's dtype, stores in param dtype, and may read in compute dtype."""
    drawn = functools.partial(_init_in_authors_dtype, module, "params", init_fn)
    init = functools.partial(_init_in_param_dtype, policy, drawn)
    if stored_format_of(policy.quantization) is not None and not kwargs:
        value = read_quantized_param(module, param, policy, name, init, *init_args)
    else:
        value = param(name, init, *init_args, **kwargs)
    return cast_floating(value, widen_policy(policy).compute_dtype) if reads_in_compute else value


def _declare_variable(
    module: nn.Module,
    variable: Callable[..., Any],
    collection: str,
    name: str,
    init_fn: Callable[..., Any] | None = None,
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces `Module.variable`: makes running statistics and other state in the author's dtype."""
    init = None if init_fn is None else functools.partial(_init_in_authors_dtype, module, collection, init_fn)
    return variable(collection, name, init, *init_args, **kwargs)


def _init_in_param_dtype(policy: Policy, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return policy.cast_to_param(init_fn(*args, **kwargs))


def _init_in_authors_dtype(
    module: nn.Module, collection: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Runs an initializer with the author's dtypes in its arguments and on the module."""
    filled = {name: dtype for name in ("dtype", "param_dtype") if is_filled_in(dtype := vars(module).get(name))}
    if collection not in _NEVER_NARROWED:
        filled.pop("dtype", None)
        as_written = lambda x: read_authors_dtype(x) if x is filled.get("param_dtype") else x
    else:
        as_written = read_authors_dtype
    attributes = vars(module)
    attributes.update({name: read_authors_dtype(dtype) for name, dtype in filled.items()})
    try:  # a context manager would be slower, and each parameter comes through here
        return init_fn(*map(as_written, args), **{name: as_written(x) for name, x in kwargs.items()})
    finally:
        attributes.update(filled)
