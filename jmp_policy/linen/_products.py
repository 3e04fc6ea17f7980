"""Methods of linen layers whose matmul is quantized, in float8, or has an accumulate dtype."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from ..modules import round_result
from ..policy import Float8, Policy, Quantization, stored_format_of
from ..quant import (
    ROUNDING,
    FakeQuantized,
    LayerProduct,
    Layout,
    Multiply,
    Promote,
    QuantizedArray,
    WeightedLayer,
    attend,
    attention_format_of,
    embedding_lookup,
    fake_quantize,
    find_accumulate_dtype,
    kernel_layout,
    label_einsum,
    multiply_padded,
    prepare_weight,
    reason_unquantized,
    table_layout,
)
from ._fields import PARAMETER_WRAPPERS, temporarily_set
from ._layer_table import LAYERS, are_sums_open, is_promotion_open, layer_of, open_layer
from ._quantized import (
    MULTIPLIES,
    attend_by_cache,
    call_with_fields,
    check_is_rewritable,
    declare_state,
    find_stored,
    has_no_state,
    quote_path,
    share_state,
    spare_state,
    why_dequantized,
)


def multiply_by_policy(
    module: nn.Module, function: Callable[..., Any], policy: Policy, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `next_fun`, the method `function` of a bound module, with the matmul of the policy if Flax wrote it."""
    format = policy.quantization
    if isinstance(module, PARAMETER_WRAPPERS):
        next_fun = spare_state(module, next_fun)
        if stored_format_of(format) is not None:
            check_is_rewritable(module)
    if not function.__module__.startswith("flax.linen."):
        return next_fun
    if isinstance(module, nn.RNN) and isinstance(format, Float8):
        return share_state(module, format, next_fun)
    if isinstance(module, nn.MultiHeadDotProductAttention):
        next_fun = _attend_by_policy(module, attention_format_of(format), next_fun)
        return attend_by_cache(module, policy.cache, next_fun)
    if layer_of(type(module)) is None or (format is None and policy.accumulate_dtype is None):
        return next_fun

    def call_layer(*args: Any, **kwargs: Any) -> Any:
        if function in _METHODS:
            out = _METHODS[function](module, policy, next_fun, *args, **kwargs)
        else:
            with temporarily_set(module, _make_fields(module, policy)):
                out = next_fun(*args, **kwargs)
        return out if policy.accumulate_dtype is None else round_result(out, module.dtype)  # type: ignore[attr-defined]

    return call_layer


def _attend_by_policy(
    module: nn.MultiHeadDotProductAttention, format: Quantization | None, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the method of an attention layer with both of its matmuls in a format."""
    fields = ("qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls")
    is_open = module.attention_fn is nn.dot_product_attention and module.precision is None
    if format is None or not is_open or any(getattr(module, name) is not None for name in fields):
        return next_fun
    multiply = lambda: functools.partial(multiply_padded, format)
    return call_with_fields(module, dict.fromkeys(fields, multiply), next_fun)


def _make_fields(module: nn.Module, policy: Policy) -> dict[str, Any]:
    layer = open_layer(module)
    product = None if layer is None else _make_product(module, layer, policy)
    if layer is None or layer.field is None or product is None:
        return {}
    fields: dict[str, Any] = {layer.field: Multiply(product)}
    if product.stored_format is not None:
        fields[MULTIPLIES] = True
    if product.stored_format is not None or product.accumulate is not None:
        fields["promote_dtype"] = Promote(product)
    return fields


def _make_product(
    module: Any, layer: WeightedLayer, policy: Policy, layout: Layout | None = None
) -> LayerProduct | None:
    """Describes the matmul of a layer, or returns `None` if the policy does not change it."""
    format = policy.quantization
    accumulate = find_accumulate_dtype(policy, module.dtype) if are_sums_open(module) else None
    if isinstance(format, Float8):
        format = None if has_no_state(module, format) else format
    elif format is not None:
        is_left = layout is not None and reason_unquantized(tuple(module.shape), layout, format) is not None
        format = None if is_left or why_dequantized(module) is not None else format
    if format is None and accumulate is None:
        return None
    promote = module.promote_dtype
    # `make_rng` alone would fall back on the key of the parameters.
    draw_key = lambda: module.make_rng(ROUNDING) if module.has_rng(ROUNDING) else None
    return LayerProduct(
        operation=layer.operation,
        format=format,
        accumulate=accumulate,
        promote=promote.product.promote if isinstance(promote, Promote) else promote,  # ours in a clone of the layer
        as_tuple=False,
        layout=layout,
        key=draw_key if layer.needs_rng(format) else None,
        state=functools.partial(declare_state, module, format) if isinstance(format, Float8) else None,
        where=quote_path(module, layer.weight),
    )


def _call_einsum(
    module: nn.Einsum, policy: Policy, own: Callable[..., Any], inputs: jax.Array, einsum_str: str | None = None
) -> Any:
    """Computes `nn.Einsum.__call__`, whose matmul is not in a field."""
    equation = module.einsum_str or einsum_str
    if equation is None or (module.einsum_str is not None and einsum_str is not None):
        return own(inputs, einsum_str)  # an error, which Flax explains
    labels = label_einsum(inputs.ndim, len(module.shape), equation)
    lengths = dict(zip(labels.right, module.shape, strict=True))
    bias_shape = tuple(lengths[label] for label in labels.out if label in lengths) if module.use_bias else None
    layout = kernel_layout(tuple(module.shape), bias_shape)
    product = _make_product(module, LAYERS[nn.Einsum], policy, layout)
    if product is None:
        return own(inputs, einsum_str)

    with temporarily_set(module, {MULTIPLIES: True} if product.stored_format is not None else {}):
        kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    bias = None
    if bias_shape is not None:
        bias = module.param("bias", module.bias_init, list(bias_shape), module.param_dtype)
    inputs, kernel, bias = Promote(product)(inputs, kernel, bias, dtype=module.dtype)
    options = {"precision": module.precision, "preferred_element_type": module.preferred_element_type}
    out = Multiply(product)(equation, inputs, kernel, **options)
    return out if bias is None else out + bias.reshape([lengths.get(label, 1) for label in labels.out])


def _call_embed(module: nn.Embed, policy: Policy, own: Callable[..., Any], inputs: jax.Array) -> Any:
    """Computes `nn.Embed.__call__`: dequantizes only the rows that are read."""
    table = _find_table(module, policy)
    if table is None or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return own(inputs)
    if module.num_embeddings == 1:
        return jnp.broadcast_to(fake_quantize(table, module.dtype), (*inputs.shape, module.features))
    return embedding_lookup(table, inputs, module.dtype)


def _call_attend(module: nn.Embed, policy: Policy, own: Callable[..., Any], query: jax.Array) -> Any:
    stored = _find_table(module, policy)
    dtype = module.dtype if stored is None else None
    accumulate = find_accumulate_dtype(policy, dtype) if are_sums_open(module) else None
    if stored is None and accumulate is None:
        return own(query)
    product = LayerProduct(None, None, accumulate, module.promote_dtype, as_tuple=False)
    out = attend(product, query, jnp.asarray(module.embedding) if stored is None else stored, module.dtype)
    return own(query) if out is None else out


def _find_table(module: nn.Embed, policy: Policy) -> QuantizedArray | FakeQuantized | None:
    """Returns the stored table (`module.embedding` may be dequantized), or `None`."""
    format, stored = stored_format_of(policy.quantization), find_stored(module, "embedding")
    if format is None or stored is None or not is_promotion_open(module):
        return None
    table = prepare_weight(stored, format, table_layout(stored.shape), quote_path(module, "embedding"))
    return table if isinstance(table, QuantizedArray | FakeQuantized) else None


_METHODS: dict[Any, Callable[..., Any]] = {
    inspect.unwrap(nn.Einsum.__call__): _call_einsum,
    inspect.unwrap(nn.Embed.__call__): _call_embed,
    inspect.unwrap(nn.Embed.attend): _call_attend,
}
