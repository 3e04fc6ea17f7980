"""How a module inside declares its variables: made in the dtypes its author wrote, and parameters stored in another."""

import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from .._formats import integers_of
from .._policy import Policy
from .._trees import cast_floating
from ._fields import authors_dtype, is_filled_in
from ._quantized import quantized_param

_NEVER_NARROWED = ("params", "batch_stats")
"""Collections whose variables are made as if no policy had filled in a `dtype` either; a cache has its layer's."""


def policied_param(module: nn.Module, policy: Policy, reads_in_compute: bool) -> Callable[..., Any]:
    """The module's `param`, which draws in the author's dtype, stores in param dtype, and may read in compute dtype."""
    return functools.partial(_param, module, module.param, policy, reads_in_compute)


def policied_variable(module: nn.Module) -> Callable[..., Any]:
    """The module's `variable`, which makes running statistics and other state in the author's dtype."""
    return functools.partial(_variable, module, module.variable)


def stores_params(module: nn.Module, policy: Policy) -> bool:
    """Whether parameters may be made now, in the param dtype of a policy."""
    assert module.scope is not None
    return policy.param_dtype is not None and module.scope.is_mutable_collection("params")


def _param(
    module: nn.Module,
    param: Callable[..., Any],
    policy: Policy,
    reads_in_compute: bool,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    init = functools.partial(_stored, policy, functools.partial(_made, module, "params", init_fn))
    if integers_of(policy.quantization) is not None and not kwargs:
        value = quantized_param(module, param, policy, name, init, *init_args)
    else:
        value = param(name, init, *init_args, **kwargs)
    return cast_floating(value, policy.compute_dtype) if reads_in_compute else value


def _variable(
    module: nn.Module,
    variable: Callable[..., Any],
    collection: str,
    name: str,
    init_fn: Callable[..., Any] | None = None,
    *init_args: Any,
    **kwargs: Any,
) -> Any:
    init = None if init_fn is None else functools.partial(_made, module, collection, init_fn)
    return variable(collection, name, init, *init_args, **kwargs)


def _stored(policy: Policy, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return policy.cast_to_param(init_fn(*args, **kwargs))


def _made(module: nn.Module, collection: str, init_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What an initializer makes that finds the author's dtypes in its arguments, and on the module."""
    filled = {name: dtype for name in ("dtype", "param_dtype") if is_filled_in(dtype := vars(module).get(name))}
    if collection not in _NEVER_NARROWED:
        filled.pop("dtype", None)
        as_written = lambda x: authors_dtype(x) if x is filled.get("param_dtype") else x
    else:
        as_written = authors_dtype
    attributes = vars(module)
    attributes.update({name: authors_dtype(dtype) for name, dtype in filled.items()})
    try:  # not in a context manager: every parameter of a model comes through here
        return init_fn(*map(as_written, args), **{name: as_written(x) for name, x in kwargs.items()})
    finally:
        attributes.update(filled)
