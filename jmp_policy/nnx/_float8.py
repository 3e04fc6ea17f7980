"""Float8 products and accumulate dtypes in nnx's layers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from .._base import OVERWRITE, PyTree, name_state, prepare_leaf, remember_on_class
from ..modules.common import make_subclass, read_wide, round_result
from ..policy import Float8, Policy
from ..quant import dot_general
from ..quant._layers import (
    Float8Multiply,
    MultiplyWide,
    find_accumulate_dtype,
    is_narrower,
    is_own,
    why_layer_wide,
    widen_functions,
)
from ..quant._products import Dot, State, label_dot, needs_state, new_state, wide_product
from ..quant._weights import Layout, stack_shape
from ._layer_table import LAYERS, PromoteTable, default_promote, find_layer, find_open_field
from ._shadow import Attributes


@functools.partial(nnx.register_variable_name, OVERWRITE, overwrite=True)
class Float8State(nnx.Variable):
    """The Variables of a layer that scales by what it saw before: of each operand a scale, and a history.

    A dictionary of them is an attribute of the layer, `_overwrite_with_gradient`. They are not `nnx.Param`s.
    `jmp_policy.nnx.value_and_grad` differentiates with respect to them beside the parameters: their gradients are their
    next values, which `jmp_policy.nnx.Optimizer` writes into the model. `flax.nnx.value_and_grad` and
    `flax.nnx.Optimizer` leave them as they are, and then the layer never learns how large its numbers are; they take
    them for parameters where a `wrt` names them.

    A policy that is attached again finds them there. A policy whose histories have another length makes new ones, and
    one that keeps no state takes them away. In the bridges to linen they are the collection of the same name.

    >>> import jmp_policy as jmp
    >>> from flax import nnx
    >>> model = jmp.with_policy(nnx.Linear(128, 128, rngs=nnx.Rngs(0)), "float8/16_from_mixed_bfloat16")
    >>> state = nnx.state(model, jmp.nnx.Float8State)["_overwrite_with_gradient"]
    >>> sorted(state)[:2], state["input_amax_history"].shape
    (['input_amax_history', 'input_scale'], (16,))
    """


def why_wide(base: type, attributes: Attributes, shape: tuple[int, ...], layout: Layout, format: Float8) -> str | None:
    """Why a layer with a weight computes in the compute dtype, whatever its inputs; `None` if it does not."""
    layer = find_layer(base)
    if layer is None or find_open_field(base, attributes) is None:
        return "it multiplies by a function of its own, or by none that could be another"
    is_convolution, groups = layer.operation == "conv_general_dilated", attributes.get("feature_group_count", 1)
    return why_layer_wide(shape, layout, format, is_convolution=is_convolution, groups=groups)


def make_state(attributes: Attributes, shape: tuple[int, ...], layout: Layout, format: Float8) -> Attributes:
    """The attribute that holds the state of a layer, if it has one: what it was, or a new one."""
    if not needs_state(format):
        return {}
    known, new = attributes.get(OVERWRITE), new_state(format, stack_shape(shape, layout))
    if known is not None and all(known[name].get_raw_value().shape == value.shape for name, value in new.items()):
        return {OVERWRITE: known}
    return {OVERWRITE: {name: Float8State(value) for name, value in new.items()}}


@remember_on_class
def make_float8_layer(base: type[nnx.Module], format: Float8) -> type[nnx.Module]:
    """A subclass of a layer that multiplies in 8 bits; one for equal classes.

    The function is a property of the class, which comes before the attribute, because it has to find the state of the
    layer that is called.
    """
    layer = find_layer(base)
    assert layer is not None
    assert layer.field is not None
    name = layer.field

    def multiply(self: nnx.Module) -> Float8Multiply | MultiplyWide:
        own, kept = layer.make_float8_multiply(format, lambda: _read_state(self)), vars(self).get(name)
        return dataclasses.replace(kept, own=own) if isinstance(kept, MultiplyWide) else own

    def keep(self: nnx.Module, function: Callable[..., Any]) -> None:  # when nnx makes the layer again out of its parts
        vars(self)[name] = function

    return make_subclass(base, {name: property(multiply, keep)}, (make_float8_layer, (base, format)))


def _read_state(layer: nnx.Module) -> State:
    return {name: variable.get_value() for name, variable in vars(layer)[OVERWRITE].items()}


def prepare_states(fun: Callable[..., Any], positions: Iterable[int], loss_scale: ArrayLike) -> Callable[..., Any]:
    """The same function, for which autodiff combines float8 state by max, and returns the state of true gradients."""

    @functools.wraps(fun)
    def call_prepared(*args: Any, **kwargs: Any) -> Any:
        states = find_states([args[position] for position in positions])
        before = {path: variable.get_value() for path, variable in states.items()}
        for path, value in before.items():
            states[path].set_value(prepare_leaf(path[-1], value, loss_scale))
        try:
            return fun(*args, **kwargs)
        finally:
            for path, value in before.items():
                states[path].set_value(value)

    return call_prepared


def find_states(model: PyTree) -> dict[Any, Float8State]:
    """The float8 state of the layers in a model, or in any tree of models, by path."""
    return {path: node for path, node in nnx.iter_graph(model, graph=True) if isinstance(node, Float8State)}


def check_state_types(model: PyTree, wrt: nnx.filterlib.Filter) -> None:
    """Checks that the float8 state among what is differentiated of a model, or of a tree of models, is `Float8State`.

    Args:
      model: an argument that is differentiated.
      wrt: the filter that says with respect to which of its Variables.

    Raises:
      ValueError: Variables of other types, or arrays without one, are float8 state by their names.
    """
    is_differentiated = nnx.filterlib.to_predicate(wrt)
    others = {}
    for path, node in nnx.iter_graph(model, graph=True):
        place = "/".join(map(str, path))
        if isinstance(node, jax.Array):
            others[place] = node
        elif isinstance(node, nnx.Variable) and not isinstance(node, Float8State) and is_differentiated(path, node):
            others[place] = node.get_raw_value()
    for name, (path, _) in zip(name_state(others), jax.tree_util.tree_leaves_with_path(others), strict=True):
        if name:
            raise ValueError(
                f"{jax.tree_util.keystr(path, simple=True, separator='/')!r} is float8 state by its name, and would be "
                "differentiated as a parameter: in nnx, each array of state has a Float8State. For example: self.state "
                "= nnx.data({name: jmp_policy.nnx.Float8State(x) for name, x in float8_state('float8').items()})."
            )


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
