"""What an accumulate dtype does in linen's layers."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from ..modules.common import round_result
from ..policy import Policy
from ..quant._layers import WeightedLayer, find_accumulate_dtype, is_narrower, widen_functions
from ..quant._products import Dot, label_dot, wide_product
from ._fields import temporarily_set
from ._layer_table import compute_einsum, find_equation, is_default, layer_of, open_layer, rewritten_by


def widen_method(
    module: nn.Module, function: Callable[..., Any], policy: Policy, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """A method of a module that hands over what it sums in the accumulate dtype, if it is one of Flax's layers.

    Args:
      module: a bound module.
      function: the method as it was written.
      policy: what holds for the module; the method finds what its quantization writes in the fields.
      next_fun: what to call for the method.
    """
    dtype = find_accumulate_dtype(policy)
    if dtype is None or not _is_of_layer(module, function):
        return next_fun

    def call_wide(*args: Any, **kwargs: Any) -> Any:
        if not _is_open(module, dtype):
            return next_fun(*args, **kwargs)
        own = _METHODS.get(function)
        if own is not None:
            return own(module, dtype, next_fun, *args, **kwargs)
        with temporarily_set(module, _make_fields(module, dtype)):
            return next_fun(*args, **kwargs)

    return call_wide


def round_method(
    module: nn.Module, function: Callable[..., Any], policy: Policy, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """A method of a layer of Flax's that returns what it computed in its own dtype, whatever it was summed in."""
    if policy.accumulate_dtype is None or not _is_of_layer(module, function):
        return next_fun
    return lambda *args, **kwargs: round_result(next_fun(*args, **kwargs), module.dtype)  # type: ignore[attr-defined]


def has_wide_sums(module: nn.Module, policy: Policy) -> bool:
    """Whether a bound module hands over what it sums in the accumulate dtype of its policy."""
    layer, dtype = layer_of(type(module)), find_accumulate_dtype(policy)
    if layer is None or dtype is None or not _is_open(module, dtype):
        return False
    return layer.operation == "einsum" or isinstance(module, nn.Embed) or open_layer(module) is not None


def _is_of_layer(module: nn.Module, function: Callable[..., Any]) -> bool:
    return layer_of(type(module)) is not None and function.__module__.startswith("flax.linen.")


def _is_open(module: Any, dtype: np.dtype) -> bool:
    """Whether the author of a layer left open how it promotes and sums, and it computes in a narrower dtype."""
    if module.dtype is not None and np.dtype(module.dtype).itemsize >= dtype.itemsize:
        return False
    is_own = is_default(module, "promote_dtype") and not rewritten_by(module)
    return is_own and getattr(module, "preferred_element_type", None) is None


def _make_fields(module: nn.Module, dtype: np.dtype) -> dict[str, Any]:
    """What is written into the fields of a layer, over what a quantized policy may have written there."""
    layer: WeightedLayer | None = open_layer(module)
    if layer is None or layer.field is None or layer.operation is None:
        return {}
    promote: Any = module.promote_dtype  # type: ignore[attr-defined]
    multiply: Any = getattr(module, layer.field) or layer.default
    wide = widen_functions(promote, multiply, layer.operation, dtype, as_tuple=False)
    return dict(zip(("promote_dtype", layer.field), wide, strict=True))


def _call_einsum(
    module: nn.Einsum, dtype: np.dtype, own: Callable[..., Any], inputs: jax.Array, einsum_str: str | None = None
) -> Any:
    """`nn.Einsum.__call__`, which multiplies by a function that is not in a field."""
    equation = find_equation(module, einsum_str)
    if equation is None:
        return own(inputs, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    functions = widen_functions(module.promote_dtype, jnp.einsum, "einsum", dtype, as_tuple=False)
    return compute_einsum(module, equation, inputs, kernel, *functions)


def _call_attend(module: nn.Embed, dtype: np.dtype, own: Callable[..., Any], query: jax.Array) -> Any:
    """`nn.Embed.attend`."""
    table = jnp.asarray(module.embedding)
    stands_for_table = jnp.zeros((), table.dtype)
    inputs: Any = module.promote_dtype(query, stands_for_table, dtype=module.dtype)[0]
    if not is_narrower(inputs, dtype):
        return own(query)
    operation = label_dot(inputs.ndim, 2, Dot((((inputs.ndim - 1,), (1,)), ((), ()))))
    return wide_product(operation, inputs, table, dtype, inputs.dtype)


_METHODS: dict[Any, Callable[..., Any]] = {
    inspect.unwrap(nn.Einsum.__call__): _call_einsum,
    inspect.unwrap(nn.Embed.attend): _call_attend,
}
