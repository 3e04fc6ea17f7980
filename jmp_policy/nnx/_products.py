"""Weights and matmuls of nnx layers that are quantized, in float8, or have an accumulate dtype."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._base import OVERWRITE, Args, remember_on_class
from ..modules import make_subclass, read_wide, round_result
from ..policy import Float8, Policy, Quantization, StoredFormat, stored_format_of
from ..quant import (
    LayerFacts,
    LayerPlan,
    LayerProduct,
    Multiply,
    Promote,
    QuantizedArray,
    WeightedLayer,
    attend,
    attention_format_of,
    dot_product_attention,
    embedding_lookup,
    fake_quantize,
    has_fewer_bits,
    match_format,
    multiply_wide,
    needs_state,
    new_state,
    prepare_weight,
    stack_shape,
    table_layout,
)
from ._layer_state import Float8State
from ._layer_table import DEFAULT_PROMOTE, LAYERS, draw_key, find_layer
from ._shadow import Attributes

OutSharding = NamedSharding | PartitionSpec | None


def make_product_attributes(
    base: type, attributes: Attributes, policy: Policy, facts: LayerFacts, plan: LayerPlan
) -> Attributes:
    """Returns the attributes by which a layer promotes and multiplies under its plan, if it changes."""
    if issubclass(base, nnx.MultiHeadAttention):
        attention = attention_format_of(policy.quantization)
        is_open = attributes.get("attention_fn") is nnx.dot_product_attention and attributes["precision"] is None
        return {"attention_fn": Attend(attention)} if attention is not None and is_open else {}
    layer = facts.layer
    if layer is None or facts.weight is None or (plan.format is None and plan.accumulate is None):
        return {}
    product = LayerProduct(
        operation=layer.operation,
        format=plan.format,
        accumulate=plan.accumulate if layer.field is not None else None,
        promote=attributes["promote_dtype"],
        as_tuple=True,
        layout=facts.layout if stored_format_of(plan.format) is not None else None,
        returns_sums=_is_called_by_flax(base),
    )
    new: Attributes = {layer.field: Multiply(product)} if layer.field is not None else {}
    if product.stored_format is not None or product.accumulate is not None:
        new["promote_dtype"] = (PromoteTable if issubclass(base, nnx.Embed) else Promote)(product)
    return new


@dataclasses.dataclass(frozen=True)
class Attend:
    """The `attention_fn` of a layer whose policy quantizes attention."""

    format: Quantization

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Any, is_causal: bool, **options: Any
    ) -> Any:
        # Flax calls JAX's function unless it needs the weights.
        if options["dropout_rate"] != 0 or options["module"] is not None:
            return nnx.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal, **options)
        shape = query.shape
        query, key, value = DEFAULT_PROMOTE((query, key, value), dtype=options["dtype"])
        if query.ndim > 4:
            query, key, value, mask = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), (query, key, value, mask))
        mask = None if mask is None else mask.astype(bool)
        attend = functools.partial(dot_product_attention, is_causal=is_causal, quantization=self.format)
        return attend(query, key, value, mask=mask).reshape(shape)


def choose_layer_class(base: type, layer: WeightedLayer | None, plan: LayerPlan) -> Callable[[Any], type] | None:
    """Returns the function that makes the subclass with the matmul of a layer; `None` if attributes are enough."""
    if layer is None or plan.format is None:
        return None
    if issubclass(base, nnx.Embed):  # its matmul is in methods, which no attribute replaces
        return make_quantized_embed
    is_bound = isinstance(plan.format, Float8) or (layer.field is not None and layer.needs_rng(plan.format))
    return make_bound_layer if is_bound else None


@remember_on_class
def make_bound_layer(base: type[nnx.Module]) -> type[nnx.Module]:
    """Makes a subclass whose matmul, a property, uses the float8 state of the layer itself, or draws from its keys."""
    layer = find_layer(base)
    assert layer is not None
    assert layer.field is not None
    name = layer.field

    def multiply(self: nnx.Module) -> Any:
        function = vars(self)[name]
        if not isinstance(function, Multiply):
            return function
        states: dict[str, Float8State] = vars(self).get(OVERWRITE) or {}
        read_state = lambda: {name: state.get_value() for name, state in states.items()}
        is_new = any(getattr(state, "is_new", False) for state in states.values())
        key, where = functools.partial(draw_key, self), None if is_new else f" of the {base.__name__}"
        return Multiply(dataclasses.replace(function.product, key=key, state=read_state, where=where))

    def set_multiply(self: nnx.Module, function: Callable[..., Any]) -> None:  # for `nnx.merge`
        vars(self)[name] = function

    return make_subclass(base, {name: property(multiply, set_multiply)}, (make_bound_layer, (base,)))


class PromoteTable(Promote):
    """The `promote_dtype` of a quantized embedding, for an author's methods: dequantizes the table, the last array."""

    def __call__(self, arrays: Args, *, dtype: DTypeLike | None = None, **options: Any) -> tuple[Any, ...]:
        *others, table = arrays
        return self.product.promote((*others, fake_quantize(self.prepare(table), dtype)), dtype=dtype, **options)

    def prepare(self, table: Any) -> Any:
        """Returns the quantized table, or one that is rounded in the same way when it is read."""
        assert self.product.stored_format is not None
        return prepare_weight(table, self.product.stored_format, table_layout(table.shape))


@remember_on_class
def make_quantized_embed(base: type[nnx.Embed]) -> type[nnx.Embed]:
    """Makes a subclass of an embedding whose methods use the quantized table."""
    methods: dict[str, Any] = {}
    if base.__call__ is nnx.Embed.__call__:
        methods["__call__"] = _call_quantized
    if base.attend is nnx.Embed.attend:
        methods["attend"] = _attend_quantized
    return make_subclass(base, methods, (make_quantized_embed, (base,)))


def _call_quantized(self: Any, inputs: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
    if self.num_embeddings == 1 or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return nnx.Embed.__call__(self, inputs, out_sharding=out_sharding)
    read = lambda table, inputs: embedding_lookup(self.promote_dtype.prepare(table), inputs, self.dtype)
    if out_sharding is not None:
        read = jax.sharding.auto_axes(out_sharding=out_sharding)(read)
    return read(self.embedding[...], inputs)


def _attend_quantized(self: Any, query: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
    return _attend(nnx.Embed.attend, None, self, query, out_sharding)


@remember_on_class
def make_wide_layer(base: Any, dtype: np.dtype) -> type[nnx.Module]:
    """Makes a subclass whose Flax methods sum in the accumulate dtype and cast down once. An author's methods stay."""
    methods: dict[str, Any] = {}
    if issubclass(base, nnx.Embed):
        if base.attend.__module__.startswith(("flax.", "jmp_policy.")):
            methods["attend"] = _round_result_of(base.attend, functools.partial(_attend, base.attend, dtype))
    elif issubclass(base, nnx.LoRA):
        if base.__call__ is nnx.LoRA.__call__:
            methods["__call__"] = _round_result_of(base.__call__, functools.partial(_call_lora, base.__call__, dtype))
    elif _is_called_by_flax(base):
        compute = _call_lora_linear if base.__call__ is nnx.LoRALinear.__call__ else base.__call__
        methods["__call__"] = _round_result_of(base.__call__, compute)
    return make_subclass(base, methods, (make_wide_layer, (base, dtype)))


def _is_called_by_flax(base: Any) -> bool:
    """True if the `__call__` of a layer is Flax's own, and so takes outputs of its matmul in any dtype."""
    return base.__call__ in {nnx.LoRALinear.__call__, *(kind.__call__ for kind in LAYERS)}


def _round_result_of(own: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method with the signature of `own` that calls `compute`, and casts the output to the layer's dtype."""

    @functools.wraps(own)
    def call_rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return round_result(compute(self, *args, **kwargs), self.dtype)

    return call_rounded


def _call_lora_linear(self: nnx.LoRALinear, x: jax.Array, out_sharding: OutSharding = None) -> jax.Array:
    out = nnx.Linear.__call__(self, x, out_sharding=out_sharding)
    return out + read_wide(self.lora(x), out.dtype)


def _call_lora(own: Callable[..., Any], dtype: np.dtype, self: nnx.LoRA, x: jax.Array, **options: Any) -> jax.Array:
    """Computes `nnx.LoRA.__call__`. The inner output is cast down, as the input of any matmul is."""
    stored = self.lora_a[...], self.lora_b[...]
    inputs, *_ = self.promote_dtype((x, *(jnp.zeros((), w.dtype) for w in stored)), dtype=self.dtype)
    if not has_fewer_bits(inputs, dtype) or not (self.base_module is None or callable(self.base_module)):
        return own(self, x, **options)
    hidden = multiply_wide(inputs, stored[0], 0, dtype).astype(inputs.dtype)
    out = multiply_wide(hidden, stored[1], 0, dtype)
    return out if self.base_module is None else out + read_wide(self.base_module(inputs, **options), dtype)


def _attend(
    own: Callable[..., Any], dtype: np.dtype | None, self: Any, query: jax.Array, out_sharding: OutSharding = None
) -> jax.Array:
    promote, table = self.promote_dtype, self.embedding[...]
    if isinstance(promote, PromoteTable):
        table, promote = promote.prepare(table), promote.product.promote
    out = attend(LayerProduct(None, None, dtype, promote, as_tuple=True), query, table, self.dtype, out_sharding)
    return own(self, query, out_sharding=out_sharding) if out is None else out


class QuantizedParam(nnx.Variable):
    """The Variable of a quantized weight. It holds a `QuantizedArray`.

    It is not an `nnx.Param`, so optimizers and gradients skip it. Its arrays are part of `nnx.state`.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.quant.quantize(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), "int8_from_float32")
    >>> type(model.kernel).__name__, model.kernel[...]
    ('QuantizedParam', QuantizedArray(int8, shape=(64, 64), dtype=float32))
    """

    def get_value(self, **options: Any) -> Any:
        """Returns the whole quantized weight: `param[...]` is the only index that it takes."""
        return super().get_value(**{} if options.get("index") is Ellipsis else options)


def make_float8_attributes(known: Any, attributes: Attributes, facts: LayerFacts, plan: LayerPlan) -> Attributes:
    """Returns the attribute with the float8 state of a layer: the known state if it fits, a new one, or nothing."""
    if not isinstance(plan.format, Float8) or not needs_state(plan.format) or facts.layout is None:
        return {}
    # A stack of layers has a state for each; axes that the layer itself maps over have one together.
    shape = facts.weight.shape
    if "kernel_shape" in attributes:
        stack = shape[: len(shape) - len(attributes["kernel_shape"])]
    else:
        stack = stack_shape(shape, facts.layout)
        stack = stack[: len(stack) - len(attributes.get("batch_axis", ()))]
    new = new_state(plan.format, stack)
    if known is not None and all(known[name].get_raw_value().shape == value.shape for name, value in new.items()):
        return {OVERWRITE: known}
    states = {name: Float8State(value) for name, value in new.items()}
    for state in states.values():  # maybe made in the middle of a step, where they have no gradient yet
        object.__setattr__(state, "is_new", True)
    return {OVERWRITE: states}


def check_weight(path: str, attributes: Attributes, facts: LayerFacts, plan: LayerPlan, policy: Policy) -> None:
    """Raises a `ValueError` if a weight has another format than the policy."""
    format = stored_format_of(policy.quantization)
    if facts.layer is None:
        for name, variable in attributes.items():
            if isinstance(variable, QuantizedParam) and isinstance(variable.get_raw_value(), QuantizedArray):
                _check_stored(variable.get_raw_value(), format, _quote(path, name), policy)
    elif facts.layout is not None and isinstance(facts.weight, QuantizedArray):
        _check_stored(facts.weight, format, _quote(path, facts.layer.weight), policy)
    elif facts.layout is not None and format is not None and plan.format is not None:
        prepare_weight(facts.weight, format, facts.layout, _quote(path, facts.layer.weight))


def _check_stored(weight: QuantizedArray, format: StoredFormat | None, where: str, policy: Policy) -> None:
    if format is None:
        raise ValueError(
            f"The weight{where} is quantized, as {str(weight.format)!r}, but the policy {policy.name!r} "
            "stores no quantized weights. Give the model a policy that does, such as "
            f"'{weight.format}_from_{policy.name}', or give this policy to the original."
        )
    match_format(weight, format, where)


def _quote(path: str, name: str) -> str:
    return f" {f'{path}/{name}'.lstrip('/')!r}"
