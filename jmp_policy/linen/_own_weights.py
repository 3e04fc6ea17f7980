"""The weights that linen modules multiply by in their own code, where no layer of Flax does it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from flax.core import lift, meta
from flax.linen import transforms

from .._base import REWRITING, Args, Kwargs, drop_value_key, is_array, is_floating
from ..policy import Policy, PolicyMap, list_policies
from ..quant import Layout, QuantizedArray, find_accumulate_dtype
from ._layer_table import layer_of
from ._place import path_text

if TYPE_CHECKING:
    from ..autocast import WeightFormat


class _Read(NamedTuple):
    """A parameter that the code of a module read."""

    key: str  # its path in the variables
    value: Any
    path: str  # its path in the whole model
    format: WeightFormat | None = None
    weight: QuantizedArray | None = None  # the stored weight with these values


_READ: contextvars.ContextVar[list[_Read] | None] = contextvars.ContextVar("_READ", default=None)
"""The parameters that were read while the outermost module was traced. Not a JAX context: it is only written to."""


def note_weight(module: nn.Module, policy: Policy, name: str, value: Any, layout: Layout | None = None) -> bool:
    """Records a weight that the code of a module reads; returns False if its matmuls are not rewritten.

    `quantize` stores a `kernel` or `embedding` in a `layout`, whatever code multiplies by it.
    """
    found = _READ.get()
    if found is None or policy.quantization is None or _is_of_flax(module):
        return False
    key, path = _join(module.path, name), f"{path_text(module)}/{name}".lstrip("/")
    if isinstance(value, QuantizedArray):
        found.append(_Read(f"{key}/values", value.values, path, weight=value))
        return True
    if not is_array(value) or not is_floating(value) or value.ndim < 2:
        return False
    from ..autocast import WeightFormat

    format = WeightFormat(policy.quantization, find_accumulate_dtype(policy), layout=layout)
    found.append(_Read(key, value, path, format))
    return True


def _is_of_flax(module: nn.Module) -> bool:
    return layer_of(type(module)) is not None or type(module).__module__.startswith("flax.linen.")


def is_rewritten(module: nn.Module, given: Policy | PolicyMap) -> bool:
    """True if a call of a module begins to rewrite the matmuls inside by their weights.

    Not under `jax.disable_jit`, where hooks need the values of modules inside.
    """
    if REWRITING.value or jax.config.jax_disable_jit or module.is_initializing():
        return False
    return any(policy.quantization is not None for policy in list_policies(given))


def is_rewritten_alone(module: nn.Module, policy: Policy, method_name: str) -> bool:
    """True if a call of a module rewrites its own matmuls alone, under `jax.disable_jit`: no modules are inside."""
    if not jax.config.jax_disable_jit or REWRITING.value or policy.quantization is None or _is_of_flax(module):
        return False
    if method_name == "setup" or not hasattr(type(module), method_name) or module.is_initializing():
        return False
    params = module.scope.variables().get("params", {})  # type: ignore[union-attr]
    own = [meta.unbox(value) for value in params.values()]
    return not any(isinstance(value, Mapping) for value in own) and any(np.ndim(value) > 1 for value in own)


def call_rewritten(
    call: Callable[..., Any], module: nn.Module, args: Args, kwargs: Kwargs, is_running: bool = False
) -> Any:
    """Calls `call(module, *args, **kwargs)` with the matmuls by weights of the model quantized.

    The method of a module that is running already is called again, as if it was not.
    """
    from ..autocast import Weights, quantize_products  # loads the rewriter

    state: Any = module._state
    exported = type(state)() if is_running else state.export()
    scopes, args, kwargs = transforms.get_module_scopes(module, args, kwargs)

    def call_on_variables(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        keys: dict[int, str] = {}
        reads: list[_Read] = []

        def pure(*given: Any) -> Any:
            variables, rngs, args, kwargs = given
            leaves.extend(leaf for leaf in jax.tree.leaves(given) if is_array(leaf))
            scopes = scope_fn(variables, rngs)
            for scope in scopes:
                keys.update(_name_params(scope))
            copy, args, kwargs = transforms.set_module_scopes(module, args, kwargs, scopes)
            object.__setattr__(copy, "_state", exported.export())
            token = _READ.set(reads)
            try:
                with REWRITING(True):
                    out = call(copy, *args, **kwargs)
            finally:
                _READ.reset(token)
            if not is_running:
                state.reimport(copy._state)
            return out, repack(scopes)

        def find_weights() -> Weights:
            # A module that runs by `.apply` has other variables, made of the same arrays.
            known: dict[Any, Any] = {id(read.value): read for read in reads} | {read.key: read for read in reads}
            found = Weights({}, {})
            for number, leaf in enumerate(leaves):
                read = known.get(keys.get(id(leaf)), known.get(id(leaf)))
                if read is not None and read.format is None:
                    found.stored[number] = read.path, read.weight
                elif read is not None:
                    found.floating[number] = read.path, read.format
            return found

        return quantize_products(pure, (variables, rngs, args, kwargs), {}, find_weights)

    return lift.pack(call_on_variables, (True,), (True,), (True,), enable_kwargs=True)(scopes, *args, **kwargs)


def _name_params(scope: Any) -> dict[int, str]:
    """Returns the paths of the parameters in a scope, by the ids of their arrays."""
    leaves = jax.tree.leaves_with_path(scope.variables().get("params", {}))
    spell = lambda keys: [jax.tree_util.keystr((key,), simple=True) for key in drop_value_key(keys)]
    return {id(leaf): _join(scope.path, *spell(keys)) for keys, leaf in leaves}


def _join(path: tuple[str, ...], *names: str) -> str:
    return "/".join((*path, *names))
