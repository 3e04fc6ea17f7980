"""What a quantized policy does in linen's layers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta
from flax.errors import ScopeParamShapeError

from .._base import Args
from ..policy import Float8, Policy, StoredFormat, stored_format_of
from ..quant import QuantizedArray, dot_general, take
from ..quant._layers import (
    WHY_AS_NUMBERS,
    Promote,
    PromoteWide,
    WeightedLayer,
    find_accumulate_dtype,
    spell_format,
    widen_functions,
)
from ..quant._products import ROUNDING
from ..quant._weights import (
    WEIGHT_NAMES,
    Layout,
    Misread,
    Unquantized,
    choose_format,
    fake_quantize,
    is_quantized,
    kernel_layout,
    match_format,
    prepare_weight,
    table_layout,
    weight_layout,
    why_left,
)
from ._fields import PARAMETER_WRAPPERS, temporarily_set
from ._float8 import explain_float8_layer, make_float8_method, spare_state
from ._layer_table import (
    LAYERS,
    compute_einsum,
    find_bias_shape,
    find_equation,
    is_default,
    layer_of,
    open_layer,
    rewritten_by,
)
from ._place import path_of, path_text

_MULTIPLIES = "_jmp_multiplies"
"""The attribute of a layer while a method of Flax's runs that multiplies by its quantized weight."""


def quantize_method(
    module: nn.Module, function: Callable[..., Any], policy: Policy, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """A method of a module under a quantized policy.

    Flax's own methods multiply by the weight as it is stored. Most do it by functions in the fields of the layer, where
    ours are written; methods without such a field are replaced by ours. A method that a user wrote, on a subclass too,
    finds numbers.

    Args:
      module: a bound module.
      function: the method as it was written.
      policy: what holds for the module; without a quantization the method is as it was.
      next_fun: what to call for it.
    """
    format, accumulate = policy.quantization, find_accumulate_dtype(policy)
    if isinstance(module, PARAMETER_WRAPPERS):
        next_fun = spare_state(module, next_fun)
    if isinstance(format, Float8):
        return make_float8_method(module, function, format, accumulate, next_fun)
    if format is None:
        return next_fun
    if isinstance(module, PARAMETER_WRAPPERS):
        _check_is_rewritable(module)
    own = _METHODS.get(function)
    if own is not None:
        return functools.partial(own, module, format, accumulate, next_fun)
    fields = _make_fields(module, format) if function.__module__.startswith("flax.linen.") else {}
    if not fields:
        return next_fun

    def call_with_fields(*args: Any, **kwargs: Any) -> Any:
        with temporarily_set(module, fields | {_MULTIPLIES: True}):
            return next_fun(*args, **kwargs)

    return call_with_fields


def read_quantized_param(
    module: nn.Module, param: Callable[..., Any], policy: Policy, name: str, init_fn: Callable[..., Any], *args: Any
) -> Any:
    """A parameter of a module under a quantized policy.

    The weight of a layer that is about to multiply by it is as stored. Any other code, which could do nothing with
    that, gets the numbers that it stands for; and in training, those that it would stand for.
    """
    format = stored_format_of(policy.quantization)
    assert format is not None
    if type(module).param is nn.Module.param:
        return _read_param(module, format, param, name, init_fn, *args)
    # The author's own `param` makes something of the numbers that Flax's returns, which has them of the scope.
    scope: Any = module.scope
    with temporarily_set(scope, {"param": functools.partial(_read_param, module, format, scope.param)}):
        return param(name, init_fn, *args)


def _read_param(
    module: nn.Module,
    format: StoredFormat,
    param: Callable[..., Any],
    name: str,
    init_fn: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """A parameter as stored, or the numbers that it stands for; `param` makes or finds it."""
    stored = _find_stored(module, name)
    as_stored = _MULTIPLIES in vars(module) or (name == "embedding" and _is_flax_embedding(module))
    if isinstance(stored, QuantizedArray):
        init = functools.partial(_make_like, module, stored, name, init_fn, args)
        value = match_format(param(name, init, **options), format, _quote_path(module, name))
        return value if as_stored else value.dequantize()
    value = param(name, init_fn, *args, **options)
    if name not in WEIGHT_NAMES or jnp.ndim(value) < 2 or as_stored:
        return value
    weight = prepare_weight(value, format, _find_layout(module, name, value.shape), _quote_path(module, name))
    return fake_quantize(weight) if isinstance(weight, Unquantized) else value


def quantization_of(module: nn.Module, policy: Policy) -> str:
    """What becomes of the weight of a bound module under a policy, as `Row.quantization` says it."""
    format = policy.quantization
    weight = None if format is None else _find_weight(module)
    if format is None or weight is None:
        return ""
    name, shape = weight
    layout = _find_layout(module, name, shape)
    if isinstance(format, Float8):
        return explain_float8_layer(module, format, shape, layout)
    format, left = choose_format(format, layout), why_left(shape, layout, format)
    if left is not None:
        return f"left: {left}"
    return spell_format(format, layer_of(type(module)), _explain_as_numbers(module))


def _find_weight(module: nn.Module) -> tuple[str, tuple[int, ...]] | None:
    """The name and the shape of the parameter of a module that is to be quantized, if it has one."""
    params = {name: _find_stored(module, name) for name in WEIGHT_NAMES}
    return next(((name, x.shape) for name, x in params.items() if x is not None and len(x.shape) > 1), None)


def _find_stored(module: nn.Module, name: str) -> Any:
    """The parameter of a bound module, as stored; `None` without one, as where a submodule has that name."""
    assert module.scope is not None
    value = meta.unbox(module.scope.get_variable("params", name))
    return value if hasattr(value, "shape") else None


def _explain_as_numbers(module: nn.Module) -> str | None:
    """Why a module computes with the numbers that its weight stands for; `None` if it multiplies by the stored ones."""
    layer = layer_of(type(module))
    if layer is None:
        return "its code is no layer of Flax's"
    if layer.operation is None and layer.weight == "kernel":
        return WHY_AS_NUMBERS
    names = ("promote_dtype", *(() if layer.field is None else (layer.field, f"{layer.field}_cls")))
    written_name = rewritten_by(module) or next((name for name in names if not is_default(module, name)), None)
    if written_name is not None:
        return f"its author wrote {written_name}"
    is_rewritten = layer.field is not None and _multiplying_layer(module) is None
    return "its weight is rewritten before it is used" if is_rewritten else None


def note_quantized_weights(module: nn.Module, error: ScopeParamShapeError) -> None:
    """Adds to the error of Flax about a weight in 4 bits under another policy, which speaks of shapes, what to do."""
    for weight in jax.tree.leaves(module.variables.get("params", {}), is_leaf=is_quantized):
        if is_quantized(weight):
            error.add_note(
                f"There are quantized weights among the variables: {weight!r}. Give the model the policy they were "
                f"quantized with. For example: with_policy(model, '{weight.format}_from_mixed_bfloat16')."
            )
            break


def name_misread_weight(module: nn.Module, error: Misread) -> None:
    """Says in the error of a quantized weight, which code inside of a method read as an array, which weight it was."""
    around = path_of(module)[: len(path_of(module)) - len(module.path)]
    # All the variables that code inside may see, a transform's own among them; these are not the arrays outside.
    params = module.scope.root.variables().get("params", {})  # type: ignore[union-attr]
    for keys, weight in jax.tree.leaves_with_path(meta.unbox(params), is_leaf=is_quantized):
        if is_quantized(weight) and weight.values is error.weight.values:
            *names, name = (*around, *module.scope.root.path, *(key.key for key in keys))  # type: ignore[union-attr]
            error.name_weight("/".join(names), name)


def _check_is_rewritable(module: nn.Module) -> None:
    """Checks that the layer inside of a wrapper that rewrites its weights has them as numbers.

    Raises:
      ValueError: one of them is quantized.
    """
    layer = module.layer_instance  # type: ignore[attr-defined]
    for weight in jax.tree.leaves(layer.variables.get("params", {}), is_leaf=is_quantized):
        if is_quantized(weight):
            path = path_text(layer)
            raise ValueError(
                f"{type(module).__name__} rewrites the weights of {path!r}, and cannot those that are quantized: "
                f"{weight!r}. Leave them out by a rule of the map that they are quantized by. "
                f"For example: PolicyMap({{{path!r}: 'mixed_bfloat16'}}, 'int8_from_mixed_bfloat16')."
            )


def _quote_path(module: nn.Module, name: str) -> str:
    """What an error message says of the place a weight stands in."""
    return f" {'/'.join((*path_of(module), name))!r}"


def _make_fields(module: nn.Module, format: StoredFormat) -> dict[str, Any]:
    """What a quantized policy writes into the fields of a layer: how it promotes, and how it multiplies."""
    layer = _multiplying_layer(module)
    if layer is None or layer.field is None:
        return {}
    promote: Any = module.promote_dtype  # type: ignore[attr-defined]
    if isinstance(promote, Promote | PromoteWide):  # of a clone that a transform made of a layer whose method runs
        return {"promote_dtype": promote, layer.field: getattr(module, layer.field)}
    ours = layer.promote(format, promote, as_tuple=False, where=_quote_path(module, layer.weight))
    return {"promote_dtype": ours, layer.field: layer.make_multiply(format, functools.partial(_draw_key, module))}


def _draw_key(module: nn.Module) -> jax.Array | None:
    """A key for the noise of a product, `None` without one: `make_rng` would take that of the parameters instead."""
    return module.make_rng(ROUNDING) if module.has_rng(ROUNDING) else None


def _multiplying_layer(module: nn.Module) -> WeightedLayer | None:
    """The row of a layer that multiplies by a field, if its author left that and the promotion at their defaults."""
    if not is_default(module, "promote_dtype") or getattr(module, "mask", None) is not None or rewritten_by(module):
        return None  # with a mask the weight is rewritten before it is used
    return open_layer(module)


def _make_like(
    module: nn.Module, stored: QuantizedArray, name: str, init_fn: Callable[..., Any], args: Args, key: jax.Array
) -> Any:
    """What an initializer would make of a stored weight: Flax compares the shapes of its arrays, and this its own."""
    wanted = jax.eval_shape(lambda: meta.unbox(init_fn(key, *args))).shape
    if wanted != stored.shape:
        path = "/".join((*path_of(module), name))
        raise ValueError(
            f"The quantized weight {path!r} has the shape {stored.shape}, and the layer wants {wanted}. Quantize the "
            "variables of a model of these sizes."
        )
    return jax.tree.map(jnp.zeros_like, stored)


def _find_layout(module: nn.Module, name: str, shape: tuple[int, ...]) -> Layout:
    bias = _find_stored(module, "bias")
    return weight_layout(name, shape, None if bias is None else jnp.shape(bias))


def _is_flax_embedding(module: nn.Module) -> bool:
    """Whether all code that uses a table is Flax's; a subclass of the user's may have methods that want numbers."""
    modules = (base for base in type(module).__mro__ if issubclass(base, nn.Module))
    is_flax = isinstance(module, nn.Embed) and all(base.__module__.startswith("flax.") for base in modules)
    return is_flax and is_default(module, "promote_dtype")


def _call_einsum(
    module: nn.Einsum,
    format: StoredFormat,
    accumulate: np.dtype | None,
    own: Callable[..., Any],
    inputs: jax.Array,
    einsum_str: str | None = None,
) -> Any:
    """`nn.Einsum.__call__`, which multiplies by a function that is not in a field."""
    equation = find_equation(module, einsum_str)
    if equation is None or not is_default(module, "promote_dtype") or rewritten_by(module):
        return own(inputs, einsum_str)
    layout = kernel_layout(tuple(module.shape), find_bias_shape(module, equation, inputs))
    if why_left(tuple(module.shape), layout, format):
        return own(inputs, einsum_str)
    with temporarily_set(module, {_MULTIPLIES: True}):
        kernel = module.param("kernel", module.kernel_init, module.shape, module.param_dtype)
    promote = Promote(format, module.promote_dtype, as_tuple=False, layout=layout, where=_quote_path(module, "kernel"))
    multiply = LAYERS[nn.Einsum].make_multiply(format, functools.partial(_draw_key, module))
    functions = widen_functions(promote, multiply, "einsum", accumulate, as_tuple=False)
    return compute_einsum(module, equation, inputs, kernel, *functions)


def _call_embed(
    module: nn.Embed, format: StoredFormat, accumulate: np.dtype | None, own: Callable[..., Any], inputs: jax.Array
) -> Any:
    """`nn.Embed.__call__`: the rows that are read, and no others, as numbers."""
    table = _find_table(module, format)
    if table is None or not jnp.issubdtype(inputs.dtype, jnp.integer):
        return own(inputs)
    if module.num_embeddings == 1:
        return jnp.broadcast_to(fake_quantize(table, module.dtype), (*inputs.shape, module.features))
    return take(table, inputs, module.dtype)


def _call_attend(
    module: nn.Embed, format: StoredFormat, accumulate: np.dtype | None, own: Callable[..., Any], query: jax.Array
) -> Any:
    """`nn.Embed.attend`."""
    table = _find_table(module, format)
    if table is None:
        return own(query)
    stands_for_table = jnp.zeros((), table.dtype)
    query, _ = module.promote_dtype(query, stands_for_table, dtype=module.dtype)  # type: ignore[misc]
    return dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), preferred_element_type=accumulate)


def _find_table(module: nn.Embed, format: StoredFormat) -> QuantizedArray | Unquantized | None:
    """The table to multiply by, as stored: `module.embedding` may be the numbers that it stands for."""
    stored = _find_stored(module, "embedding")
    if stored is None or not is_default(module, "promote_dtype") or rewritten_by(module):
        return None
    table = prepare_weight(stored, format, table_layout(stored.shape), _quote_path(module, "embedding"))
    return table if isinstance(table, QuantizedArray | Unquantized) else None


_METHODS: dict[Any, Callable[..., Any]] = {
    inspect.unwrap(nn.Einsum.__call__): _call_einsum,
    inspect.unwrap(nn.Embed.__call__): _call_embed,
    inspect.unwrap(nn.Embed.attend): _call_attend,
}
