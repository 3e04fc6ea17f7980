"""What a float8 policy does in linen's layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from .._base import OVERWRITE, PyTree, prepare_state, read_state, remember_weakly
from ..policy import Float8, Policy, PolicyMap
from ..quant._layers import why_layer_wide, widen_functions
from ..quant._products import State, needs_state, new_state
from ..quant._weights import WHY_TABLES_WIDE, Layout
from ._active_policy import CURRENT
from ._fields import temporarily_set
from ._layer_table import LAYERS, compute_einsum, find_equation, open_layer
from ._place import is_applied_inside, path_text

_REWRITES = ("_l2_normalize", "_spectral_normalize")
"""The methods by which `nn.WeightNorm` and `nn.SpectralNorm` rewrite the variables of layers, each by its path."""

_EINSUM = inspect.unwrap(nn.Einsum.__call__)


def make_float8_method(
    module: nn.Module,
    function: Callable[..., Any],
    format: Float8,
    accumulate: np.dtype | None,
    next_fun: Callable[..., Any],
) -> Callable[..., Any]:
    """A method of a module under a float8 policy.

    Flax's layers multiply by a function in a field, in whose place ours is written while the method runs.

    Args:
      module: a bound module.
      function: the method as it was written.
      format: of the policy.
      accumulate: the accumulate dtype of the policy.
      next_fun: what to call for it.
    """
    if _has_no_state(module, format):
        return next_fun
    if function is _EINSUM:
        return functools.partial(_call_einsum, module, format, accumulate, next_fun)  # type: ignore[arg-type]
    fields = _make_fields(module, format) if function.__module__.startswith("flax.linen.") else {}
    if not fields:
        return next_fun

    def call_with_fields(*args: Any, **kwargs: Any) -> Any:
        with temporarily_set(module, fields):
            return next_fun(*args, **kwargs)

    return call_with_fields


def spare_state(module: nn.Module, next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a module that rewrites the variables of others, and leaves alone the state of float8 layers.

    Args:
      module: a bound `nn.WeightNorm` or `nn.SpectralNorm`, whatever policy holds for it itself.
      next_fun: what to call for the method.
    """
    if not has_float8_state(CURRENT.value.policy):
        return next_fun
    fields = {name: _spare_state(getattr(module, name)) for name in _REWRITES if hasattr(module, name)}

    def call_with_fields(*args: Any, **kwargs: Any) -> Any:
        with temporarily_set(module, fields):
            return next_fun(*args, **kwargs)

    return call_with_fields


def explain_float8_layer(module: nn.Module, format: Float8, shape: tuple[int, ...], layout: Layout) -> str:
    """What becomes of the products with the weight of a bound module, as `Row.quantization` says it."""
    if isinstance(module, nn.Embed):
        return f"left: {WHY_TABLES_WIDE}"
    if _has_no_state(module, format):
        return "left: it runs through .apply without state to scale by, and would lose what it made"
    layer = LAYERS[nn.Einsum] if isinstance(module, nn.Einsum) else open_layer(module)
    if layer is None:
        return "left: it multiplies by a function of its own"
    groups = getattr(module, "feature_group_count", 1)
    options = {"is_convolution": layer.operation == "conv_general_dilated", "groups": groups}
    left = why_layer_wide(shape, layout, format, **options)
    return str(format) if left is None else f"left: {left}"


def mark_state(given: Policy | PolicyMap, variables: PyTree) -> PyTree:
    """The variables of a model, whose state autodiff combines by max, if the model has some."""
    return prepare_state(variables, 1.0) if has_float8_state(given) else variables


def store_state(given: Policy | PolicyMap, out: PyTree) -> PyTree:
    """What a model returned with its variables, whose state is numbers again."""
    return read_state(out) if has_float8_state(given) else out


@remember_weakly
def has_float8_state(given: Policy | PolicyMap) -> bool:
    if isinstance(given, Policy):
        return needs_state(given.quantization)
    policies = [rule.policy for rule in given.rules]
    return any(map(has_float8_state, policies)) or (given.default is not None and has_float8_state(given.default))


def _has_no_state(module: nn.Module, format: Float8) -> bool:
    """Whether a module runs through `.apply` inside another one, and was not given the state to scale by."""
    if not needs_state(format) or module.is_mutable_collection(OVERWRITE):
        return False
    is_empty = module.scope.is_collection_empty(OVERWRITE)  # type: ignore[union-attr]
    return is_empty and is_applied_inside(module, CURRENT.value.path)


def _make_fields(module: nn.Module, format: Float8) -> dict[str, Any]:
    if isinstance(module, nn.RNN):  # which hands on the collections that its steps share by name
        shared = module.variable_broadcast
        shared = (shared,) if isinstance(shared, str) else shared
        return {"variable_broadcast": (*shared, OVERWRITE)} if isinstance(shared, tuple | list) else {}
    layer = open_layer(module)
    if layer is None or layer.field is None:
        return {}
    return {layer.field: layer.make_float8_multiply(format, functools.partial(_find_state, module, format))}


def _spare_state(rewrite: Callable[..., Any]) -> Callable[..., Any]:
    """A rewriting that passes state on: it knows a weight by its path, and `kernel_scale` looks like one to it."""

    @functools.wraps(rewrite)
    def rewrite_others(path: tuple[Any, ...], variable: Any, **options: Any) -> Any:
        return variable if path[0].key == OVERWRITE else rewrite(path, variable, **options)

    return rewrite_others


def _call_einsum(
    module: nn.Einsum,
    format: Float8,
    accumulate: np.dtype | None,
    own: Callable[..., Any],
    inputs: jax.Array,
    einsum_str: str | None = None,
) -> Any:
    """`nn.Einsum.__call__`, which multiplies by a function that is not in a field."""
    equation = find_equation(module, einsum_str)
    if equation is None:
        return own(inputs, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    multiply = LAYERS[nn.Einsum].make_float8_multiply(format, functools.partial(_find_state, module, format))
    functions = widen_functions(module.promote_dtype, multiply, "einsum", accumulate, as_tuple=False)
    return compute_einsum(module, equation, inputs, kernel, *functions)


def _find_state(module: nn.Module, format: Float8) -> State:
    """The state of a layer, in a collection of its own; made where a model is initialised.

    Raises:
      ValueError: there is none, and it cannot be made.
    """
    assert module.scope is not None
    state: State = {}
    for name, initial in jax.eval_shape(functools.partial(new_state, format)).items():
        if not module.scope.has_variable(OVERWRITE, name) and not module.is_mutable_collection(OVERWRITE):
            raise ValueError(_explain_no_state(module, format))
        make = jnp.ones if name.endswith("scale") else jnp.zeros
        state[name] = module.variable(OVERWRITE, name, make, initial.shape, initial.dtype).value
    return state


def _explain_no_state(module: nn.Module, format: Float8) -> str:
    path = path_text(module)
    return (
        f"The layer {path!r} scales by what it saw before ({str(format)!r}), and finds no state: its "
        f"variables are without the collection {OVERWRITE!r}, or it is inside of a transform that does not hand it on. "
        f"For example: variables = model.init(key, x) | {{'params': params}}; or nn.scan(Layer, variable_axes="
        f"{{'params': 0, {OVERWRITE!r}: 0}}, ...); or the policy 'float8(recipe=current)_from_mixed_bfloat16', which "
        "has none. State is to be differentiated beside the parameters, for its gradient is the next state."
    )
