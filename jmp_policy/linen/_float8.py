"""Float8 state of linen's layers: scales and amax histories, in a collection of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from .._base import OVERWRITE, remember_weakly
from ..policy import Float8, Policy, PolicyMap
from ..quant._layers import why_layer_wide
from ..quant._products import State, needs_state, new_state
from ..quant._weights import WHY_TABLES_WIDE, Layout
from ._active_policy import CURRENT
from ._fields import temporarily_set
from ._layer_table import LAYERS, open_layer
from ._place import is_applied_inside, path_text

_REWRITES = ("_l2_normalize", "_spectral_normalize")
"""The methods by which `nn.WeightNorm` and `nn.SpectralNorm` rewrite variables of the layer inside."""


def spare_state(module: nn.Module, next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps an `nn.WeightNorm` or `nn.SpectralNorm` from rewriting float8 state, such as `kernel_scale`."""
    if not has_float8_state(CURRENT.value.policy):
        return next_fun

    def spare(rewrite: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rewrite)
        def rewrite_others(path: tuple[Any, ...], variable: Any, **options: Any) -> Any:
            return variable if path[0].key == OVERWRITE else rewrite(path, variable, **options)

        return rewrite_others

    fields = {name: spare(getattr(module, name)) for name in _REWRITES if hasattr(module, name)}
    return _call_with_fields(module, fields, next_fun)


def share_state(module: nn.RNN, format: Float8, next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the float8 state of an RNN on to its steps, beside the collections that they share already."""
    shared = module.variable_broadcast
    shared = (shared,) if isinstance(shared, str) else shared
    if has_no_state(module, format) or not isinstance(shared, tuple | list):
        return next_fun
    return _call_with_fields(module, {"variable_broadcast": (*shared, OVERWRITE)}, next_fun)


def _call_with_fields(module: nn.Module, fields: dict[str, Any], next_fun: Callable[..., Any]) -> Callable[..., Any]:
    def call_with_fields(*args: Any, **kwargs: Any) -> Any:
        with temporarily_set(module, fields):
            return next_fun(*args, **kwargs)

    return call_with_fields


def explain_float8_layer(module: nn.Module, format: Float8, shape: tuple[int, ...], layout: Layout) -> str:
    """Describes the weight of a bound module for `Row.quantization`."""
    if isinstance(module, nn.Embed):
        return f"left: {WHY_TABLES_WIDE}"
    if has_no_state(module, format):
        return "left: it runs through .apply without state to scale by, and would lose what it made"
    layer = LAYERS[nn.Einsum] if isinstance(module, nn.Einsum) else open_layer(module)
    if layer is None:
        return "left: it multiplies by a function of its own"
    groups = getattr(module, "feature_group_count", 1)
    is_convolution = layer.operation == "conv_general_dilated"
    left = why_layer_wide(shape, layout, format, is_convolution=is_convolution, groups=groups)
    return str(format) if left is None else f"left: {left}"


@remember_weakly
def has_float8(given: Policy | PolicyMap) -> bool:
    return any(isinstance(policy.quantization, Float8) for policy in _list_policies(given))


@remember_weakly
def has_float8_state(given: Policy | PolicyMap) -> bool:
    return any(needs_state(policy.quantization) for policy in _list_policies(given))


def _list_policies(given: Policy | PolicyMap) -> list[Policy]:
    if isinstance(given, Policy):
        return [given]
    return [policy for policy in (given.default, *(rule.policy for rule in given.rules)) if policy is not None]


def has_no_state(module: nn.Module, format: Float8) -> bool:
    """True for a module that runs through `.apply` inside another one and was not given its float8 state."""
    if not needs_state(format) or module.is_mutable_collection(OVERWRITE):
        return False
    is_empty = module.scope.is_collection_empty(OVERWRITE)  # type: ignore[union-attr]
    return is_empty and is_applied_inside(module, CURRENT.value.path)


def find_state(module: nn.Module, format: Float8) -> State:
    """Returns the state of a layer; makes it while the model is initialized, else rejects a missing one."""
    assert module.scope is not None
    state: State = {}
    for name, initial in jax.eval_shape(functools.partial(new_state, format)).items():
        if not module.scope.has_variable(OVERWRITE, name) and not module.is_mutable_collection(OVERWRITE):
            raise ValueError(
                f"The layer {path_text(module)!r} scales by an amax history ({str(format)!r}) and finds none: its "
                f"variables have no collection {OVERWRITE!r}, or it is inside of a transform that does not pass it "
                "on. For example: variables = model.init(key, x) | {'params': params}; or nn.scan(Layer, "
                f"variable_axes={{'params': 0, {OVERWRITE!r}: 0}}, ...); or the policy "
                "'float8(recipe=current)_from_mixed_bfloat16', which has no state. Differentiate the state beside the "
                "parameters: its gradient is the next state."
            )
        make = jnp.ones if name.endswith("scale") else jnp.zeros
        state[name] = module.variable(OVERWRITE, name, make, initial.shape, initial.dtype).value
    return state
