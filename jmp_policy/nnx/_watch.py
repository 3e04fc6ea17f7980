"""Calling an nnx model under the eyes of someone."""

import contextvars
from collections.abc import Callable
from typing import Any

from flax import nnx

from ..quant._watched import Called, Watch
from ._explain import callable_of
from ._layer_table import weight_in
from ._module_spec import find_spec
from ._observed import watch_modules
from ._quantized import describe_quantization

# Not in the classes that are watched: JAX never forgets one of a pytree.
_WATCH: contextvars.ContextVar[Watch] = contextvars.ContextVar("_WATCH")


def bound(model: nnx.Module, variables: Any) -> nnx.Module:
    """The model, which has its variables.

    Raises:
      ValueError: it is given others.
    """
    if variables is not None:
        raise ValueError("variables are those of a linen module; an nnx model has its own.")
    return model


def weights_of(model: nnx.Module) -> dict[str, Any]:
    """The weights of a model that can be quantized, or are, by the path of the module that they belong to."""
    weights = {}
    for path, module in nnx.iter_modules(model):
        spec = find_spec(module)
        found = weight_in(type(module) if spec is None else spec.base, vars(module))
        if found is not None:
            weights["/".join(map(str, path))] = found.value
    return weights


def call_watched(model: nnx.Module, watch: Watch, inputs: tuple, method: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a copy of a model.

    Args:
      model: the model.
      watch: what runs in the place of the methods of all modules inside, and of its own.
      inputs: positional arguments of the method.
      method: the name of what to call, a method, or a function of the module; `None` for the module itself.
      kwargs: keyword arguments of the method.
    """
    copy = nnx.clone(model)
    watch_modules(copy, _watched)
    token = _WATCH.set(watch)
    try:
        return callable_of(copy, method)(*inputs, **kwargs)
    finally:
        _WATCH.reset(token)


def _watched(path: str, method: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    module: Any = method.__self__  # type: ignore[attr-defined]
    spec = find_spec(module)
    base: Any = type(module).__base__ if spec is None else spec.base
    quantization = "" if spec is None else describe_quantization(base, vars(module), spec.policy)
    return _WATCH.get()(Called(path, base, quantization), method, args, kwargs)
