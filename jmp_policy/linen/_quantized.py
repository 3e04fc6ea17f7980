"""What a quantized policy does in linen's layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from jax import lax

from .._formats import Quantization
from .._policy import Policy
from ..quant import QuantizedArray, dot_general, einsum, take
from ..quant._bilinear import Einsum, einsum as labels_of
from ..quant._layer import WEIGHT_NAMES, Multiply, Promote, as_format, weight_of
from ..quant._layout import Layout, kernel_layout, table_layout, why_left
from ..quant._weight import Unquantized, fake_quantized


def quantized_fields(module: nn.Module, format: Quantization) -> dict[str, Any]:
    """What a quantized policy writes into the fields of a layer: how it promotes, and how it multiplies."""
    operation = _operation(module)
    if operation is None:
        return {}
    promote = Promote(format, module.promote_dtype, as_tuple=False)  # type: ignore[attr-defined]
    own = {"dot_general": lax.dot_general, "conv_general_dilated": lax.conv_general_dilated}[operation]
    return {"promote_dtype": promote, operation: Multiply(own, operation)}


def quantized_param(
    module: nn.Module, param: Callable[..., Any], policy: Policy, name: str, init_fn: Callable[..., Any], *args: Any
) -> Any:
    """A parameter of a module under a quantized policy.

    The weight of a layer that multiplies by quantized weights is as stored. A weight of any other module, which could
    do nothing with integers, is as its integers say, in the compute dtype; and in training, as they would.
    """
    assert module.scope is not None
    assert policy.quantization is not None
    stored = meta.unbox(module.scope.get_variable("params", name))
    here = f" '{'/'.join((*module.path, name))}'"
    if isinstance(stored, QuantizedArray):
        init = functools.partial(_like, module, stored, name, init_fn, args)
        value = as_format(param(name, init), policy.quantization, here)
        return value if multiplies_quantized(module) else value.dequantize(policy.compute_dtype)
    value = param(name, init_fn, *args)
    if name not in WEIGHT_NAMES or jnp.ndim(value) < 2 or multiplies_quantized(module):
        return value
    weight = weight_of(value, policy.quantization, _layout(module, name, value.shape))
    return fake_quantized(weight) if isinstance(weight, Unquantized) else value


def quantized_method(
    module: nn.Module, name: str, format: Quantization, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """The method of a layer whose functions are no fields: ours in its place, where it is Flax's own."""
    own = _METHODS.get(_flax_method(type(module), name))
    return next_fun if own is None else functools.partial(own, module, format, next_fun)


def multiplies_quantized(module: nn.Module) -> bool:
    """Whether a layer computes with a quantized weight itself."""
    return _operation(module) is not None or any(
        _flax_method(type(module), name) in _METHODS for name in ("__call__", "attend")
    )


def _operation(module: nn.Module) -> str | None:
    """The field of a layer that multiplies, if its author left that and the promotion at their defaults."""
    operation = _operation_field(type(module))
    if operation is None or not _is_default(module, "promote_dtype"):
        return None
    if getattr(module, "mask", None) is not None or not getattr(module, "shared_weights", True):
        return None  # the weight is rewritten before it is used, or is one for each place
    return operation if all(_is_default(module, name) for name in (operation, f"{operation}_cls")) else None


@functools.cache
def _operation_field(kind: type[nn.Module]) -> str | None:
    if not hasattr(kind, "promote_dtype"):
        return None
    return next((name for name in ("dot_general", "conv_general_dilated") if hasattr(kind, f"{name}_cls")), None)


def _is_default(module: nn.Module, name: str) -> bool:
    value = getattr(module, name, None)
    return value is None or isinstance(value, Promote | Multiply) or value is getattr(type(module), name, None)


def _like(module: nn.Module, stored: QuantizedArray, name: str, init_fn: Any, args: tuple, key: Any) -> Any:
    """What an initializer would make of a stored weight: its arrays, for Flax compares their shapes; its own shape is
    compared here."""
    wanted = jax.eval_shape(lambda: meta.unbox(init_fn(key, *args))).shape
    if wanted != stored.shape:
        path = "/".join((*module.path, name))
        raise ValueError(
            f"The quantized weight {path!r} has the shape {stored.shape}, and the layer wants {wanted}. Quantize the "
            "variables of a model of these sizes."
        )
    return jax.tree.map(jnp.zeros_like, stored)


def _layout(module: nn.Module, name: str, shape: tuple[int, ...]) -> Layout:
    if name == "embedding":
        return table_layout(shape)
    assert module.scope is not None
    bias = meta.unbox(module.scope.get_variable("params", "bias"))
    return kernel_layout(shape, None if bias is None else jnp.shape(bias))


@functools.cache
def _flax_method(kind: type[nn.Module], name: str) -> tuple[type, str] | None:
    """The layer of Flax's whose method a class has under this name, unless a subclass of the user's has its own."""
    for base in (nn.Einsum, nn.Embed):
        if issubclass(kind, base):
            method = inspect.unwrap(getattr(kind, name, None) or id)
            return (base, name) if method is inspect.unwrap(getattr(base, name, None) or abs) else None
    return None


def _einsum(
    module: nn.Einsum, format: Quantization, own: Callable[..., Any], inputs: jax.Array, einsum_str: str | None = None
) -> Any:
    """`nn.Einsum.__call__`, whose product is no field."""
    equation = module.einsum_str if einsum_str is None else einsum_str
    written_twice = module.einsum_str is not None and einsum_str is not None
    if equation is None or written_twice or not _is_default(module, "promote_dtype"):
        return own(inputs, einsum_str)
    labels = labels_of(inputs.ndim, len(module.shape), Einsum(equation))
    kept = [label for label in labels.out if label in labels.right]
    lengths = dict(zip(labels.right, module.shape, strict=True))
    layout = kernel_layout(tuple(module.shape), tuple(lengths[label] for label in kept) if module.use_bias else None)
    if why_left(tuple(module.shape), layout, format):
        return own(inputs, einsum_str)
    kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias = None
    if module.use_bias:
        bias = module.param("bias", module.bias_init, [lengths[label] for label in kept], module.param_dtype)
    inputs, kernel, bias = Promote(format, module.promote_dtype, as_tuple=False, layout=layout)(
        inputs, kernel, bias, dtype=module.dtype
    )
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    out = einsum(equation, inputs, kernel, **options)
    return out if bias is None else out + bias.reshape([lengths[x] if x in kept else 1 for x in labels.out])


def _embed(module: nn.Embed, format: Quantization, own: Callable[..., Any], inputs: jax.Array) -> Any:
    """`nn.Embed.__call__`: the rows that are read, and no others, as numbers."""
    table = weight_of(module.embedding, format, table_layout(module.embedding.shape))
    if not isinstance(table, QuantizedArray | Unquantized) or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return own(inputs)
    if module.num_embeddings == 1:
        return jnp.broadcast_to(fake_quantized(table, module.dtype), (*inputs.shape, module.features))
    return take(table, inputs, module.dtype)


def _attend(module: nn.Embed, format: Quantization, own: Callable[..., Any], query: jax.Array) -> Any:
    """`nn.Embed.attend`."""
    table = weight_of(module.embedding, format, table_layout(module.embedding.shape))
    if not isinstance(table, QuantizedArray | Unquantized):
        return own(query)
    stands_for_table = jnp.zeros((), table.dtype)
    query, _ = module.promote_dtype(query, stands_for_table, dtype=module.dtype)  # type: ignore[misc]
    return dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())))


_METHODS: dict[Any, Callable[..., Any]] = {
    (nn.Einsum, "__call__"): _einsum,
    (nn.Embed, "__call__"): _embed,
    (nn.Embed, "attend"): _attend,
}
