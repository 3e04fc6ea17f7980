"""Calling a linen module under the eyes of someone."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax.core import DenyList, meta

from ..quant import QuantizedArray
from ..quant._watched import Called, Watch
from ..quant._weight import WEIGHT_NAMES
from ._active_policy import CURRENT, ActivePolicy
from ._classes import unpolicied_class
from ._place import calling, is_trial, path_of
from ._quantized import quantization_of


def bound(model: nn.Module, variables: Any) -> nn.Module:
    """A module with its variables.

    Raises:
      ValueError: it is bound to some and given others, or neither.
    """
    if (model.scope is None) == (variables is None):
        amiss = "and is bound to some already" if variables is not None else "and is not bound to them"
        raise ValueError(f"A linen module runs with variables, {amiss}. For example: model.bind(variables).")
    return model if variables is None else model.bind(variables)


def weights_of(model: nn.Module) -> dict[str, Any]:
    """The weights of a bound module that can be quantized, or are, by the path of the module that they belong to."""
    _, variables = model.unbind()
    leaves = jax.tree.leaves_with_path(meta.unbox(variables.get("params", {})), is_leaf=_is_quantized)
    weights = {}
    for keys, leaf in leaves:
        path, _, name = jax.tree_util.keystr(keys, simple=True, separator="/").rpartition("/")
        if name in WEIGHT_NAMES and leaf.ndim > 1:
            weights[path] = leaf
    return weights


def call_watched(model: nn.Module, watch: Watch, inputs: tuple, method: Any, kwargs: dict[str, Any]) -> Any:
    """Calls a bound module; what it writes to its variables is lost.

    Args:
      model: the module.
      watch: what runs in the place of the methods of all modules inside, and of its own.
      inputs: positional arguments of the method.
      method: what to call, as in `Module.apply`.
      kwargs: keyword arguments of `Module.apply`.
    """

    def intercept(next_fun: Callable[..., Any], args: tuple, kwargs: dict, context: Any) -> Any:
        module: nn.Module = context.module
        if context.method_name == "setup" or module.scope is None or is_trial(module, context.method_name):
            return next_fun(*args, **kwargs)
        with calling(module):
            return watch(_called(module), next_fun, args, kwargs)

    unbound, variables = model.unbind()
    mutable = DenyList("params")  # a cache, statistics and what is sown: any call may write them
    with nn.intercept_methods(intercept):
        return unbound.apply(variables, *inputs, method=method, mutable=mutable, **kwargs)[0]


def _called(module: nn.Module) -> Called:
    frame: ActivePolicy | None = CURRENT.value
    quantization = "" if frame is None else quantization_of(module, frame.match(module).policy)
    return Called("/".join(path_of(module)), unpolicied_class(type(module)), quantization)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedArray)
