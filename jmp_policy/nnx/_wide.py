"""What an accumulate dtype does in nnx's layers: their attributes, and subclasses that round what they return."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .._base import remember_on_class
from ..modules.common import make_subclass, read_wide, round_result
from ..policy import Policy
from ..quant import dot_general
from ..quant._layers import find_accumulate_dtype, is_narrower, is_own, widen_functions
from ..quant._products import Dot, label_dot, wide_product
from ._layer_table import LAYERS, default_promote, find_layer
from ._quantized_embed import PromoteTable
from ._shadow import Attributes

OutSharding = NamedSharding | PartitionSpec | None


def make_wide_attributes(base: type, attributes: Attributes, policy: Policy) -> Attributes:
    """The attributes that an accumulate dtype gives a layer over those of a quantized policy: how it promotes and sums.

    Args:
      base: the class of the layer.
      attributes: its attributes, with those of the quantized policy.
      policy: what holds for it.
    """
    dtype, layer = find_accumulate_dtype(policy), find_layer(base)
    if dtype is None or layer is None or layer.field is None or not has_wide_sums(base, attributes, policy):
        return {}
    own, operation = attributes[layer.field] or layer.default, layer.operation
    assert own is not None
    assert operation is not None
    options = {"as_tuple": True, "adds_wide": _returns_sums(base)}
    wide = widen_functions(attributes["promote_dtype"], own, operation, dtype, **options)
    return dict(zip(("promote_dtype", layer.field), wide, strict=True))


def has_wide_sums(base: type, attributes: Attributes, policy: Policy) -> bool:
    """Whether a layer hands over what it sums in the accumulate dtype of its policy: its author left that open."""
    dtype, layer = find_accumulate_dtype(policy), find_layer(base)
    if dtype is None or (policy.compute_dtype is not None and policy.compute_dtype.itemsize >= dtype.itemsize):
        return False
    promote, is_open = attributes.get("promote_dtype"), attributes.get("preferred_element_type") is None
    if not is_open or attributes.get("dot_general_cls") is not None:
        return False
    if promote is not default_promote() and not is_own(promote):
        return False
    if layer is None or layer.field is None:
        return issubclass(base, nnx.Embed | nnx.LoRA)
    function = attributes[layer.field]
    return function is None or function is layer.default or is_own(function)


@remember_on_class
def make_wide_layer(base: type[nnx.Module], dtype: np.dtype) -> type[nnx.Module]:
    """A subclass of a layer whose methods return sums that were rounded once; one for equal classes.

    Methods that an author wrote are as they are: they find results in the compute dtype.
    """
    methods: dict[str, Any] = {}
    if issubclass(base, nnx.Embed):
        if base.attend.__module__.startswith(("flax.", "jmp_policy.")):
            methods["attend"] = _make_method(base.attend, functools.partial(_attend, dtype))
    elif issubclass(base, nnx.LoRA):
        if base.__call__ is nnx.LoRA.__call__:
            methods["__call__"] = _make_method(base.__call__, functools.partial(_call_lora, dtype))
    elif _returns_sums(base):
        call = _call_lora_linear if base.__call__ is nnx.LoRALinear.__call__ else _call
        methods["__call__"] = _make_method(base.__call__, call)
    return make_subclass(base, methods, (make_wide_layer, (base, dtype)))


def _returns_sums(base: Any) -> bool:
    """Whether what calls a layer of this class is Flax's own code, and no method that an author wrote around it."""
    return base.__call__ in {nnx.LoRALinear.__call__, *(kind.__call__ for kind in LAYERS)}


def _make_method(own: Callable[..., Any], compute: Callable[..., Any]) -> Callable[..., Any]:
    """A method in place of one of Flax's, whose result is rounded to the dtype of the layer.

    Args:
      own: that of Flax, for its name and its arguments.
      compute: what computes instead: it takes `own` as well.
    """

    @functools.wraps(own)
    def call_rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return round_result(compute(own, self, *args, **kwargs), self.dtype)

    return call_rounded


def _call(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return own(self, *args, **kwargs)


def _call_lora_linear(
    own: Callable[..., Any], self: nnx.LoRALinear, x: jax.Array, out_sharding: OutSharding = None
) -> jax.Array:
    """`nnx.LoRALinear.__call__`, which adds two wide results."""
    del own
    out = nnx.Linear.__call__(self, x, out_sharding=out_sharding)
    return out + read_wide(self.lora(x), out.dtype)


def _call_lora(dtype: np.dtype, own: Callable[..., Any], self: nnx.LoRA, x: jax.Array, **options: Any) -> jax.Array:
    """`nnx.LoRA.__call__`: the inner product is rounded between the two, as the input of any product is."""
    stored = self.lora_a[...], self.lora_b[...]
    inputs, *_ = self.promote_dtype((x, *(jnp.zeros((), w.dtype) for w in stored)), dtype=self.dtype)
    if not is_narrower(inputs, dtype) or not (self.base_module is None or callable(self.base_module)):
        return own(self, x, **options)
    hidden = _multiply(inputs, stored[0], 0, dtype).astype(inputs.dtype)
    out = _multiply(hidden, stored[1], 0, dtype)
    return out if self.base_module is None else out + read_wide(self.base_module(inputs, **options), dtype)


def _attend(
    dtype: np.dtype, own: Callable[..., Any], self: Any, query: jax.Array, out_sharding: OutSharding = None
) -> jax.Array:
    """`nnx.Embed.attend`, by a table that is quantized, or is not."""
    table = self.embedding[...]
    if isinstance(self.promote_dtype, PromoteTable):
        query, table = self.promote_dtype.prepare_operands(query, table, self.dtype)
        options: dict[str, Any] = {"out_sharding": out_sharding, "preferred_element_type": dtype}
        return dot_general(query, table, (((query.ndim - 1,), (1,)), ((), ())), **options)
    inputs, _ = self.promote_dtype((query, jnp.zeros((), table.dtype)), dtype=self.dtype)
    if not is_narrower(inputs, dtype):
        return own(self, query, out_sharding=out_sharding)
    return _multiply(inputs, table, 1, dtype, out_sharding)


def _multiply(
    inputs: jax.Array, weight: jax.Array, axis: int, dtype: np.dtype, out_sharding: OutSharding = None
) -> jax.Array:
    """Inputs times a matrix along one of its axes."""
    compute = Dot((((inputs.ndim - 1,), (axis,)), ((), ())), out_sharding=out_sharding)
    return wide_product(label_dot(inputs.ndim, 2, compute), inputs, weight, dtype, inputs.dtype)
