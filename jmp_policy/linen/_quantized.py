"""Quantized weights, float8 state and 8-bit caches among the variables of linen modules."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta
from flax.errors import ScopeParamShapeError

from .._base import OVERWRITE, remember_weakly
from ..policy import Float8, Policy, PolicyMap, list_policies, stored_format_of
from ..quant import (
    CACHED,
    SCALE,
    WEIGHT_NAMES,
    CacheSlot,
    FakeQuantized,
    LayerFacts,
    LayerPlan,
    Layout,
    Misread,
    QuantizedArray,
    State,
    attend_to_slots,
    fake_quantize,
    is_quantized,
    match_format,
    needs_state,
    new_state,
    plan_layer,
    prepare_weight,
    read_stored,
    weight_layout,
)
from ._active_policy import CURRENT
from ._fields import temporarily_set
from ._layer_table import are_sums_open, is_default, layer_of, open_layer, rewritten_by
from ._own_weights import note_table, note_weight
from ._place import is_applied_inside, path_of, path_text

MULTIPLIES = "_jmp_multiplies"
"""The attribute of a layer while a Flax method that multiplies by its quantized weight runs."""


def read_quantized_param(
    module: nn.Module, param: Callable[..., Any], policy: Policy, name: str, init_fn: Callable[..., Any], *args: Any
) -> Any:
    """Reads a parameter: stored for the layer that multiplies by it, else dequantized, or rounded in training."""
    if type(module).param is nn.Module.param:
        return _read_param(module, policy, param, name, init_fn, *args)
    # The author's own `param` calls Flax's, which reads the parameter from the scope.
    scope: Any = module.scope
    with temporarily_set(scope, {"param": functools.partial(_read_param, module, policy, scope.param)}):
        return param(name, init_fn, *args)


def _read_param(
    module: nn.Module,
    policy: Policy,
    param: Callable[..., Any],
    name: str,
    init_fn: Callable[..., Any],
    *args: Any,
    **options: Any,
) -> Any:
    """Makes or finds a parameter by `param`; returns it in the stored format, or dequantized."""
    stored, format = find_stored(module, name), stored_format_of(policy.quantization)
    assert format is not None
    is_table = name == "embedding" and _is_flax_embedding(module)
    as_stored = is_table or MULTIPLIES in vars(module)
    if isinstance(stored, QuantizedArray):
        init = functools.partial(_make_like, module, stored, name, init_fn)
        value = match_format(param(name, init, *args, **options), format, quote_path(module, name))
        if as_stored:
            return value
        note_weight(module, policy, name, value)
        return read_stored(value)
    value = param(name, init_fn, *args, **options)
    if is_table:
        note_table(module, policy, value)
    if as_stored:
        return value
    if name not in WEIGHT_NAMES or jnp.ndim(value) < 2:
        note_weight(module, policy, name, value)
        return value
    weight = prepare_weight(value, format, _infer_weight_layout(module, name, value.shape), quote_path(module, name))
    if not isinstance(weight, FakeQuantized) or note_weight(module, policy, name, value, weight.layout):
        return value
    return fake_quantize(weight)


def plan_module(module: nn.Module, policy: Policy) -> LayerPlan:
    """Returns the plan of a bound module, for `explain`."""
    # The fields are read past `__getattr__`, in which `nnx.bridge.ToLinen` may recurse forever.
    layer, format, fields = layer_of(type(module)), policy.quantization, vars(module)
    is_open = isinstance(module, nn.Einsum) or open_layer(module) is not None
    has_sums = layer is not None and (is_open or layer.weight == "embedding")
    stored = {} if format is None else {name: find_stored(module, name) for name in WEIGHT_NAMES}
    weights = ((name, weight) for name, weight in stored.items() if weight is not None and len(weight.shape) > 1)
    name, weight = next(weights, ("", None))
    facts = LayerFacts(
        layer=layer,
        weight=weight,
        layout=None if weight is None else _infer_weight_layout(module, name, weight.shape),
        groups=fields.get("feature_group_count", 1),
        is_matmul_open=is_open,
        are_sums_open=has_sums and are_sums_open(module),
        lacks_state=isinstance(format, Float8) and has_no_state(module, format),
        why_as_numbers=None if weight is None else why_dequantized(module),
    )
    return plan_layer(facts, policy, fields.get("dtype"))


def find_stored(module: nn.Module, name: str) -> Any:
    """Returns the stored parameter of a bound module; `None` without one, or for a submodule of that name."""
    assert module.scope is not None
    value = meta.unbox(module.scope.get_variable("params", name))
    return value if hasattr(value, "shape") else None


def why_dequantized(module: nn.Module) -> str | None:
    """Returns the reason why a module dequantizes its weight before it multiplies, or `None`."""
    layer = layer_of(type(module))
    if layer is None:
        return "its code is no layer of Flax's"
    names = ("promote_dtype", *(() if layer.field is None else (layer.field, f"{layer.field}_cls")))
    written_name = rewritten_by(module) or next((name for name in names if not is_default(module, name)), None)
    if written_name is not None:
        return f"its author wrote {written_name}"
    is_masked = getattr(module, "mask", None) is not None
    is_rewritten = layer.field is not None and (is_masked or open_layer(module) is None)
    return "its weight is rewritten before it is used" if is_rewritten else None


def note_quantized_weights(module: nn.Module, error: ScopeParamShapeError) -> None:
    """Adds a note to Flax's error about the shape of a quantized weight under a policy without quantization."""
    for weight in _list_quantized(module)[:1]:
        error.add_note(
            f"The variables have quantized weights: {weight!r}. Give the model the policy that they were quantized "
            f"with. For example: with_policy(model, '{weight.format}_from_mixed_bfloat16')."
        )


def _list_quantized(module: nn.Module) -> list[Any]:
    leaves = jax.tree.leaves(module.variables.get("params", {}), is_leaf=is_quantized)
    return [leaf for leaf in leaves if is_quantized(leaf)]


def name_misread_weight(module: nn.Module, error: Misread) -> None:
    """Adds the path of a quantized weight to the error of code that read it as an array."""
    around = path_of(module)[: len(path_of(module)) - len(module.path)]
    # The variables of the root, which inside of a transform are not the same arrays as outside.
    params = module.scope.root.variables().get("params", {})  # type: ignore[union-attr]
    for keys, weight in jax.tree.leaves_with_path(meta.unbox(params), is_leaf=is_quantized):
        if is_quantized(weight) and weight.values is error.weight.values:
            *names, name = (*around, *module.scope.root.path, *(key.key for key in keys))  # type: ignore[union-attr]
            error.name_weight("/".join(names), name)


def check_is_rewritable(module: nn.Module) -> None:
    """Raises a `ValueError` if a wrapper such as `nn.WeightNorm` would rewrite quantized weights."""
    layer = module.layer_instance  # type: ignore[attr-defined]
    for weight in _list_quantized(layer):
        path = path_text(layer)
        raise ValueError(
            f"{type(module).__name__} rewrites the weights of {path!r}, but {weight!r} is quantized. Leave that "
            "layer out of the quantization by a rule of the map. "
            f"For example: PolicyMap({{{path!r}: 'mixed_bfloat16'}}, 'int8_from_mixed_bfloat16')."
        )


def quote_path(module: nn.Module, name: str) -> str:
    """Returns the path of a weight for an error message."""
    return f" {'/'.join((*path_of(module), name))!r}"


def _make_like(
    module: nn.Module, stored: QuantizedArray, name: str, init_fn: Callable[..., Any], key: jax.Array, *args: Any
) -> Any:
    """Replaces the initializer of a stored weight. Flax checks shapes of arrays only, so this checks the weight's."""
    wanted = jax.eval_shape(lambda: meta.unbox(init_fn(key, *args))).shape
    if wanted != stored.shape:
        path = "/".join((*path_of(module), name))
        raise ValueError(
            f"The quantized weight {path!r} has the shape {stored.shape}, but the layer needs {wanted}. Quantize the "
            "variables of a model of this size."
        )
    return jax.tree.map(jnp.zeros_like, stored)


def _infer_weight_layout(module: nn.Module, name: str, shape: tuple[int, ...]) -> Layout:
    bias = find_stored(module, "bias")
    return weight_layout(name, shape, None if bias is None else jnp.shape(bias))


def _is_flax_embedding(module: nn.Module) -> bool:
    """True if all code that uses a table is Flax's. Methods of a user's subclass may need floating values."""
    modules = (base for base in type(module).__mro__ if issubclass(base, nn.Module))
    is_flax = isinstance(module, nn.Embed) and all(base.__module__.startswith("flax.") for base in modules)
    return is_flax and is_default(module, "promote_dtype")


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
    return call_with_fields(module, fields, next_fun)


def share_state(module: nn.RNN, format: Float8, next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """Hands the float8 state of an RNN on to its steps, beside the collections that they share already."""
    shared = module.variable_broadcast
    shared = (shared,) if isinstance(shared, str) else shared
    if has_no_state(module, format) or not isinstance(shared, tuple | list):
        return next_fun
    return call_with_fields(module, {"variable_broadcast": (*shared, OVERWRITE)}, next_fun)


def call_with_fields(module: nn.Module, fields: dict[str, Any], next_fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `next_fun` with attributes of a module set during the call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with temporarily_set(module, fields):
            return next_fun(*args, **kwargs)

    return call


@remember_weakly
def has_float8_state(given: Policy | PolicyMap) -> bool:
    return any(needs_state(policy.quantization) for policy in list_policies(given))


def has_no_state(module: nn.Module, format: Float8) -> bool:
    """True for a module that runs through `.apply` inside another one and was not given its float8 state."""
    if not needs_state(format) or module.is_mutable_collection(OVERWRITE):
        return False
    is_empty = module.scope.is_collection_empty(OVERWRITE)  # type: ignore[union-attr]
    return is_empty and is_applied_inside(module, CURRENT.value.path)


def declare_state(module: nn.Module, format: Float8) -> State:
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


_COLLECTION = "cache"


def check_cache(module: nn.MultiHeadDotProductAttention, format: np.dtype | None) -> None:
    """Raises a `ValueError` if the decode cache of a bound attention module has another format, or dtype, than it."""
    if not module.has_variable(_COLLECTION, CACHED[0]):
        return
    found = module.get_variable(_COLLECTION, CACHED[0]).dtype
    has_scales = module.has_variable(_COLLECTION, CACHED[0] + SCALE)
    dtype = module.dtype if format is None else format
    if dtype is None or (found == np.dtype(dtype) and has_scales == (format is not None)):
        return
    name, path = np.dtype(dtype).name, path_text(module) or type(module).__name__
    stores = f"the layer computes in {name}" if format is None else f"it is stored in {name} with scales"
    is_castable = format is None and not has_scales
    cast = f", or cast it, jmp_policy.cast_floating(cache, {name!r})" if is_castable else ""
    raise ValueError(
        f"The cache of {path!r} is {found}{' with scales' if has_scales else ''}, but under its policy {stores}. Make "
        f"the cache under the same policy, model.init(...)['cache']{cast}."
    )


def attend_by_cache(
    module: nn.MultiHeadDotProductAttention, format: np.dtype | None, next_fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns the method of an attention layer with its cache in a format."""
    if format is None:
        return next_fun
    CURRENT.value.note_cache()
    if not module.decode:
        return next_fun

    def call_attention(*args: Any, **kwargs: Any) -> Any:
        check_cache(module, format)
        slots: dict[str, CacheSlot] = {}
        is_made = module.has_variable(_COLLECTION, CACHED[0])
        declare = functools.partial(_declare_cache, module, module.variable, format, slots if is_made else None)
        attend = attend_to_slots(module.attention_fn, slots)
        with temporarily_set(module, {"variable": declare, "attention_fn": attend}):
            return next_fun(*args, **kwargs)

    return call_attention


def _declare_cache(
    module: nn.Module,
    variable: Callable[..., Any],
    format: np.dtype,
    slots: dict[str, CacheSlot] | None,
    collection: str,
    name: str,
    init_fn: Callable[..., Any],
    *init_args: Any,
) -> Any:
    """Replaces `Module.variable`: makes keys and values in a format, with scales beside them; later reads them."""
    if collection != _COLLECTION or name not in CACHED:
        return variable(collection, name, init_fn, *init_args)
    shape, dtype = init_args  # of the zeros that Flax would store
    values = variable(collection, name, jnp.zeros, shape, format)
    scale = variable(collection, name + SCALE, jnp.zeros, (*shape[:-1], 1), jnp.float32)
    if slots is None:
        return values

    def store(new_values: Any, new_scale: Any) -> None:
        values.value, scale.value = new_values, new_scale

    index = module.get_variable(collection, "cache_index")
    slots[name] = CacheSlot(values.value, scale.value, index, dtype, store)
    return slots[name]
